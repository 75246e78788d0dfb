"""What a server serves, as values: they are replaced as a whole, and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from services.rollout.engines.base import Live, LoadedWeights, StagedWeights
from services.rollout.engines.probe import check_probe
from shared.errors import WeightsError


@dataclass(frozen=True, slots=True, eq=False)
class StagedUpdate:
    """Weights that were loaded from `path`, or, without one, as they were published: how to know them again, and
    `timings`, durations in seconds. `base` is the digest of what they are adapters of.

    Of published ones `manifest` is the digest of theirs, `beginning` that of their run, and `chunks` are what others
    may have from here.
    """

    path: Path | None
    version: str
    digest: str
    checksum: str
    timings: Mapping[str, float]
    probe_logprobs: np.ndarray | None = None
    probe_noise: float | None = None
    base: str | None = None
    manifest: str | None = None
    beginning: str | None = None
    chunks: frozenset[str] = frozenset()

    @classmethod
    def of(cls, found: StagedWeights, path: Path | None, loaded: LoadedWeights) -> Self:
        """What an engine has loaded."""
        return cls(
            path,
            found.version,
            found.digest,
            loaded.checksum,
            loaded.timings,
            found.probe_logprobs,
            found.probe_noise,
            found.base.digest if found.base else None,
        )

    def judge(self, live: Live, dtype: str) -> str | None:
        """What speaks against `live` being these weights."""
        if live.version != self.version:
            return f"the engine says that it serves {live.version}"
        if live.checksum != self.checksum:
            return f"the engine computes with other arrays: checksum {live.checksum}, {self.checksum} was loaded"
        if self.probe_logprobs is not None and live.logprobs is not None:
            try:
                check_probe(live.logprobs, self.probe_logprobs, self.probe_noise, dtype)
            except WeightsError as error:
                return str(error)
        return None


@dataclass(frozen=True, slots=True)
class NothingServes:
    """No weights were committed yet, or those that were belong to a run that was begun anew."""

    beginnings: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """`update` is what serves as `version`; None for weights that the engine was started with. Versions of the run up
    to `passed` are not loaded instead.
    """

    version: str
    update: StagedUpdate | None = None
    passed: str | None = None
    beginnings: int = 0


@dataclass(frozen=True, slots=True)
class Distrusted:
    """What the engine computes with is not what was loaded: no answer leaves until other weights are committed."""

    reason: str
    beginnings: int


type ServingState = NothingServes | Serving | Distrusted
"""`beginnings` counts how often what served was found not to be the run's: no answer may span two of them."""
