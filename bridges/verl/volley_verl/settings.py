"""Settings of this package inside verl's configuration.

    data.volley.env_url                                      address of the environment service
    actor_rollout_ref.rollout.custom.volley.servers          addresses of rollout servers, one a replica
    actor_rollout_ref.rollout.custom.volley.weights_dir      folder for new weights, which the servers read too
    actor_rollout_ref.rollout.custom.volley.max_response_length   most tokens of one turn
    actor_rollout_ref.rollout.custom.volley.update_mode      what new weights do to running requests

VOLLEY_ENV_URL stands in for the first. Tokens are files, named by VOLLEY_TOKEN_FILE_SERVICE and …_ADMIN.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

AGENT = "volley_episode"
"""Name of the agent loop."""
BACKEND = "volley"
"""Name of the rollout, of the checkpoint engine and of the reward manager."""
_ROLLOUT_KEYS = ("servers", "weights_dir", "max_response_length", "update_mode")


class SettingsError(ValueError):
    """A setting is missing, unknown or has no meaning here."""


def env_url(data: Mapping[str, Any]) -> str:
    """Return the address of the environment service. Raises SettingsError.

    Args:
        data: verl's section `data`.
    """
    url = (data.get("volley") or {}).get("env_url") or os.environ.get("VOLLEY_ENV_URL")
    if not url:
        raise SettingsError("the environment service has no address: set +data.volley.env_url or VOLLEY_ENV_URL")
    return str(url)


def of_rollout(rollout: Any) -> Mapping[str, Any]:
    """Return `custom.volley` of verl's section `rollout`, as DictConfig or as dataclass. Raises SettingsError."""
    found = (rollout.get("custom") or {}).get("volley") or {}
    if unknown := [key for key in found if key not in _ROLLOUT_KEYS]:
        raise SettingsError(f"actor_rollout_ref.rollout.custom.volley.{unknown[0]} is unknown; known: {_ROLLOUT_KEYS}")
    return found


def server_of(rollout: Any, replica_rank: int) -> str:
    """Return the address of a replica's server. Raises SettingsError."""
    servers = of_rollout(rollout).get("servers") or []
    if replica_rank >= len(servers):
        raise SettingsError(
            f"rollout replica {replica_rank} has no server: actor_rollout_ref.rollout.custom.volley.servers has "
            f"{len(servers)}; start as many Volley servers as verl makes replicas"
        )
    return str(servers[replica_rank])
