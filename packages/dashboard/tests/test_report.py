"""Progress lines, the summary, the plot and the table, from files as the services write them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.config import load
from shared.engines import DeclaredEngine
from shared.errors import ConfigError
from shared.run.folder import RunFolder
from shared.run.pinned import relevant
from shared.run.state import initial_state
from volley.layout import PROJECT
from volley.reporting.jsonl import JsonlTail
from volley.reporting.lines import eval_line, step_line
from volley.reporting.progress import PlainLines, RecordTails
from volley.runs.run_file import RunRecord
from volley_dashboard.report import report


def step(n: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": n,
        "version": f"e000001-s{n:06d}",
        "loss": -0.0123,
        "reward_mean": 0.1 * n,
        "reward_std": 0.2,
        "success": 0.05 * n,
        "kl": 0.002,
        "logprob_abs_diff": 3.1e-6,
        "tokens": 1000,
        "tokens_per_sec": 812.3,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "episodes": 8,
        "ends": {"answered": 0.75, "length": 0.25},
        "end_tokens": {"answered": 20.0, "length": 64.0 + n},
        "faults": {"format": 3},
        "failed_attempts": {"ServiceUnreachable": 1} if n == 2 else {},
        "retried_tokens": 50.0 if n == 2 else None,
        "step_s": 2.0,
        "time": 100.0 + 4.0 * n,
    } | fields


def evaluation(n: int, success: float, epoch: int = 1) -> dict[str, Any]:
    version = f"e{epoch:06d}-s{n:06d}"
    return {
        "step": n,
        "version_min": version,
        "version_max": version,
        "n_tasks": 200,
        "success": success,
        "reward_mean": success,
        "failed": 0,
    }


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("ab") as file:
        file.writelines(orjson.dumps(row) + b"\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    write(run.metrics, [step(1), step(2, reward_mean=9.0), step(2), step(3)])
    write(run.evals, [evaluation(0, 0.2), evaluation(3, 0.65)])
    return run


def test_a_step_is_one_line_with_all_that_matters() -> None:
    line = step_line(step(3), 10)
    for part in (
        "step  3/10",
        "loss -0.0123",
        "reward 0.300",
        "success 0.150",
        "KL 0.00200",
        "mean |Δlogp| 3.1e-06",
        "812 tokens/s",
    ):
        assert part in line
    assert "weights e000001-s000003" in line
    assert "staleness 0.5 (max 1)" in line


def test_an_evaluation_names_the_tasks_that_its_interval_is_of() -> None:
    assert "  200 tasks, greedy" in eval_line(evaluation(3, 0.5))
    line = eval_line(evaluation(3, 0.5) | {"failed": 150})
    assert "success 50.0% (36.6–63.4)" in line
    assert "  50 of 200 tasks, greedy" in line


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grad_norm": 0.0, "zero_variance_groups": 1.0}, "learned nothing: equal rewards in each group"),
        ({"grad_norm": 0.0, "zero_variance_groups": 0.5}, "learned nothing: no gradient"),
        ({"grad_norm": 0.1, "zero_variance_groups": 1.0}, ""),  # another term teaches
    ],
)
def test_a_step_without_a_gradient_says_so(fields: dict[str, Any], said: str) -> None:
    line = step_line({**step(3), **fields}, 10)
    assert line.endswith(said)
    assert ("learned nothing" in line) == bool(said)


def test_missing_figures_are_dashes() -> None:
    assert "loss –" in step_line({"step": 1, "loss": float("nan")}, 10)
    assert "success –" in eval_line({})


def test_progress_shows_only_what_is_new(folder: RunFolder) -> None:
    said: list[str] = []
    tails, display = RecordTails(folder), PlainLines(10, said.append)
    assert tails.new() == []
    write(folder.metrics, [step(4)])
    for kind, record in tails.new():
        display.record(kind, record)
    assert len(said) == 1
    assert said[0].startswith("step  4/10")


def test_a_tail_waits_for_whole_lines_and_survives_a_rollback(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = JsonlTail(path)
    assert tail.new() == []
    path.write_bytes(b'{"a":1}\n{"a":')
    assert tail.new() == [{"a": 1}]
    path.write_bytes(b'{"a":1}\n{"a":2}\n')
    assert tail.new() == [{"a": 2}]
    path.write_bytes(b'{"a":1}\n')
    assert tail.new() == []
    path.write_bytes(b'{"a":1}\n{"a":3}\n')
    assert tail.new() == [{"a": 3}]


def test_an_engine_without_all_capabilities_is_named(folder: RunFolder) -> None:
    whole, plain = DeclaredEngine("sglang_jax"), DeclaredEngine("plain", ("exact_ids", "spans", "in_flight_update"))
    write(folder.handovers, [{"step": 1, "servers": [{"url": "a", "engine": whole.to_json()}, {"url": "b"}]}])
    assert "sglang_jax" not in report.format_report(report.make(folder), folder)
    write(folder.handovers, [{"step": 2, "servers": [{"url": "c", "engine": plain.to_json()}]}] * 2)
    summary = report.make(folder)
    lacks = ["audit", "routing", "probe"]
    assert summary["engines"] == [
        {"kind": "sglang_jax", "lacks": [], "proves_weights": True},
        {"kind": "plain", "lacks": lacks, "proves_weights": False},
    ]
    assert "plain, without audit, routing, probe" in report.format_report(summary, folder)


def test_the_summary_counts_a_replayed_step_once(folder: RunFolder) -> None:
    summary = report.make(folder)
    assert summary == orjson.loads(folder.summary.read_bytes())
    assert summary["steps"] == 3
    assert summary["held_out_success_before_rl"] == 0.2
    assert summary["held_out_success_after_rl"] == 0.65
    assert summary["held_out_tasks"] == 200
    assert summary["final_weight_version"] == "e000001-s000003"
    assert summary["tokens_per_sec"] == pytest.approx(3000 / 10)
    assert summary["elapsed_sec"] == 10.0
    assert "+45.0 points" in report.table(summary, folder)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "  3.1e-06 with tokens of older weights\n"),
        ({"logprob_abs_diff_current": 2e-7}, "  2.0e-07 (3.1e-06 with tokens of older weights)\n"),
        ({"staleness_max": 0}, "  3.1e-06\n"),
    ],
)
def test_log_probabilities_of_the_present_weights_come_first(
    folder: RunFolder, fields: dict[str, Any], shown: str
) -> None:
    folder.metrics.unlink()
    write(folder.metrics, [step(1, **fields)])
    assert f"mean |Δ log p|, rollout against trainer{shown}" in report.table(report.make(folder), folder)


def test_the_plot_is_a_png_of_readable_size(folder: RunFolder) -> None:
    report.make(folder)
    data = folder.plot.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert min(width, height) >= 800


def test_a_ticket_counts_by_its_end_along_the_surviving_lineage() -> None:
    ledger = [
        {"ticket": 1, "disposition": "trained", "step": 1, "epoch": 1},
        {"ticket": 2, "disposition": "trained", "step": 2, "epoch": 1},
        {"rollback": 1, "epoch": 2},
        {"ticket": 3, "disposition": "stale", "step": 1, "epoch": 2},
    ]
    assert report.dispositions(ledger) == {"trained": 1, "stale": 1}


def test_a_run_of_which_many_groups_failed_is_warned_about(folder: RunFolder) -> None:
    made = {"step": 1, "epoch": 1, "version": "e000001-s000001"}
    reason = "SandboxFailed in adder@2 at turn 3"
    write(
        folder.ledger,
        [
            {"ticket": n, "disposition": "failed" if n < 9 else "trained", "reason": reason if n < 9 else None, **made}
            for n in range(1, 40)
        ],
    )
    summary = report.make(folder)
    told = f"8 of 39 groups failed, 8 with {reason}: training is biased where failures depend on answers"
    assert summary["episodes"]["biased"] == told
    assert told in report.table(summary, folder)


def test_ends_lengths_and_failures_are_summed_up(folder: RunFolder) -> None:
    write(
        folder.ledger,
        [
            {
                "ticket": 9,
                "disposition": "failed",
                "reason": "NoServer",
                "step": 1,
                "epoch": 1,
                "version": "e000001-s000001",
            }
        ],
    )
    summary = report.make(folder)
    assert summary["episodes"] == {
        "ends": {"answered": 0.75, "length": 0.25},
        "end_tokens": {"answered": 20.0, "length": 66.0},
        "retried_tokens": 50.0,
        "faults": {"format": 9},
        "failed_attempts": {"ServiceUnreachable": 1},
        "failed_groups": {"NoServer": 1},
        "biased": None,
    }
    table = report.table(summary, folder)
    for part in (
        "75.0% answered (20 tokens), 25.0% length (66 tokens)",
        "9 format",
        "1 ServiceUnreachable",
        "1 NoServer",
    ):
        assert part in table


def test_an_evaluation_of_undone_weights_does_not_count(folder: RunFolder) -> None:
    write(folder.evals, [evaluation(3, 0.9, epoch=2), evaluation(4, 0.1)])
    checkpoint = folder.checkpoints / "e000002-s000003"
    checkpoint.mkdir(parents=True)
    state = initial_state(0).starting_epoch(1, keep_reference=False).starting_epoch(2, keep_reference=False)
    (checkpoint / "state.json").write_bytes(state.to_json(lineage=[(1, 0), (2, 2)], optimizer_files=[], seal=""))
    (checkpoint / "manifest.json").write_text("{}", encoding="utf-8")
    summary = report.make(folder)
    assert summary["held_out_success_after_rl"] == 0.9
    best = summary["best"]
    assert (best["version"], best["success"], best["kept"]) == ("e000002-s000003", 0.9, True)
    assert "e000002-s000003: 90.0%" in report.table(summary, folder)
    assert summary["final_weight_version"] == "e000001-s000002"  # step 3 was made by a trainer that had been replaced


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither metrics\.jsonl nor evals\.jsonl"):
        report.main(tmp_path)


def test_lines_of_more_values_than_a_record_has_are_skipped(tmp_path: Path):
    path = tmp_path / "evals.jsonl"
    path.write_bytes(b'{"x":[' + b"[]," * 20_000 + b'[]]}\n{"step":1}\n')
    assert JsonlTail(path).new() == [{"step": 1}]


@pytest.mark.parametrize(
    ("shares", "size", "algorithm", "told"),
    [
        ((1.0, 1.0), 8, "grpo", True),
        ((1.0, 0.5), 8, "grpo", False),
        ((1.0,), 1, "grpo", False),
        ((1.0,), 8, "rloo", True),
        ((1.0,), 8, "grpo algorithm.beta=0.1", False),
        ((1.0,), 8, "grpo algorithm.credit=turn", False),
        ((1.0,), 8, "reinforce_plus_plus", False),
        ((1.0,), 8, "ppo", False),
        ((1.0,), 8, "own algorithm.loss=examples/rules/luspo.py:loss", False),
    ],
)
def test_equal_rewards_in_all_groups_are_told(shares: tuple[float, ...], size: int, algorithm: str, told: bool) -> None:
    rows = [step(n) | {"zero_variance_groups": share} for n, share in enumerate(shares, 1)]
    overrides = [f"algorithm.name={algorithm.split()[0]}", *algorithm.split()[1:]]
    settings = relevant(load([PROJECT / "configs/quickstart.yaml"], overrides).config)
    record = RunRecord("0", 0, settings | {"grpo_config.num_generations": size}, {}, 0.0, 0.0, finished=True)
    assert report.summarize(rows, [], record)["equal_rewards"] == told
