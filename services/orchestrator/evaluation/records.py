"""Lines of evals.jsonl: results of evaluations.

Invariant: a record counts for its step only if the weights it measured are ancestors of the present ones. A step that
was undone and made again is measured again; of several records that count, the last is the step's.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from shared.errors import DecodeError
from shared.files import storage
from shared.process import telemetry
from shared.run.data import Digests
from shared.run.lineage import in_lineage
from shared.types import ASSISTANT, Lineage, Trajectory, WeightVersion

_log = telemetry.Log("records")


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One line.

    `version_min` and `version_max` are over all sampled tokens, which `tokens` counts; `ends` are shares of the
    episodes. `env` is None, and absent in the file, for the run's main environment. `data` are the digests of the
    environment's data, absent if it has none.
    """

    step: int
    version_min: str
    version_max: str
    n_tasks: int
    success: float
    reward_mean: float
    turns_mean: float
    tokens: int
    elapsed_s: float
    failed: int
    ends: Mapping[str, float]
    env: str | None = None
    data: Digests | None = None

    def counts(self, lineage: Lineage) -> bool:
        """True if the measured weights belong to the lineage, or no lineage is known."""
        return not lineage or all(
            in_lineage(WeightVersion.parse(v), lineage) for v in (self.version_min, self.version_max)
        )


_OPTIONAL = ("env", "data")
_RECORD = TypeAdapter(EvalRecord)


def summarize(
    step: int,
    trajectories: Sequence[Trajectory],
    failed: int,
    elapsed_s: float,
    env: str | None = None,
    data: Digests | None = None,
) -> EvalRecord:
    """Return means over the trajectories (at least one, finite rewards); failed tasks are only counted."""
    n = len(trajectories)
    versions = [WeightVersion.parse(span.version) for t in trajectories for span in t.all_spans()]
    return EvalRecord(
        step=step,
        version_min=str(min(versions)),
        version_max=str(max(versions)),
        n_tasks=n + failed,
        success=sum(t.success for t in trajectories) / n,
        reward_mean=mean([t.reward for t in trajectories]),
        turns_mean=sum(turn.role == ASSISTANT for t in trajectories for one in (t, *t.branches) for turn in one.turns)
        / n,
        tokens=sum(t.n_sampled for t in trajectories),
        elapsed_s=round(elapsed_s, 3),
        failed=failed,
        ends={end: count / n for end, count in Counter(str(t.end) for t in trajectories).items()},
        env=env,
        data=data or None,
    )


def counting(records: Sequence[EvalRecord], lineage: Lineage) -> list[EvalRecord]:
    """Return the last record that counts for each step and environment, sorted by step, the main environment last."""
    last = {(record.step, record.env is None, record.env or ""): record for record in records if record.counts(lineage)}
    return [last[key] for key in sorted(last)]


def read_records(path: Path) -> list[EvalRecord]:
    """Read all whole, valid lines; blank an incomplete last line in the file. Skipped steps are measured again."""
    storage.blank_torn_line(path)
    records: list[EvalRecord] = []
    for n, line in enumerate(storage.whole_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = _RECORD.validate_json(line, strict=True)
            for version in (record.version_min, record.version_max):
                WeightVersion.parse(version)
        except (ValidationError, DecodeError) as error:
            _log.warning("a damaged record was skipped", file=path.name, line=n, reason=str(error))
        else:
            records.append(record)
    return records


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append JSON lines and make them durable. Raises StorageUnavailable; then none of them is there."""
    storage.append(path, b"".join(orjson.dumps(row) + b"\n" for row in rows), durable=True)


def as_rows(records: Sequence[EvalRecord]) -> list[dict[str, Any]]:
    """Return records as the lines of the file."""
    return [
        {key: value for key, value in dataclasses.asdict(record).items() if key not in _OPTIONAL or value is not None}
        for record in records
    ]
