"""A run whose rewards a judge gives beside the environment: trained end to end, with the judge killed in between, and
judged again afterwards from what was kept. The real engine and trainer.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.process.ports import free_port
from shared.run import trust
from shared.run.folder import RunFolder
from tests.support import answering
from tests.support.stack import Training, training
from volley.printing import json_output
from volley_proof.reverify import command as reverify
from volley_proof.verify.command import verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

N_STEPS, WEIGHT, BUDGET = 8, 0.5, 5000


def judged(port: int) -> tuple[str, ...]:
    component, server = "data.rewards.frozen_lake.components.clarity", "services.env.reward_servers.grader"
    return (
        f"{component}={{type: judge, server: grader, model: any, weight: {WEIGHT}}}",
        f"{server}={{url: 'http://127.0.0.1:{port}/v1', max_requests: {BUDGET}, max_tokens: 1000000, attempts: 20}}",
    )


def test_a_judged_run_outlives_its_judge_and_is_judged_again_from_what_was_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, log = free_port(), tmp_path / "asked"
    changes = (f"trainer.max_steps={N_STEPS}", "data.n_eval_tasks=2", *judged(port))
    with training(tmp_path, *changes) as run:
        with answering.process("tests.support.judge", port, log):
            run.wait_for(r"^step +2/", 400)
        stopped_at = newest_step(run.folder)
        time.sleep(8)
        down = newest_step(run.folder)
        assert down <= stopped_at + 3, "steps went on without a judge"  # what was judged before is still trained on
        with answering.process("tests.support.judge", port, log):
            assert run.wait(400) == 0, run.text()
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    rows = metrics(run.folder)
    assert [row["step"] for row in rows] == list(range(1, N_STEPS + 1))
    assert all(0 < row["reward/clarity"] <= WEIGHT for row in rows), rows
    asked = log.read_text(encoding="utf-8").split()
    assert len(asked) - len(set(asked)) <= 16, "questions were sent twice beside those under way when it was killed"
    assert spent(run) >= (len(set(asked)), 100 * len(set(asked)))
    assert spent(run)[0] <= BUDGET
    again = reverified(run.folder, capsys)
    assert (again["changed"], again["environments"]["frozen_lake"]["skipped"]) == ([], {}), again
    read_otherwise(run.folder)
    halved = reverified(run.folder, capsys)
    was, now = halved["environments"]["frozen_lake"]["reward"]
    clarity = sum(row["reward/clarity"] for row in rows) / len(rows)
    assert was - now == pytest.approx(clarity / 2, abs=1e-6)
    assert log.read_text(encoding="utf-8").split() == asked, "nobody was asked anew"


def newest_step(folder: RunFolder) -> int:
    return len(metrics(folder))


def metrics(folder: RunFolder) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in folder.metrics.read_bytes().splitlines()]


def spent(run: Training) -> tuple[int, int]:
    """Requests and tokens of the budget."""
    with sqlite3.connect(run.folder.environments / "rewards.sqlite3") as store:
        return store.execute("select requests, tokens from spent").fetchone()


def reverified(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    with json_output():
        assert reverify.main(folder.path, only=None, instead=None) == 0
    return orjson.loads(capsys.readouterr().out)


def read_otherwise(folder: RunFolder) -> None:
    """A mended scorer: the same answers of the judge are worth half. The folder is trusted as with `--trust`."""
    text = folder.config.read_text(encoding="utf-8")
    assert f"weight: {WEIGHT}" in text
    folder.config.write_text(text.replace(f"weight: {WEIGHT}", f"weight: {WEIGHT / 2}"), encoding="utf-8")
    trust.accept(folder)
