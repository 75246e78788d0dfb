"""Runs beside each other, from files as the services write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.errors import ConfigError
from shared.run.folder import RunFolder
from volley.__main__ import main
from volley.commands import train
from volley.reporting.intervals import SuccessRate
from volley.runs.run_file import RunRecord, write_record
from volley_dashboard.report import compare

NO_TASKS: Mapping[str, Any] = {"n_tasks": 200, "failed": 0, "reward_mean": 0.0}


def recorded(path: Path, settings: Mapping[str, Any], successes: Mapping[int, float], nll: float) -> Path:
    """A finished run with these settings and held-out successes by step."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.evals.write_bytes(
        b"".join(orjson.dumps({**NO_TASKS, "step": n, "success": s}) + b"\n" for n, s in successes.items())
    )
    folder.sft.write_bytes(orjson.dumps({"step": 5, "loss": nll, "time": successes[0]}) + b"\n")
    config = {"run.seed": 0, "model.path": "m", **settings}
    write_record(folder, RunRecord("d", 0, config, {}, 0.0, 61.4, finished=True))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    of_grpo = recorded(tmp_path / "a-grpo", {"algorithm.name": "grpo"}, {0: 0.25, 5: 0.9, 10: 0.8}, 0.5)
    of_ppo = recorded(tmp_path / "a-ppo", {"algorithm.name": "ppo"}, {0: 0.25, 5: 0.5, 10: 0.7}, 0.5)
    return [of_grpo, of_ppo]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def test_a_row_a_run_with_what_sets_it_apart(
    runs: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = told(capsys, *map(str, runs), "--plot", str(tmp_path / "both.png"))
    rows = out.splitlines()
    assert code == 0
    assert rows[2].split() == [
        "a-grpo",
        "(name=grpo)",
        "25.0%",
        "90.0%",
        "(step",
        "5)",
        "80.0%",
        "73.9%–85.0%",
        "0",
        "61",
        "s",
    ]
    assert rows[3].split() == [
        "a-ppo",
        "(name=ppo)",
        "25.0%",
        "70.0%",
        "(step",
        "10)",
        "70.0%",
        "63.3%–75.9%",
        "0",
        "61",
        "s",
    ]
    assert rows[4] == "warm start: the same in all"
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_for_programs(runs: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--json", *map(str, runs), "--plot", str(tmp_path / "both.png")])
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["settings"]) == ("a-grpo", {"algorithm.name": "grpo"})
    assert [rate["success"] for rate in second["rates"]] == [0.25, 0.5, 0.7]


def test_a_setting_that_an_older_run_lacks_has_its_default(runs: Sequence[Path], tmp_path: Path) -> None:
    newer = recorded(tmp_path / "newer", {"algorithm.name": "grpo", "judges.servers": {}, "run.seed": 1}, {0: 0.2}, 0.5)
    older, new = compare.compared([RunFolder(path) for path in (runs[0], newer)])
    assert (older.settings, new.settings) == ({"run.seed": 0}, {"run.seed": 1})


def test_another_warm_start_is_named(runs: Sequence[Path], tmp_path: Path) -> None:
    other = recorded(tmp_path / "b", {"algorithm.name": "grpo"}, {0: 0.3}, 0.7)
    assert "warm start: different" in compare.table(compare.compared([RunFolder(path) for path in (runs[0], other)]))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "nothing to compare"),
        (("nowhere", "elsewhere"), "is no folder"),
        (("--vary", "algorithm.name", "grpo"), "belong together"),
        (("--config", "configs/quickstart.yaml"), "belong together"),
        (("--config", "configs/quickstart.yaml", "--vary", "algorithm.name"), "give a key and its values"),
        (("--config", "configs/quickstart.yaml", "--vary", "run.bucket", "s3://b/r"), "a bucket of its own"),
        (("--config", "configs/quickstart.yaml", "--vary", "run.seed", "1", "trainer.max_steps=3"), "--vary KEY A B"),
    ],
)
def test_what_cannot_be_compared(arguments: Sequence[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = told(capsys, *arguments)
    assert code == 2
    assert error in out


def test_a_run_is_trained_for_each_combination_unless_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = list[Sequence[str]]()

    def remembered(paths: Sequence[str], overrides: Sequence[str]) -> int:
        trained.append(overrides)
        return 0

    monkeypatch.setattr(train, "main", remembered)
    recorded(tmp_path / "quickstart-grpo-seed-0", {}, {0: 0.1}, 0.5)
    given = [f"run.dir={tmp_path}"]
    folders = compare.varied(
        ["configs/quickstart.yaml"], given, [["algorithm.name", "grpo", "ppo"], ["run.seed", "0", "1"]]
    )
    names = [f"quickstart-{name}-seed-{seed}" for name in ("grpo", "ppo") for seed in (0, 1)]
    assert [folder.name for folder in folders] == names
    assert [one[-1].removeprefix("run.name=") for one in trained] == names[1:]
    assert trained[-1][:-1] == [*given, "algorithm.name=ppo", "run.seed=1"]


def test_a_run_is_trained_with_each_file_after_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = list[tuple[Sequence[str], Sequence[str]]]()

    def remembered(paths: Sequence[str], overrides: Sequence[str]) -> int:
        trained.append((paths, overrides))
        return 0

    monkeypatch.setattr(train, "main", remembered)
    given, files = [f"run.dir={tmp_path}"], [f"configs/algorithms/{name}.yaml" for name in ("grpo", "dppo", "sao")]
    folders = compare.varied(["configs/quickstart.yaml"], given, [["config", *files]])
    assert [folder.name for folder in folders] == ["quickstart-grpo", "quickstart-dppo", "quickstart-sao"]
    assert [paths for paths, _ in trained] == [["configs/quickstart.yaml", file] for file in files]
    assert trained[2][1] == [*given, "run.name=quickstart-sao"]


def test_a_run_that_fails_ends_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "main", lambda paths, overrides: 1)
    with pytest.raises(SystemExit):
        compare.varied(["configs/quickstart.yaml"], [f"run.dir={tmp_path}"], [["run.seed", "0"]])


def test_a_wrong_value_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="algorithm"):
        compare.varied(["configs/quickstart.yaml"], [f"run.dir={tmp_path}"], [["algorithm.name", "grpo", "nonsense"]])


@pytest.mark.parametrize(("steps", "after"), [(10, "80.0%"), (16, "80.0% (step 10)")])
def test_an_evaluation_before_the_last_step_names_its_step(steps: int, after: str) -> None:
    rates = [SuccessRate(0, 200, 0.25, 0.2, 0.3), SuccessRate(10, 200, 0.8, 0.7, 0.9)]
    row = compare.table([compare.ComparedRun("r", {}, rates, steps, 1.0, None)]).splitlines()[2]
    assert f"{after}  70.0%" in row
