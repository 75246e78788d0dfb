"""Find a run's external services.

`services.env.url` names an environment service, `services.rollout_urls` rollout servers. `volley train` always starts
orchestrator and trainer; if they run elsewhere, use `volley follow`.
"""

from __future__ import annotations

from shared.errors import ConfigError
from shared.services import SERVICES, ServiceInfo
from shared.services_schema import ServicesSection


def find(services: ServicesSection) -> dict[str, str]:
    """Return base addresses by name: env, rollout-0, …

    Raises ConfigError if the configuration names the address of a service that `volley train` starts itself.
    """
    found: dict[str, str] = {}
    for name, info in SERVICES.items():
        if not info.shared and getattr(services, name).url is not None:
            raise _started_here(info)
        found |= services.urls_of(name)
    return found


def _started_here(info: ServiceInfo) -> ConfigError:
    name = info.name
    if info.replicated:
        return ConfigError(
            f"services.{name}.url is the address with which one {name} server registers itself; `volley train` starts"
            " several and sets their addresses",
            f"remove it; list {name} servers that run elsewhere in services.{name}_urls",
        )
    return ConfigError(
        f"services.{name}.url is set, but `volley train` starts the {name} itself",
        "remove it; to watch a run started elsewhere, use `volley follow`",
    )
