"""The policy as it was at a checkpoint, for training again, under one configuration or several in turn; changes nothing
in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer import options as from_run
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import read_base, restore
from services.trainer.learner.backend import assembled, restored_leaves
from services.trainer.learner.policy import Policy
from services.trainer.settings import TokenLimits
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.hub import model_folder
from shared.schema import RunConfig


class RebuiltPolicy:
    """What a run's trainer has: model, optimizer and reference of a checkpoint; `root` holds all of them.

    Raises ConfigError, WeightsError.
    """

    def __init__(self, config: RunConfig, checkpoint: Path, root: Path) -> None:
        self._root = root
        self._restored = restore(checkpoint, OrbaxArrays())
        adapter, reference = self._restored.adapter, self._restored.state.reference
        self._base = read_base(root, adapter, OrbaxArrays()) if adapter else None
        self._reference = restore(root / reference, OrbaxArrays()).params if reference else None
        self._config, self.policy = config, self._policy(config)

    def under(self, config: RunConfig) -> Policy:
        """The policy that goes on from here under this configuration, as after a restart of the trainer with it."""
        if config != self._config:
            now = {
                what: {name: np.asarray(value) for name, value in part.items()}
                for what, part in tensors_of(self.policy).items()
            }
            self._restored = replace(self._restored, params=now["params"], optimizer=now["optimizer"])
            self._config, self.policy = config, self._policy(config)
        return self.policy

    def _policy(self, config: RunConfig) -> Policy:
        folder = model_folder(config.model.path, self._root.parent)
        described = ModelConfig.read(folder)
        options = from_run.model_options(config, folder)
        model = assembled(described, options, restored_leaves(self._restored, self._base))
        tokens = TokenLimits(described.vocab_size, ChatTokenizer(folder).pad_id)
        policy = Policy(model, from_run.policy_options(config, tokens), described.to_hf(), self._reference)
        policy.load_optimizer(self._restored.optimizer)
        return policy


def tensors_of(policy: Policy) -> dict[str, Mapping[str, Any]]:
    """The float32 parameters under training and the optimizer's state, as a resume would restore them."""
    contents = policy.contents()
    return {"params": contents.params if contents.master is None else contents.master, "optimizer": contents.optimizer}
