"""What the sandbox can enforce on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NONE, RESTRICTED, NAMESPACED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Tier:
    """0: resource limits only. 1: with Landlock and seccomp, so that code sees no files but Python's and its own, opens
    no sockets, starts no programs. 2: with namespaces too, so that there is nothing else to see.

    Args:
        landlock: version of Landlock in use; 0 if none.
        seccomp: whether system calls are filtered.
        namespaces: those in use.
        bounds_threads: whether the kernel bounds the threads of each sandbox; else they are counted now and then.
        missing: why it is not more, in sentences.
    """

    landlock: int = 0
    seccomp: bool = False
    namespaces: tuple[str, ...] = ()
    bounds_threads: bool = False
    missing: tuple[str, ...] = ()

    @property
    def level(self) -> int:
        if not (self.landlock and self.seccomp):
            return NONE
        return NAMESPACED if self.namespaces else RESTRICTED

    def describe(self) -> dict[str, Any]:
        return {
            "tier": self.level,
            "landlock": self.landlock,
            "seccomp": self.seccomp,
            "namespaces": list(self.namespaces),
            "missing": list(self.missing),
        }
