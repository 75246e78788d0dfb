"""Replay of archived groups from a retained checkpoint, compared bit for bit with the records.

`python -m volley_proof.replay.steps RUN_DIR --from-step K [--to-step M]`, or `RUN_DIR --refused VERSION` (see
`refused`), writes a JSON line a step to stdout, then the result, or an error as a problem body. It reads only, but for
`--tokens`, which writes shared.run.token_values. Equal bits need the same backend (devices, libraries, compiler flags).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from shared import config
from shared.errors import ConfigError, VolleyError, WeightsError, problem
from shared.run import token_values
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from volley_proof.replay import refused
from volley_proof.replay.recorded import COMPARED_METRICS, RecordedStep

if TYPE_CHECKING:
    from services.trainer.groups.group_buffer import ReadyGroup
    from services.trainer.learner.policy import Policy

_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class StepDifference:
    """First difference: `what` is "metric", "checksum", or the part of the checkpoint; `max_abs_diff` may be None."""

    step: int
    what: str
    name: str
    max_abs_diff: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """Replay and return the exit code: 0 same, 1 diverged or failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m volley_proof.replay.steps")
    parser.add_argument("run_dir", type=Path)
    begin = parser.add_mutually_exclusive_group(required=True)
    begin.add_argument("--from-step", type=int)
    begin.add_argument("--refused", metavar="VERSION")
    parser.add_argument("--to-step", type=int)
    parser.add_argument("--tokens", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        result = _replayed(arguments)
    except VolleyError as error:
        _print_line(problem(error))
        return 2 if isinstance(error, ConfigError) else 1
    except (OSError, ValueError) as error:  # from Orbax, if a trainer removes the checkpoint during the read
        _print_line(
            problem(
                WeightsError(
                    f"{arguments.run_dir} cannot be replayed: {error}"[:_MAX_DETAIL],
                    "try again: the run's trainer may have removed the checkpoint",
                )
            )
        )
        return 1
    _print_line(result)
    return 0 if result["ok"] else 1


def _replayed(arguments: argparse.Namespace) -> dict[str, Any]:
    folder: Path = arguments.run_dir.absolute()
    if arguments.refused:
        return refused.replay(folder, arguments.refused)
    return replay(folder, arguments.from_step, arguments.to_step, tokens=arguments.tokens)


def replay(folder: Path, first: int, last: int | None, *, tokens: bool = False) -> dict[str, Any]:
    """Retrain steps until the first divergence. With `tokens`, write the values of their tokens to the run's folder.

    Returns {ok, steps, first_divergence, compared_checkpoints, compared_metrics, compared_checksums}.

    Raises ConfigError, WeightsError, DecodeError.
    """
    stored = config.stored(folder)
    recorded = RecordedStep.read(folder, stored.config.run.name)
    steps = recorded.bounds(first, last)
    from services.trainer.groups.group_buffer import ready_group
    from volley_proof.replay.rebuild import RebuiltPolicy, tensors_of

    rebuilt = RebuiltPolicy(
        recorded.config_at(steps[0], stored), recorded.checkpoints[first], recorded.checkpoints[first].parent
    )
    counts, n, divergence = {"checkpoint": 0, "metric": 0, "checksum": 0}, 0, None
    for step in steps:
        held = [ready_group(group, payload, "") for group, payload in recorded.groups(step)]
        policy = rebuilt.policy_for(recorded.config_at(step, stored))
        if tokens:
            _write_tokens(recorded, policy, held, step)
        metrics = policy.step(held, WeightVersion(recorded.version(step).epoch, step - 1))
        n, compared = n + 1, []
        if step in recorded.checkpoints:
            compared.append("checkpoint")
            divergence = of_tensors(step, tensors_of(policy), recorded.checkpoints[step])
        checksum = recorded.checksums.get(metrics.version)
        if checksum is not None:
            compared.append("checksum")
            if divergence is None and checksum != policy.checksum():
                divergence = StepDifference(step, "checksum", "params", None)
        line = recorded.metrics.get(metrics.version)
        if line is not None:
            compared.append("metric")
            divergence = divergence or of_metrics(step, asdict(metrics), line)
        for what in compared:
            counts[what] += 1
        _print_line({"step": step, "loss": metrics.loss, "compared": _verdict(compared, divergence)})
        if divergence is not None:
            break
    if not any(counts.values()):
        raise ConfigError(
            "none of these steps has a retained checkpoint, a commit record or a line in metrics.jsonl",
            "choose another --to-step",
        )
    found = None if divergence is None else asdict(divergence)
    numbers = {"compared_checkpoints": counts["checkpoint"], "compared_metrics": counts["metric"]}
    numbers["compared_checksums"] = counts["checksum"]
    return {"ok": divergence is None, "steps": n, "first_divergence": found, **numbers}


def _write_tokens(recorded: RecordedStep, policy: Policy, held: Sequence[ReadyGroup], step: int) -> None:
    before = WeightVersion(recorded.version(step).epoch, step - 1)
    from volley_proof.replay.values import values_of  # imports JAX, which the command's own process lacks

    found = zip(held, values_of(policy, held, before), strict=True)
    values = {
        (one.ticket, one.sample_index): its
        for group, of_group in found
        for one, its in zip(group.group.trajectories, of_group, strict=True)
    }
    token_values.write(RunFolder(recorded.folder).tokens, recorded.run, recorded.version(step), values)


def _verdict(compared: Sequence[str], divergence: StepDifference | None) -> str:
    if divergence is not None:
        return f"{divergence.what} {divergence.name} differs"
    return f"same {' and '.join(compared)}" if compared else "nothing recorded to compare with"


def of_metrics(step: int, ours: Mapping[str, Any], line: Mapping[str, Any]) -> StepDifference | None:
    for name in COMPARED_METRICS:
        if ours[name] != line[name]:
            return StepDifference(
                step,
                "metric",
                name,
                _difference(np.float64(ours[name]), np.float64(np.nan if line[name] is None else line[name])),
            )
    return None


def of_tensors(step: int, ours: Mapping[str, Mapping[str, Any]], folder: Path) -> StepDifference | None:
    from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
    from services.trainer.checkpoints.store import restore

    restored = restore(folder, OrbaxArrays())
    theirs: Mapping[str, Mapping[str, np.ndarray]] = {"params": restored.params, "optimizer": restored.optimizer}
    for what, name, a, b in _pairs(ours, theirs):
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
            return StepDifference(step, what, name, _difference(a, b))
    return None


def _pairs(
    ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str, Any, Any]]:
    for what in ours:
        for name in sorted(ours[what].keys() | theirs[what].keys()):
            a, b = ours[what].get(name), theirs[what].get(name)
            yield what, name, None if a is None else np.asarray(a), None if b is None else np.asarray(b)


def _difference(a: Any, b: Any) -> float | None:
    if a is None or b is None or np.shape(a) != np.shape(b):
        return None
    largest = float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0.0))
    return largest if np.isfinite(largest) else None


def _print_line(line: Mapping[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
