"""How a run's evaluations are told: their 95 % intervals, the curve as text, the closing sentence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shared.run.folder import RunFolder
from volley.reporting.intervals import SuccessRate, success_rates, wilson
from volley.reporting.lines import duration
from volley_dashboard.report.closing import sentence
from volley_dashboard.report.curve import curve

# statsmodels 0.15: proportion_confint(successes, tasks, 0.05, "wilson")
PUBLISHED = [
    (0, 1, 0.0, 0.7934506856227627),
    (1, 1, 0.2065493143772374, 1.0),
    (0, 200, 0.0, 0.01884532637726658),
    (200, 200, 0.9811546736227335, 1.0),
    (58, 200, 0.2315402560706788, 0.35637478100777314),
    (195, 200, 0.942821659593358, 0.9892752803482386),
    (2, 40, 0.013820667386148358, 0.16503877369140968),
    (15, 40, 0.2422297916723327, 0.529675608626989),
    (500, 1000, 0.4690696003681042, 0.5309303996318958),
    (3, 7, 0.15821985525146964, 0.7495416354723428),
]


@pytest.mark.parametrize(("successes", "tasks", "low", "high"), PUBLISHED)
def test_the_interval_is_that_of_statsmodels(successes: int, tasks: int, low: float, high: float) -> None:
    assert wilson(successes, tasks) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize(("successes", "tasks"), [(k, n) for n in (1, 5, 40) for k in range(n + 1)])
def test_its_bounds_solve_the_equation_of_the_score_test(successes: int, tasks: int) -> None:
    """At each bound p that is not 0 or 1: |k/n − p| = z · sqrt(p(1 − p)/n)."""
    for p in wilson(successes, tasks):
        if 1e-12 < p < 1 - 1e-12:
            assert abs(successes / tasks - p) == pytest.approx(1.959963984540054 * math.sqrt(p * (1 - p) / tasks))


def row(step: int, success: Any, n_tasks: Any = 200, **fields: Any) -> dict[str, Any]:
    return {"step": step, "success": success, "n_tasks": n_tasks, "failed": 0} | fields


def test_tasks_that_broke_are_not_counted() -> None:
    assert SuccessRate.of(row(3, 0.5, 10, failed=4)) == SuccessRate(3, 6, 0.5, *wilson(3, 6), failed=4)


@pytest.mark.parametrize("bad", [row(1, None), row(1, "x"), row(1, 1.5), row(1, 0.5, 4, failed=4), {"success": 0.5}])
def test_a_line_that_lacks_a_figure_is_left_out(bad: dict[str, Any]) -> None:
    assert success_rates([bad]) == []


RISING = success_rates([row(0, 0.29), row(3, 0.7), row(6, 0.975)])


def test_the_curve_has_a_line_an_evaluation_with_its_band() -> None:
    assert curve(RISING, 80) == [
        "held-out success, ░ 95% interval",
        "step  0%          25%          50%         75%        100%",
        "   0  ·           ░░░█░░░       ·           ·            ·  29.0% (23.2–35.6)",
        "   3  ·            ·            ·     ░░░░█░░░           ·  70.0% (63.3–75.9)",
        "   6  ·            ·            ·           ·         ░░█·  97.5% (94.3–98.9)",
    ]


@pytest.mark.parametrize("width", [38, 40, 57, 80, 81, 300])
def test_the_curve_fits_its_width(width: int) -> None:
    rates = success_rates(row(step, share) for step, share in ((0, 0.0), (7, 0.5), (1000, 1.0)))
    assert max(map(len, curve(rates, width))) <= width


def test_of_many_evaluations_the_first_and_the_last_stay() -> None:
    lines = curve(success_rates(row(step, step / 1000) for step in range(1000)), 80)
    assert len(lines) == 2 + 24
    assert "(24 of 1000 evaluations)" in lines[0]
    assert lines[2].split()[0] == "0"
    assert lines[-1].split()[0] == "999"


def test_nothing_evaluated_gives_no_curve() -> None:
    assert curve([], 80) == []


def summary(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    evaluations = [
        {key: getattr(rate, key) for key in ("step", "tasks", "success", "low", "high")} for rate in success_rates(rows)
    ]
    told = {"evaluations": evaluations, "steps": 15, "max_steps": 15, "finished": True, "elapsed_sec": 182.0}
    return told | {"tickets": {"trained": 240, "stale": 2}} | fields


RUN = RunFolder(Path("/runs/r"))
PROVEN = {"ok": True, "by_disposition": {"trained": 240, "stale": 2}, "violations": []}


def test_the_closing_sentence_tells_a_rise_and_what_was_proven() -> None:
    assert sentence(RUN, summary([row(0, 0.29), row(15, 0.975)]), PROVEN) == (
        "Held-out success rose from 29.0% (95% interval 23.2–35.6) to 97.5% (94.3–98.9) on 200 tasks in 15 steps and"
        " 3 min 2 s; 240 groups trained exactly once, 2 ended stale, none lost (verified)."
    )


def test_without_a_proof_it_claims_none() -> None:
    told = sentence(RUN, summary([row(0, 0.29), row(15, 0.975)]))
    assert told.endswith("; 240 groups trained, 2 ended stale.")


def test_a_run_whose_rewards_taught_nothing_says_so() -> None:
    told = sentence(RUN, summary([row(0, 0.3), row(15, 0.3)], equal_rewards=True))
    assert told.endswith(". All groups had equal rewards, so nothing was learned from them: see docs/debugging.md.")


def test_a_proof_that_fails_is_told() -> None:
    told = sentence(RUN, summary([]), {"ok": False, "by_disposition": {}, "violations": [{}, {}]})
    assert "; the proof FAILED with 2 violations, which `volley verify /runs/r` names." in told


def test_a_proof_that_ran_out_of_time_is_no_failure() -> None:
    proof = {"ok": False, "not_finished": "it took 60 s", "by_disposition": {}, "violations": []}
    told = sentence(RUN, summary([]), proof)
    assert "; the proof did not finish (it took 60 s): run `volley verify /runs/r`." in told


@pytest.mark.parametrize(("before", "after"), [(0.30, 0.36), (0.36, 0.30), (0.3, 0.3)])
def test_a_difference_within_the_intervals_is_no_rise(before: float, after: float) -> None:
    told = sentence(RUN, summary([row(0, before), row(15, after)]))
    assert told.startswith("Held-out success did not change beyond its intervals, ")
    assert "rose" not in told


@pytest.mark.parametrize(
    ("success", "change"),
    [
        (0.9, "rose from 30.0% (95% interval 24.1–36.7) after step 8 to 90.0% (85.1–93.4) after step 10 on 200 tasks"),
        (
            0.3,
            "did not change beyond its intervals, 30.0% (95% interval 24.1–36.7) after step 8 and 30.0% (24.1–36.7)"
            " after step 10, on 200 tasks",
        ),
    ],
)
def test_evaluations_that_are_not_the_run_s_ends_are_told_with_their_steps(success: float, change: str) -> None:
    told = sentence(RUN, summary([row(8, 0.3), row(10, success)]))
    assert told.startswith(f"Held-out success {change}; the run has taken 15 steps and 3 min 2 s; 240 groups")


def test_a_fall_is_told() -> None:
    assert sentence(RUN, summary([row(0, 0.9), row(15, 0.1)])).startswith("Held-out success fell from 90.0% (")


def test_one_evaluation_and_none() -> None:
    assert "was measured once, 29.0% (95% interval" in sentence(RUN, summary([row(0, 0.29)]))
    assert sentence(RUN, summary([])).startswith("Held-out success was not measured in 15 steps and")


def test_a_run_that_is_not_finished_says_so() -> None:
    told = sentence(RUN, summary([row(0, 0.2), row(3, 0.9)], steps=3, finished=False))
    assert "in 3 steps and 3 min 2 s, of 15 steps configured for run r;" in told


@pytest.mark.parametrize(
    ("seconds", "told"), [(7.46, "7.5 s"), (59.96, "1 min 0 s"), (182, "3 min 2 s"), (3599.7, "1 h 0 min")]
)
def test_durations(seconds: float, told: str) -> None:
    assert duration(seconds) == told
