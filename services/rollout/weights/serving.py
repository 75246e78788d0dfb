"""States of a server's weights, as immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from services.rollout.engines.probe import check_probe
from services.rollout.engines.staged import Live, LoadedWeights, StagedWeights
from services.rollout.weights.failures import FailedVersion
from shared.errors import NotReady, Unavailable, WeightsError, WeightsUnpublished
from shared.types import WeightVersion


@dataclass(frozen=True, slots=True, eq=False)
class StagedUpdate:
    """Weights that the engine has loaded: from `path`, or as a published version if `path` is None.

    `digest`, `checksum` and the probe identify them; `timings` are durations in seconds; `base` is the digest of the
    base if they are adapters. For a published version `manifest` is the digest of its manifest, `run_id` identifies
    the run that published it, and `chunks` are those that other servers may pull from here.
    """

    path: Path | None
    version: str
    digest: str
    checksum: str
    timings: Mapping[str, float]
    probe_logprobs: np.ndarray | None = None
    probe_noise: np.ndarray | None = None
    base: str | None = None
    manifest: str | None = None
    run_id: str | None = None
    chunks: frozenset[str] = frozenset()

    @classmethod
    def of(cls, found: StagedWeights, path: Path | None, loaded: LoadedWeights) -> Self:
        """Build the record of weights that the engine has loaded."""
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

    def difference(self, live: Live, dtype: str) -> str | None:
        """Describe how `live` differs from these weights; None if it does not.

        Empty checksums, and no probe, are those of engines without the capability (see `engines.base.Engine`).
        """
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
    """No weights were committed yet, or the run was restarted in an emptied folder since."""

    n_resets: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """Weights serve as `version`.

    `update` is None for weights that the engine was started with. Versions of the run up to `passed` are not loaded in
    their place.
    """

    version: str
    update: StagedUpdate | None = None
    passed: str | None = None
    n_resets: int = 0


@dataclass(frozen=True, slots=True)
class Distrusted:
    """The engine's arrays are not those that were loaded; no answer leaves until other weights are committed."""

    reason: str
    n_resets: int


type ServingState = NothingServes | Serving | Distrusted
"""`n_resets` counts how often the serving weights turned out not to be the run's; no answer may span a reset."""


def is_newer(candidate: str, state: ServingState) -> bool:
    """Return whether a version is newer than those that are no longer loaded (`Serving.passed`)."""
    passed = WeightVersion.of_name(state.passed) if isinstance(state, Serving) and state.passed is not None else None
    return passed is None or WeightVersion.parse(candidate) > passed


def why_not_ready(state: ServingState, failed: FailedVersion | None) -> Unavailable | None:
    """Return the reason why no weights serve; None if they do."""
    match state:
        case Serving():
            return None
        case Distrusted(reason):
            return NotReady(reason)
        case NothingServes() if failed is not None:
            return NotReady(f"weights {failed.version} cannot be loaded: {failed.reason}")
        case NothingServes():
            return WeightsUnpublished("no weights are published yet")
