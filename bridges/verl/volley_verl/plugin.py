"""Registers this package with verl, which imports it by the entry point `verl.plugins` in every process.

verl only logs an error of a plugin at level debug: `python -m volley_verl check` shows it.
"""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from volley_verl import agent_loop, reward, weights
from volley_verl.settings import BACKEND

REGISTERED = (agent_loop, reward, weights)
"""Modules that register their classes when they are imported."""


def _replica() -> type:
    from volley_verl.rollout import VolleyReplica

    return VolleyReplica


RolloutReplicaRegistry.register(BACKEND, _replica)
# No function of verl adds to this table, which its hybrid engine asks for the trainer's side of a rollout.
_ROLLOUT_REGISTRY[BACKEND, "async"] = "volley_verl.rollout.VolleyServerAdapter"
