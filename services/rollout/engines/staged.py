"""Weights as an engine stages, commits and reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shared.run.checkpoint_files import ManifestFile, ManifestLeaf

CommitMode = Literal["retract", "abort", "in_place"]


@dataclass(frozen=True, slots=True)
class StagedBase:
    """Base weights of adapters, in `folder` below `params/`.

    An engine reads the base once and keeps it for later adapters of the same `digest`. It serves the base plus `scale`
    times the product of each adapter's two matrices (shared.models.adapter).
    """

    folder: str
    digest: str
    files: tuple[ManifestFile, ...]
    tree: tuple[ManifestLeaf, ...]
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class StagedWeights:
    """Weights to stage. `folder` is a checkpoint with an Orbax folder at `below`, a folder of chunks
    (shared.published.chunks), or a Hugging Face folder, as `kind` says.

    For chunks, `files` are the chunks of the version's stream in order, each named by its digest, and `tree` lists the
    stream's arrays in order; a `base` consists of chunks as well. Chunks that are still being pulled arrive in the
    order that `seed` draws (shared.published.order).

    For a checkpoint, `files` are those of its manifest. An engine reads each file once (see
    `shared.run.checkpoint_files.copy_files`) and loads the same bytes that it has hashed. They must hold exactly the
    leaves of `tree`. If there is a probe (int32[n] ids, float32[n-1] log-probabilities of all but the first, and
    float32[n-1] noise of each in nats, if known), the engine's log-probabilities must agree with it. If there is a
    `base`, the weights are adapters of it.
    """

    folder: str
    version: str
    digest: str = ""
    kind: Literal["orbax", "chunks", "hf"] = "orbax"
    below: str = ""
    files: tuple[ManifestFile, ...] = ()
    tree: tuple[ManifestLeaf, ...] = ()
    probe_ids: np.ndarray | None = None
    probe_logprobs: np.ndarray | None = None
    probe_noise: np.ndarray | None = None
    base: StagedBase | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Result of staging: `checksum` of the arrays' bits; `timings` are durations in seconds."""

    checksum: str
    timings: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """Weights that the next step will use: version, checksum of the arrays, and log-probabilities of the probe.

    `logprobs`: float32[m] of the first m + 1 tokens of the probe that was staged with the version; None without one.
    """

    version: str | None
    checksum: str
    logprobs: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CommitResult:
    """Effect of a commit on running requests; decoding stood still for `pause_s`, and `live` serves since."""

    version: str
    previous: str | None
    continued: int
    aborted: int
    pause_s: float
    live: Live
