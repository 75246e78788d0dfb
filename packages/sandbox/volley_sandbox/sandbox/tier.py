"""Confinement that the sandbox can enforce on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NONE, RESTRICTED, NAMESPACED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Tier:
    """Level of confinement.

    - 0: resource limits only.
    - 1: Landlock and seccomp as well. Code sees only Python's and its own files, opens no sockets and starts no
      programs.
    - 2: namespaces as well, so that nothing else is visible.

    Args:
        landlock: version of Landlock in use; 0 if none.
        seccomp: True if system calls are filtered.
        namespaces: namespaces in use.
        bounds_threads: True if the kernel bounds each sandbox's threads; otherwise they are counted periodically.
        missing: reasons why the level is not higher, as sentences.
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
