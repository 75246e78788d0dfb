"""Messages for a tracker, made of the lines of a run's files, and how far they have been sent.

A line counts as sent once the tracker has written it (`FLUSH`); its position is then in the run's folder. So each line
arrives at least once, also if either side is killed, and a tracker that was away gets what it missed. Lines that a
resumed run replaced are sent again, from the last one that is still there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from shared.errors import ConfigError, StorageUnavailable
from shared.files.storage import replace, storage
from shared.run import commits
from shared.run.folder import RunFolder
from volley.reporting.jsonl import JsonlTail, Mark, numbers
from volley.runs.run_file import read_record

type Message = dict[str, Any]

PROJECT = "volley"
FLUSH: Message = {"flush": True}
SAMPLE_COLUMNS = ("step", "task", "env", "success", "reward", "status", "end", "text")
_NOT_METRICS = frozenset({"step", "time"})
_MOST_TEXT = 16_384
_SAVE_EVERY = 64
"""Lines after which the position is written: so many are sent again if the process is killed."""


@dataclass(frozen=True, slots=True)
class SentPosition:
    """Run's id in the tracker, bytes sent of each file, and the last lines of each that were sent."""

    id: str
    sent: Mapping[str, int]
    marks: Mapping[str, Sequence[Mark]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> SentPosition:
        """Return the position in the file, or a new run's. Raises ConfigError if the file is damaged."""
        try:
            raw = orjson.loads(path.read_bytes())
            sent = {str(name): int(n) for name, n in raw["sent"].items()}
            of_files = raw["marks"].items()
            return cls(str(raw["id"]), sent, {name: [_mark(one) for one in marks] for name, marks in of_files})
        except FileNotFoundError:
            return cls(uuid4().hex[:12], {})
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"{path} is damaged", "remove it: the run is then sent again, as a new one") from error

    def write(self, path: Path) -> None:
        """Raises StorageUnavailable."""
        with storage(path.parent.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        marks = {name: [tuple(mark) for mark in of] for name, of in self.marks.items()}
        replace(path, orjson.dumps({"id": self.id, "sent": self.sent, "marks": marks}))


class Feed:
    """Unsent messages of one run for one tracker.

    Raises ConfigError if the folder is not that of a run. `unsaved` is why the position could not be written, as on a
    full disk: it is tried again with the next lines.
    """

    def __init__(self, folder: RunFolder, tracker: str) -> None:
        self._folder, self._tracker, self._path = folder, tracker, folder.tracker(tracker)
        position = SentPosition.read(self._path)
        self.id, self._saved = position.id, dict[str, int]()
        self.unsaved: StorageUnavailable | None = None
        files = {"sft": folder.sft, "train": folder.metrics, "eval": folder.evals, "samples": folder.samples}
        self._tails = {
            name: JsonlTail(path, offset=position.sent.get(name, 0), marks=position.marks.get(name, ()))
            for name, path in files.items()
        }

    def opening(self) -> Message:
        record = read_record(self._folder)
        if record is None:
            raise ConfigError(f"{self._folder.path} is not the folder of a run", "name one, such as runs/quickstart")
        config = {key: value for key, value in record.config.items() if not key.startswith("model.content.")}
        config |= {f"versions.{name}": version for name, version in record.versions.items()}
        config |= {f"origin.{key}": value for key, value in (record.origin or {}).items()}
        return {
            "open": self._tracker,
            "id": self.id,
            "run": self._folder.name,
            "project": PROJECT,
            "folder": str(self._folder.path.absolute()),
            "config": config,
        }

    def unsent(self) -> Iterator[Message]:
        """Yield messages. Asking for the next one says that the tracker has taken the last."""
        for tail in self._tails.values():
            tail.go_back()
        for name in ("sft", "train", "eval"):
            for n, line in enumerate(self._tails[name].records(), 1):
                yield _scalars(name, line)
                if n % _SAVE_EVERY == 0:
                    yield from self._flushed()
            yield from self._flushed()
        for step, lines in groupby(self._tails["samples"].new(), key=lambda line: line.get("step")):
            rows = [[_cell(line.get(column)) for column in SAMPLE_COLUMNS] for line in lines]
            yield {"table": "samples", "step": step, "columns": list(SAMPLE_COLUMNS), "rows": rows}
        yield from self._flushed()

    def facts(self) -> Message:
        """Message with the newest version and the head of its hash chain (shared.run.chain), which `verify` checks."""
        head = commits.newest(self._folder)
        found = {} if head is None else {"version": str(head.version)}
        if head is not None:
            found |= {"ledger.trained": head.chain.steps, "ledger.ended": head.chain.voids}
        return {"facts": found}

    def _flushed(self) -> Iterator[Message]:
        """Yield the message that makes the tracker write what it has, and save the position afterwards."""
        sent = {name: tail.offset for name, tail in self._tails.items()}
        if sent != self._saved:
            yield FLUSH
            marks = {name: list(tail.marks or ()) for name, tail in self._tails.items()}
            try:
                SentPosition(self.id, sent, marks).write(self._path)
            except StorageUnavailable as error:
                self.unsaved = error
            else:
                self._saved, self.unsaved = sent, None


def _mark(raw: Any) -> Mark:
    return Mark(int(raw[0]), int(raw[1]), str(raw[2]))


def _scalars(group: str, line: Mapping[str, Any]) -> Message:
    env = line.get("env")
    return {
        "scalars": {key: value for key, value in numbers(line) if key not in _NOT_METRICS},
        "group": f"{group}/{env}" if isinstance(env, str) else group,
        "step": line.get("step", 0),
        "time": line.get("time", time.time()),
    }


def _cell(value: Any) -> Any:
    return value[:_MOST_TEXT] if isinstance(value, str) else value
