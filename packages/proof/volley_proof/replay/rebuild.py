"""Policy restored from a checkpoint, for retraining under one or several configurations. Reads the folder only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.trainer import options as from_run
from services.trainer.backend.assembly import assembled, restored_leaves
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import read_base, restore
from services.trainer.learner.policy import Policy
from services.trainer.settings import TokenLimits
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.content import with_content
from shared.models.hub import model_folder
from shared.schema import RunConfig


class RebuiltPolicy:
    """Model, optimizer and reference of a checkpoint; `root` is the folder of checkpoints.

    Raises ConfigError, WeightsError.
    """

    def __init__(self, config: RunConfig, checkpoint: Path, root: Path) -> None:
        folder = model_folder(config.model.path, root.parent)
        with_content(config, folder)  # raises if the model changed: its steps would differ without a reason
        restored = restore(checkpoint, OrbaxArrays())
        adapter, reference = restored.adapter, restored.state.reference
        base = read_base(root, adapter, OrbaxArrays()) if adapter else None
        frozen = restore(root / reference, OrbaxArrays()).params if reference else None
        described = ModelConfig.read(folder)
        model = assembled(described, from_run.model_options(config, folder), restored_leaves(restored, base))
        self._tokens = TokenLimits(described.vocab_size, ChatTokenizer(folder).pad_id)
        self._config, options = config, from_run.policy_options(config, self._tokens)
        self.policy = Policy(model, options, described.to_hf(), frozen)
        self.policy.load_optimizer(restored.optimizer)

    def policy_for(self, config: RunConfig) -> Policy:
        """Return the policy under this configuration, as after a restart of the trainer with it."""
        if config != self._config:
            self.policy.apply_options(from_run.policy_options(config, self._tokens))
            self._config = config
        return self.policy


def tensors_of(policy: Policy) -> dict[str, Mapping[str, Any]]:
    """Return the trained float32 parameters and the optimizer state, as a resume would restore them."""
    contents = policy.contents()
    return {"params": contents.params if contents.master is None else contents.master, "optimizer": contents.optimizer}
