"""Runs of several environments: a row and a curve each, in report and status; one environment is told as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packages.dashboard.tests.test_report import evaluation, step, write
from shared.run.folder import RunFolder
from volley.reporting.lines import eval_line, format_mixture
from volley.reporting.progress import Activity
from volley.runs.run_file import RunRecord, write_record
from volley_commands import status
from volley_dashboard.report import report
from volley_dashboard.terminal.phases import RunPhases
from volley_python.diagnosis.wedge import ServiceReport, Verdict

MIXTURE = [
    {"env": "frozen_lake", "share": 0.75, "state": "configured"},
    {"env": "adder@2", "share": 0.05, "state": "canary"},
    {"env": "words@1", "share": 0.0, "state": "suspended", "reason": "3 groups in a row failed"},
    {"env": "old@1", "share": 0.0, "state": "left"},
]


def played(**by_env: tuple[float, float, int]) -> dict[str, Any]:
    names = ("reward_mean", "success", "groups")
    return {f"env/{env}/{name}": x for env, figures in by_env.items() for name, x in zip(names, figures, strict=True)}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    write_record(run, RunRecord("d", 0, {"data.env": "frozen_lake"}, {}, 0.0, 10.0, finished=True))
    write(
        run.metrics,
        [
            step(1, groups=4),
            step(2, groups=4, **played(frozen_lake=(0.5, 0.25, 3), adder=(1.0, 0.5, 1))),
            step(3, groups=4, **played(frozen_lake=(0.75, 0.5, 2), adder=(2.0, 1.0, 2))),
        ],
    )
    evals = [evaluation(0, 0.2), evaluation(3, 0.4) | {"env": "adder"}, evaluation(3, 0.65)]
    write(run.evals, evals)
    return run


def test_each_environment_has_its_figures(folder: RunFolder) -> None:
    summary = report.make(folder)
    main, adder = summary["environments"]
    assert (main["env"], main["groups"], main["reward_first_step"], main["success_last_step"]) == (
        "frozen_lake",
        9,
        pytest.approx(0.1),
        0.5,
    )
    assert (adder["env"], adder["groups"], adder["first_step"]) == ("adder", 3, 2)
    assert [rate["success"] for rate in adder["evaluations"]] == [0.4]
    assert [rate["success"] for rate in main["evaluations"]] == [0.2, 0.65]
    assert (summary["held_out_success_before_rl"], summary["held_out_success_after_rl"]) == (0.2, 0.65)
    table = report.table(summary, folder)
    assert "environment adder" in table
    assert "3 groups, reward 1.000 → 2.000, success 50% → 100%, held-out 40.0% (33.5–46.9)" in table
    assert folder.plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_of_one_environment_is_told_as_before(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write(run.metrics, [step(1, groups=4)])
    write(run.evals, [evaluation(0, 0.2)])
    summary = report.make(run)
    assert summary["environments"] == []
    assert "\nenvironment " not in report.table(summary, run)


def test_the_mixture_is_one_line_where_there_are_several() -> None:
    told = "frozen_lake 75%, adder@2 5% (canary), words@1 0% (suspended)"
    assert format_mixture(MIXTURE) == told
    assert format_mixture(MIXTURE[:1]) == format_mixture([MIXTURE[0], MIXTURE[3]]) == format_mixture(None) == ""
    phases = RunPhases(9, lambda: 0.0)
    phases.activity(Activity({"mixture": MIXTURE}, {"phase": "training", "step": 1}))
    assert [row.detail for row in phases.rows() if row.name == "mixture"] == [told]
    seen = ServiceReport("orchestrator", "orchestrator", "http://x", facts={"mixture": MIXTURE})
    text = status._text([seen], Verdict("running", ()))
    assert f"mixture: {told}\n  words@1 is suspended: 3 groups in a row failed" in text


def test_an_evaluation_names_its_environment() -> None:
    assert eval_line(evaluation(3, 0.5) | {"env": "adder@2"}).startswith(
        "held-out of adder@2 after step 3: success 50.0%"
    )
