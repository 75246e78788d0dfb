"""Translate moved configuration keys, so that older files, runs and checkpoints keep their meaning.

The keys of the loss were in `grpo_config` when GRPO was the only algorithm; they are now in `algorithm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OLD, _NEW = "grpo_config", "algorithm"
_KEPT = ("epsilon", "epsilon_high", "loss_agg_mode", "beta", "kl_loss_mode", "sampler_is", "sampler_is_threshold")
_LOSS, _ESTIMATOR = "loss_algo", "advantage_estimator"
_SEQUENCE = "gspo-token"
_DEFAULTS = {"epsilon": 0.2, "epsilon_high": None, "loss_agg_mode": "token-mean"}
"""Defaults of the old keys that differ from the present defaults of some algorithm."""


def in_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a configuration tree to the present keys.

    Raises ValueError for a value that is given under both keys, or that the old key did not accept.
    """
    old, given = tree.get(_OLD), tree.get(_NEW)
    if not isinstance(old, Mapping) or not any(key in old for key in (*_KEPT, _LOSS, _ESTIMATOR)):
        return dict(tree)
    if given is not None:
        key = next(key for key in (*_KEPT, _LOSS, _ESTIMATOR) if key in old)
        now = "name" if key in (_LOSS, _ESTIMATOR) else key
        raise ValueError(f"{_OLD}.{key} is now {_NEW}.{now}, and the section {_NEW} is given too: move it there")
    rest = {key: value for key, value in old.items() if key not in (*_KEPT, _LOSS, _ESTIMATOR)}
    return {**tree, _OLD: rest, _NEW: _section(old)}


def in_flat(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a run's settings by dotted key; values already under the present keys take precedence."""
    old = {key.removeprefix(f"{_OLD}."): value for key, value in flat.items() if key.startswith(f"{_OLD}.")}
    if _LOSS not in old:
        return dict(flat)
    gone = {f"{_OLD}.{key}" for key in (*_KEPT, _LOSS, _ESTIMATOR)}
    moved = {f"{_NEW}.{key}": value for key, value in _section(old).items()}
    return moved | {key: value for key, value in flat.items() if key not in gone}


def _section(old: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: old[key] for key in _KEPT if key in old}
    loss, estimator = old.get(_LOSS, "grpo"), old.get(_ESTIMATOR, "grpo")
    if loss == _SEQUENCE:
        return {"name": loss, _ESTIMATOR: estimator, **_DEFAULTS, **kept}
    if loss != "grpo":
        raise ValueError(
            f"{_OLD}.{_LOSS}={loss!r} is none of the losses; the key is now {_NEW}.name, see docs/algorithms.md"
        )
    return {"name": estimator, **({} if estimator == "grpo" else _DEFAULTS), **kept}
