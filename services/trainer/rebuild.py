"""The policy as it was at a checkpoint, for training again; changes nothing in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.trainer import options as from_run
from services.trainer.backend import restored_leaves
from services.trainer.checkpoint import restore
from services.trainer.model.qwen3 import build, make_mesh
from services.trainer.orbax_arrays import OrbaxArrays
from services.trainer.policy import Policy
from services.trainer.settings import Tokens
from services.trainer.tunix_learner import make_logger
from shared.chat import ChatTokenizer
from shared.hub import model_folder
from shared.model_config import ModelConfig
from shared.schema import RunConfig


def policy_at(config: RunConfig, checkpoint: Path, root: Path) -> Policy:
    """Model, optimizer and reference of a checkpoint; `root` holds all of them. Raises ConfigError, WeightsError."""
    folder = model_folder(config.model.path, weights=False)
    described = ModelConfig.read(folder)
    options = from_run.model_options(config, folder)
    restored = restore(checkpoint, OrbaxArrays())
    mesh = make_mesh(options.mesh_shape, options.mesh_axes)
    model = build(described, restored_leaves(restored), mesh, dtype=options.dtype, remat=options.remat)
    reference = restore(root / restored.state.reference, OrbaxArrays()).params if restored.state.reference else None
    tokens = Tokens(described.vocab_size, ChatTokenizer(folder).pad_id)
    policy = Policy(model, from_run.policy_options(config, tokens), described.to_hf(), make_logger(), reference)
    policy.load_optimizer(restored.optimizer)
    return policy


def tensors_of(policy: Policy) -> dict[str, Mapping[str, Any]]:
    """The float32 parameters and the optimizer's state, as a resume would restore them."""
    contents = policy.contents()
    return {"params": contents.params if contents.master is None else contents.master, "optimizer": contents.optimizer}
