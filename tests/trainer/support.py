"""Small models, rows and groups for the trainer's tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from services.trainer.batches.batch import Row
from services.trainer.learner.critic import Critic
from services.trainer.learner.policy import Policy
from services.trainer.learner.scoring import Scorer
from services.trainer.learner.train_step import Learner
from services.trainer.models import family
from shared.models.config import ModelConfig
from shared.models.names import from_hf, hf_name
from shared.types import Group, Trajectory, VersionSpan
from tests.support import models

CONFIG = models.tiny_config(vocab_size=96, hidden_size=32, intermediate_size=64, head_dim=16)


def model_of(
    weights: models.Weights, config: dict[str, Any], mesh: jax.sharding.Mesh | None = None, **options: Any
) -> family.Model:
    shape = ModelConfig.parse(config)
    mesh = mesh or family.make_mesh((1, 1), ("fsdp", "tp"))
    return family.build(shape, partial(_leaf, weights), mesh, **({"dtype": "float32"} | options))


def _leaf(weights: models.Weights, name: str, size: tuple[int, ...]) -> np.ndarray:
    return from_hf(name, weights[hf_name(name)], size)


_PROGRAMS = {
    Scorer: ("_score", "_score_plain", "_score_exactly"),
    Learner: ("_gradient", "_apply", "_add"),
    Critic: ("_values",),
}
_KNOWN: list[tuple[Any, Policy]] = []


def sharing(one: Policy) -> Policy:
    """Let a policy run the programs of the first policy of the same model and options, as compiled; its parameters and
    its state stay its own, for programs take them as arguments.
    """
    options = one.options
    kind = nnx.graphdef(one.model), options.algorithm, options.temperature, options.optimizer, options.critic
    first = next((known for of, known in _KNOWN if of == kind), None)
    if first is None:
        _KNOWN.append((kind, one))
        return one
    pairs: list[tuple[Any, Any]] = [(one._scorer, first._scorer), (one._learner, first._learner)]
    if one._critic is not None and first._critic is not None:
        pairs += [(one._critic, first._critic), (one._critic._learner, first._critic._learner)]
    for to, from_ in pairs:
        if type(to) in _PROGRAMS and type(to) is type(from_):
            for name in _PROGRAMS[type(to)]:
                setattr(to, name, getattr(from_, name))
    return one


def rows(n: int, seed: int = 0, longest: int = 24, vocab: int = 96) -> list[Row]:
    """Multi-turn rows of unequal length: prompt, sampled tokens, a stretch of environment tokens, sampled tokens."""
    rng = np.random.default_rng(seed)
    return [_row(rng, int(rng.integers(12, longest + 1)), vocab) for _ in range(n)]


def _row(rng: np.random.Generator, length: int, vocab: int) -> Row:
    mask = np.ones(length, np.uint8)
    mask[:4], mask[7:9] = 0, 0
    behaviour = np.where(mask, -4.5 + 0.4 * rng.standard_normal(length), 0).astype(np.float32)
    return Row(rng.integers(1, vocab, length).astype(np.int32), mask, behaviour, mask, mask * rng.standard_normal())


def group(ticket: int, version: str, *, n: int = 2, seed: int = 0, length: int = 16, vocab: int = 96) -> Group:
    """A complete group whose content is a pure function of (ticket, seed); all tokens are labelled `version`."""
    rng = np.random.default_rng([seed, ticket])
    return Group(
        ticket,
        "frozen_lake",
        f"train/{ticket}",
        tuple(_trajectory(rng, ticket, i, version, length, vocab) for i in range(n)),
    )


def _trajectory(
    rng: np.random.Generator, ticket: int, sample_index: int, version: str, length: int, vocab: int
) -> Trajectory:
    row = _row(rng, length, vocab)
    reward = float(rng.integers(0, 2))
    return Trajectory(
        ticket=ticket,
        sample_index=sample_index,
        attempt=0,
        env="frozen_lake",
        task=f"train/{ticket}",
        prompt_len=4,
        token_ids=row.ids,
        loss_mask=row.mask,
        logprobs=row.behaviour,
        versions=(VersionSpan(version, 4, 7), VersionSpan(version, 9, length)),
        turns=(),
        reward=reward,
        success=reward > 0,
        status="completed",
    )


def write_shards(folder: Path, config: dict[str, Any], weights: models.Weights) -> Path:
    """A Hugging Face folder with the weights in two safetensors files and an index."""
    import json

    from safetensors.numpy import save_file

    models.write_hf(folder, config)
    names = sorted(weights)
    where = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    return folder
