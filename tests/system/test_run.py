"""One short run on the real stack, to its end: what it prints, what it leaves on disk, and that it leaves nothing
running.
"""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from collections.abc import Iterator

import orjson
import pytest

from shared.run.checkpoint_files import newest, read_manifest, verify_files
from shared.types import WeightVersion
from tests.support.collector import Collector, SeenSpan, collecting
from tests.support.stack import SMALL, Training, training
from volley.layout import PROJECT
from volley.reporting import jsonl
from volley_proof.verify.command import verify

N_STEPS = 3

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Training]:
    """A run of three steps, finished."""
    folder, traces = tmp_path_factory.mktemp("run"), f"run.traces={collector.url}"
    with training(folder, f"trainer.max_steps={N_STEPS}", traces) as started:
        assert started.wait(540) == 0, started.text()
        yield started


def test_it_ends_with_its_result(run: Training) -> None:
    lines = run.output.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(rf"DONE: steps={N_STEPS} elapsed_sec=\d+\.\d", lines[-1])
    assert any("held-out success after RL" in line for line in lines)
    assert run.errors.read_text(encoding="utf-8") == ""


def test_it_shows_a_line_a_step(run: Training) -> None:
    steps = [line for line in run.output.read_text(encoding="utf-8").splitlines() if re.match(r"step +\d+/", line)]
    assert len(steps) == N_STEPS
    for line in steps:
        assert all(
            part in line
            for part in ("loss", "reward", "success", "KL", "|Δlogp|", "tokens/s", "weights e000001-s", "staleness")
        )


def test_versions_advance_and_reach_the_rollout_server(run: Training) -> None:
    metrics = jsonl.read(run.folder.metrics)
    assert [row["version"] for row in metrics] == [str(WeightVersion(1, step)) for step in (1, 2, 3)]
    evaluations = {row["step"]: row for row in jsonl.read(run.folder.evals)}
    assert evaluations[0]["version_max"] == str(WeightVersion(1, 0))
    assert evaluations[N_STEPS]["version_min"] == str(WeightVersion(1, N_STEPS))


def test_rollout_and_trainer_agree_on_log_probabilities(run: Training) -> None:
    """On the same weights, over every token sampled with them: the engine's against the trainer's."""
    largest = [row["logprob_abs_diff_current_max"] for row in jsonl.read(run.folder.metrics)]
    assert 0 < max(value for value in largest if value is not None) <= 1e-4


def test_each_trained_ticket_is_one_tree_of_spans_of_all_services(run: Training, collector: Collector) -> None:
    run.leftovers()
    tickets = {_root(spans).attributes["volley.ticket"]: spans for spans in _traces(collector, "ticket")}
    trained = {line["ticket"] for line in jsonl.read(run.folder.ledger) if line["disposition"] == "trained"}
    assert trained <= tickets.keys()
    for ticket in trained:
        spans = tickets[ticket]
        ids = {span.id: span for span in spans}
        assert {span.service for span in spans} == {
            f"volley-{name}" for name in ("env", "orchestrator", "rollout", "trainer")
        }
        assert [span.name for span in spans if span.parent not in ids] == ["ticket"]
        paths = {_path(span, ids) for span in spans}
        attempt = "ticket/episode/attempt"
        assert paths >= {
            "ticket/publish",
            "ticket/read",
            "ticket/train",
            "ticket/commit",
            "ticket/episode/wait for a slot",
            f"{attempt}/environment call/POST /episodes/environment reset",
            f"{attempt}/turn/model call/POST /generate/queue wait",
            f"{attempt}/turn/model call/POST /generate/prefill",
            f"{attempt}/turn/model call/POST /generate/decode",
            f"{attempt}/turn/environment call/POST /episodes/{{episode_id}}/step/environment step",
        }
        assert len([span for span in spans if span.name == "episode"]) == 4


def test_each_step_is_a_tree_of_spans_that_its_tickets_link_to(run: Training, collector: Collector) -> None:
    steps = list(_traces(collector, "step"))
    assert sorted(_root(spans).attributes["volley.step"] for spans in steps) == [1, 2, 3]
    linked = {link for span in collector.spans if span.name == "train" for link in span.links}
    assert linked == {spans[0].trace for spans in steps}
    for spans in steps:
        ids = {span.id: span for span in spans}
        assert {"step/train", "step/archive", "step/record", "step/commit"} <= {_path(span, ids) for span in spans}


def _traces(collector: Collector, root: str) -> Iterator[list[SeenSpan]]:
    return (spans for spans in collector.traces().values() if _root(spans).name == root)


def _root(spans: list[SeenSpan]) -> SeenSpan:
    return next(span for span in spans if not span.parent)


def _path(span: SeenSpan, ids: dict[str, SeenSpan]) -> str:
    return f"{_path(ids[span.parent], ids)}/{span.name}" if span.parent else span.name


def test_the_newest_checkpoint_is_whole(run: Training) -> None:
    folder = newest(run.folder.path / "checkpoints")
    assert folder is not None
    manifest = read_manifest(folder)
    assert manifest.version == str(WeightVersion(1, N_STEPS))
    verify_files(folder, manifest)


def test_the_summary_is_for_programs(run: Training) -> None:
    summary = orjson.loads(run.folder.summary.read_bytes())
    assert summary["steps"] == N_STEPS
    assert summary["elapsed_sec"] > 0
    assert summary["held_out_tasks"] == 6
    assert 0 <= summary["held_out_success_before_rl"] <= 1
    assert 0 <= summary["held_out_success_after_rl"] <= 1
    assert summary["final_weight_version"] == str(WeightVersion(1, N_STEPS))
    assert summary["tokens_per_sec"] > 0
    assert summary["tickets"] == {"trained": 2 * N_STEPS}


def test_the_run_records_what_it_was(run: Training) -> None:
    record = orjson.loads(run.folder.record.read_bytes())
    assert record["finished"]
    assert record["seed"] == 0
    assert {"volley", "python", "jax", "sglang-jax", "google-tunix"} <= record["versions"].keys()


def test_the_run_is_proven(run: Training) -> None:
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    assert result["by_disposition"] == {"trained": 2 * N_STEPS}


def test_its_last_steps_replay_bit_identically(run: Training) -> None:
    command = [sys.executable, "-m", "volley", "replay", str(run.folder.path), "--from-step", "1", "--json"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert orjson.loads(done.stdout)["first_divergence"] is None


def test_secrets_are_in_private_files_only(run: Training) -> None:
    folder = run.folder
    secrets = [path.read_text(encoding="utf-8") for path in folder.secrets.iterdir()]
    assert len(secrets) == 5  # three roles, Redis, and the mark of the user who wrote the folder
    assert all(
        stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        for path in (folder.secrets, folder.redis, *folder.secrets.iterdir())
    )
    files = [
        path
        for path in folder.path.rglob("*")
        if path.is_file() and not {folder.secrets, folder.redis} & set(path.parents)
    ]
    told = {path.name: path.read_bytes() for path in (*files, run.output, run.errors)}
    assert [name for name, data in told.items() for secret in secrets if secret.encode() in data] == []


def test_nothing_is_left_running(run: Training) -> None:
    assert run.leftovers() == []


def test_a_finished_run_is_not_trained_again(run: Training) -> None:
    folder = run.folder.path
    command = [sys.executable, "-m", "volley", "train", "--config", SMALL]
    command += [f"run.dir={folder.parent}", f"run.name={folder.name}", f"trainer.max_steps={N_STEPS}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 2
    assert "is finished" in done.stderr
