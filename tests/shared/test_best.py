"""The best version of a run: the one that solved the most held-out tasks, where a failed task is not solved."""

from pathlib import Path

import orjson
import pytest

from shared.run.best import best_version
from volley.reporting.intervals import success_rates
from volley_dashboard.report.compare import ComparedRun, table

LINEAGE = [(1, 0)]


def evaluation(step: int, solved: int, played: int, failed: int = 0, reward: float | None = None) -> dict[str, object]:
    version = f"e000001-s{step:06d}"
    success = solved / played
    mean = success if reward is None else reward
    row = {"step": step, "version_min": version, "version_max": version, "n_tasks": played + failed, "failed": failed}
    return row | {"success": success, "reward_mean": mean}


def best(tmp_path: Path, *rows: dict[str, object]) -> int | None:
    (tmp_path / "evals.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    found = best_version(tmp_path / "evals.jsonl", LINEAGE)
    return found and found.version.step


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        ((150, 200), (2, 2, 198), 1),
        ((60, 200), (3, 3, 197), 1),  # the lower bound of 3 of 3 is above 30 %
        ((0, 200, 0, 0.7), (0, 2, 198, 1.0), 1),  # rewards alone
        ((0, 100, 100, 0.7), (0, 2, 198, 1.0), 1),  # both incomplete
        ((2, 2, 198), (1, 200), 2),  # an incomplete evaluation comes last
        ((150, 200), (151, 198, 2), 2),  # a few tasks may fail
        ((151, 200), (150, 196, 4), 1),  # and count as not solved
        ((150, 200), (150, 200), 2),  # the newest of equal ones
        ((150, 200), (149, 200), 1),
    ],
)
def test_a_failed_task_counts_as_not_solved(tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...], step: int):
    assert best(tmp_path, evaluation(1, *first), evaluation(2, *second)) == step


def test_the_last_measurement_of_a_version_counts(tmp_path: Path):
    assert best(tmp_path, evaluation(1, 9, 10), evaluation(2, 8, 10), evaluation(1, 1, 10)) == 2


@pytest.mark.parametrize("damage", [{"failed": 10}, {"failed": -1}, {"failed": "1"}, {"n_tasks": 0}, {"n_tasks": None}])
def test_a_line_with_impossible_counts_does_not_count(tmp_path: Path, damage: dict[str, object]):
    assert best(tmp_path, evaluation(1, 1, 10), evaluation(2, 9, 10) | damage) == 1


def test_a_comparison_of_runs_names_the_same_best():
    rates = success_rates([evaluation(0, 10, 200), evaluation(1, 150, 200), evaluation(2, 2, 2, 198)])
    assert "75.0% (step 1)" in table([ComparedRun("a", {}, rates, 2, 1.0, None)])
