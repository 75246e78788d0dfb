"""Inputs and outputs of `open_backend`, the seam between the trainer's wiring and its backend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.interfaces import TrainerBackend
from services.trainer.publishing.publications import ModelPublications
from services.trainer.settings import TokenLimits, TrainerSettings
from services.trainer.status import TrainerStatus
from shared.clients.env import EnvClient
from shared.models.chat import ChatTokenizer
from shared.models.origin import Origin
from shared.process.sinks import MetricsFanout
from shared.schema import RunConfig


@dataclass(frozen=True, slots=True)
class BackendInputs:
    """Inputs of `open_backend`.

    `folder` holds the model's config.json and tokenizer; `origin`, if set, has the first weights. The backend publishes
    versions to `publications` and sends lines of metrics to `sinks`.
    """

    config: RunConfig
    settings: TrainerSettings
    folder: Path
    tokenizer: ChatTokenizer
    origin: Origin | None
    publications: ModelPublications
    sinks: MetricsFanout = field(default_factory=MetricsFanout)


type TrainFirst = Callable[[EnvClient, TrainerStatus, Executor], Awaitable[None]]
"""Trains a new model before step 0; returns early if a stop is asked for."""


async def no_warm_start(*_: object) -> None:
    """Train nothing."""


@dataclass(frozen=True, slots=True)
class OpenedBackend:
    """Outputs of `open_backend`.

    `backend` trains on groups within the limits of `tokens`, and writes `checkpoints`. `close` releases the trainer's
    other processes.
    """

    backend: TrainerBackend
    checkpoints: CheckpointFolders
    tokens: TokenLimits
    warm_start: TrainFirst = no_warm_start
    close: Callable[[], None] = lambda: None
