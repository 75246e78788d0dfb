"""Environments of packages that are installed beside the service, which name them as entry points of one group.

Whoever runs the service has installed them; a request may choose among them, and among nothing else. They are not
imported here: a package is packed as it lies, and runs in sandboxes like everything that is submitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from services.env.sandbox.packages.archives import ENTRY_GROUP
from shared.errors import ConfigError, InputError, NotFound
from shared.run.sources import content_of, find


@dataclass(frozen=True, slots=True)
class InstalledEnvironment:
    """`import_path` is package.module:Class; `package` the distribution that names it, with its version."""

    name: str
    import_path: str
    package: str

    def describe(self) -> dict[str, str]:
        return {"name": self.name, "import_path": self.import_path, "package": self.package}


@cache
def installed() -> tuple[InstalledEnvironment, ...]:
    """Those there are, by name; looked for once in a process. Blocks on disk."""
    from importlib.metadata import entry_points

    found = [
        InstalledEnvironment(one.name, one.value, f"{one.dist.name} {one.dist.version}" if one.dist else "")
        for one in entry_points(group=ENTRY_GROUP)
    ]
    return tuple(sorted(found, key=lambda one: one.name))


def archive_of(import_path: str) -> bytes:
    """The package of an installed environment as a zip file. Raises NotFound listing those there are, InputError.
    Blocks on disk.
    """
    if import_path not in {one.import_path for one in installed()}:
        known = ", ".join(one.import_path for one in installed()) or "none"
        raise NotFound(
            f"{import_path[:120]!r} is no environment of a package that is installed beside the service",
            f"installed: {known}; a package names its environments as entry points of the group {ENTRY_GROUP}",
        )
    try:
        return content_of(find(import_path, None))[0]
    except ConfigError as error:
        raise InputError(error.detail, error.hint) from error
