"""Options of supervised training, read once from the run's configuration."""

from __future__ import annotations

from services.trainer.options import layout, optimizer_options
from services.trainer.settings import TokenLimits
from shared.run_config import section_of
from shared.schema import RunConfig
from volley_supervised.learner.steps import SupervisedOptions
from volley_supervised.sections import DpoSection, SftSection


def supervised_options(config: RunConfig, tokens: TokenLimits) -> SupervisedOptions:
    """Read the options. Raises as `layout`."""
    sft, beta = section_of(config, SftSection), section_of(config, DpoSection).beta
    n_rows = sft.batch_size * (2 if config.mode == "dpo" else 1)
    return SupervisedOptions(
        max_steps=sft.max_steps,
        epochs=sft.epochs,
        batch_size=sft.batch_size,
        seed=config.run.seed,
        layout=layout(config, tokens, n_rows),
        optimizer=optimizer_options(sft.optimizer_config, sft.max_steps),
        beta=beta if config.mode == "dpo" else None,
        offload_reference=config.trainer.offload_reference,
    )
