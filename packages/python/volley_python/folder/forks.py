"""Read and write fork.json: the other run's log that this run trains from, and its bounds.

Invariant: a fork copies the first steps of the other run under its own name, and archives every group that it trains
on. So its folder alone proves what was trained; the other run's folder is read only while the fork takes groups from
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import orjson

from shared import own_rules
from shared.errors import ConfigError, DecodeError
from shared.files import storage
from shared.files.reading import read_file
from shared.run.folder import RunFolder
from shared.run.lineage import ForkPoint, epoch_of, in_lineage
from shared.run.state import TrainerState, initial_state, parse_forks
from shared.types import WeightVersion

REWARDS = ("data.rewards", "data.env_config")
"""Settings that decide the rewards of a fork's episodes."""
FREE = (*REWARDS, *own_rules.KEYS)
"""Settings that may differ between a run and its fork although they may not change during a run."""
_MOST_BYTES = 2**20
_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Fork:
    """Origin and bounds of a fork.

    `source` is the absolute folder of the other run, `version` its newest one when it was forked. Groups of the steps
    after `step`, and up to `version`, are trained in the order of the log, with the archived rewards or, if `mended`,
    with new ones from environments (`judged_by` names another environment, by that of a group). Training ends after
    step `last`, or before a step whose groups have an effective share below `least_share`.

    `points` are the fork points of the lineage, the newest last. The steps up to `step` were copied. Those up to
    `rebuilt` are trained again under the other run's settings and rewards, because no checkpoint of it was retained.
    """

    source: str
    step: int
    last: int
    version: str
    points: tuple[ForkPoint, ...]
    least_share: float
    mended: bool = False
    rebuilt: int = 0
    judged_by: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def run(self) -> str:
        """Name of the other run."""
        return self.points[-1].run

    @property
    def head(self) -> TrainerState:
        """Position of the other run when it was forked: step and lineage alone."""
        version = WeightVersion.parse(self.version)
        return replace(initial_state(0), epoch=version.epoch, step=version.step, lineage=self.points[-1].lineage)

    @property
    def origin(self) -> dict[str, str]:
        """Version of the other run that the fork follows, as `shared.models.origin` has it, and the log's end."""
        lineage = self.points[-1].lineage
        version = WeightVersion(epoch_of(self.last_source_step, lineage) or lineage[0][0], self.last_source_step)
        return {"run": self.run, "folder": self.source, "version": str(version), "log_end": self.version}

    @property
    def last_source_step(self) -> int:
        """Last step under the other run's settings and rewards."""
        return max(self.step, self.rebuilt)

    def log(self, folder: RunFolder, step: int) -> Path:
        """Return the archive with the groups of a step; `folder` is the fork's."""
        return folder.mended if self.mended and step > self.last_source_step else RunFolder(Path(self.source)).archive

    def _check(self) -> None:
        """Raises TypeError, ValueError or DecodeError."""
        if any(type(step) is not int or step < 0 for step in (self.step, self.last, self.rebuilt)):
            raise TypeError("a step is not a count")
        if type(self.mended) is not bool or type(self.least_share) not in (int, float):
            raise TypeError("`mended` or `least_share` has a wrong type")
        if not all(type(text) is str for text in (self.source, self.version, *chain(*self.judged_by.items()))):
            raise TypeError("`source`, `version` or `judged_by` is not text")
        if not self.points or self.points[-1].step != self.step:
            raise ValueError("the newest fork point does not belong to `step`")
        if not in_lineage(WeightVersion.parse(self.version), self.points[-1].lineage):
            raise ValueError("`version` is not in the lineage of the newest fork point")

    def write(self, folder: RunFolder) -> None:
        """Write fork.json. Raises StorageFull."""
        text = orjson.dumps({"schema": _SCHEMA, **asdict(self)}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        storage.replace(folder.fork, text)

    @classmethod
    def read(cls, folder: RunFolder) -> Self | None:
        """Read fork.json; None if the run is not a fork. Raises ConfigError if it cannot be read."""
        try:
            raw: Mapping[str, Any] = orjson.loads(read_file(folder.fork, _MOST_BYTES))
            if raw["schema"] != _SCHEMA:
                raise ValueError(f"schema {raw['schema']!r}, expected {_SCHEMA}")
            fields = {name: raw[name] for name in cls.__slots__ if name != "points"}
            made = cls(**fields, points=parse_forks(raw["points"]))
            made._check()
            return made
        except FileNotFoundError:
            return None
        except (OSError, KeyError, TypeError, ValueError, AttributeError, DecodeError) as error:
            raise ConfigError(
                f"{folder.fork} cannot be read: {error!r}"[:300], "remove the fork's folder, and fork again"
            ) from error


def read(folder: RunFolder) -> Fork | None:
    """Read fork.json; None if the run is not a fork, or the file cannot be read."""
    with suppress(ConfigError):
        return Fork.read(folder)
    return None
