"""Versions that could not be loaded, and when they are retried."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.errors import Conflict, DeviceFailed, Forbidden, OutOfMemory, VolleyError, WeightsError
from shared.run.checkpoint_files import MANIFEST, MAX_MANIFEST_BYTES, digest

RETRY_BAD_S = 30.0
"""Delay before weights are loaded again; it doubles with each further refusal for the same reason."""
MOST_REFUSALS = 3
"""Refusals of the same weights for the same reason, after which they are not loaded again."""
_REFUSALS = WeightsError, Forbidden, DeviceFailed


@dataclass(frozen=True, slots=True)
class FailedVersion:
    """Version that could not be loaded; `at` is a time of the monotonic clock.

    `content` is the digest of its manifest: a run restarted in an emptied folder reuses version names.

    `refusals` counts how often in a row its weights were refused, or the device failed, for the same reason; 0 if
    another try may succeed without other weights, such as one with more free memory.
    """

    version: str
    at: float
    reason: str
    refusals: int = 0
    content: str = ""

    def is_of(self, version: str, content: str) -> bool:
        """True if these weights failed, not others of the same name."""
        return (self.version, self.content) == (version, content)

    @classmethod
    def of(cls, version: str, content: str, error: VolleyError, before: FailedVersion | None) -> Self:
        """Build the record of a failure; `before` is the last one, if nothing was loaded since."""
        reason, refusals = str(error), int(isinstance(error, _REFUSALS))
        if (
            refusals
            and before
            and before.is_of(version, content)
            and _without_numbers(before.reason) == _without_numbers(reason)
        ):
            refusals += before.refusals
        return cls(version, time.monotonic(), reason, refusals, content)


def content_of(folder: Path) -> str:
    """Return the digest of a checkpoint's manifest; empty if it cannot be read now. Blocks on disk."""
    with suppress(OSError, VolleyError):
        return digest(folder / MANIFEST, most=MAX_MANIFEST_BYTES)
    return ""


def _without_numbers(reason: str) -> str:
    """Remove the numbers of a reason: they may differ slightly between two computations on the same weights."""
    return re.sub(r"\d[\d.,e+-]*", "", reason)


class LoadFailures:
    """Failures to load the run's newest version since something was loaded. `last` is the last one."""

    def __init__(self) -> None:
        self.last: FailedVersion | None = None

    @property
    def final(self) -> FailedVersion | None:
        """The last failure, if only other weights can help."""
        return self.last if self.last is not None and self.last.refusals >= MOST_REFUSALS else None

    def delays(self, version: str, content: str) -> bool:
        """True if the version must not be tried now: it failed recently, or for good."""
        last = self.last
        if last is None or not last.is_of(version, content):
            return False
        return last is self.final or time.monotonic() < last.at + RETRY_BAD_S * 2 ** max(0, last.refusals - 1)

    def check(self, version: str, content: str) -> None:
        """Raise WeightsError if the version failed for good."""
        if (final := self.final) is not None and final.is_of(version, content):
            raise WeightsError(
                final.reason, f"failed {final.refusals} times: publish other weights or restart the server"
            )

    @contextmanager
    def recording(self, version: str, content: str) -> Iterator[None]:
        """Record whether the version was loaded or could not be."""
        try:
            yield
        except (*_REFUSALS, OutOfMemory, Conflict) as error:
            self.last = FailedVersion.of(version, content, error, self.last)
            raise
        self.last = None
