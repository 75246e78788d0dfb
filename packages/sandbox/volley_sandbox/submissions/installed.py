"""Environments of packages installed beside the service, declared as entry points of one group.

The service's operator has installed them; a request may choose among them only. They are not imported here: a package
is packed as it is on disk, and runs in sandboxes like every submission.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from shared.errors import ConfigError, InputError, NotFound
from shared.run.sources import find
from volley_python.submissions.packing import content_of
from volley_sandbox.sandbox.packages.archives import ENTRY_GROUP


@dataclass(frozen=True, slots=True)
class InstalledEnvironment:
    """`import_path` is package.module:Class; `package` is the distribution that declares it, with its version."""

    name: str
    import_path: str
    package: str

    def describe(self) -> dict[str, str]:
        return {"name": self.name, "import_path": self.import_path, "package": self.package}


@cache
def installed() -> tuple[InstalledEnvironment, ...]:
    """List them by name, cached for the process. Blocks on disk."""
    from importlib.metadata import entry_points

    found = [
        InstalledEnvironment(one.name, one.value, f"{one.dist.name} {one.dist.version}" if one.dist else "")
        for one in entry_points(group=ENTRY_GROUP)
    ]
    return tuple(sorted(found, key=lambda one: one.name))


def archive_of(import_path: str) -> bytes:
    """Pack the package of an installed environment into a zip file. Blocks on disk.

    Raises NotFound, which lists the installed ones, and InputError.
    """
    if import_path not in {one.import_path for one in installed()}:
        known = ", ".join(one.import_path for one in installed()) or "none"
        raise NotFound(
            f"{import_path[:120]!r} is not an environment of a package installed beside the service",
            f"installed: {known}; a package names its environments as entry points of the group {ENTRY_GROUP}",
        )
    try:
        return content_of(find(import_path, None))[0]
    except ConfigError as error:
        raise InputError(error.detail, error.hint) from error
