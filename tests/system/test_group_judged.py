"""A run whose groups judges compare and whose turns they mark: trained end to end, proven, replayed and scored again
without them. The real engine and trainer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.process.ports import free_port
from shared.run import archive, trust
from shared.run.folder import RunFolder
from shared.types import ASSISTANT, Group
from tests.support import answering
from tests.support.stack import training
from volley.layout import PROJECT
from volley.printing import json_output
from volley_proof.reverify import command as reverify
from volley_proof.verify.command import verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

N_STEPS = 3


def judged(port: int) -> tuple[str, ...]:
    asked = "server: s, model: any"
    rewards = (
        f"duel: {{type: pairwise, {asked}}},"
        f" cup: {{type: tournament, {asked}, shows: answer}},"
        f" order: {{type: ranking, {asked}, weight: 0.5}},"
        f" steps: {{type: rubric, {asked}, per: turn, criteria: {{good: it is good, short: it is short}}}}"
    )
    server = f"s: {{url: 'http://127.0.0.1:{port}/v1', max_requests: 5000, max_tokens: 1000000}}"
    return (f"judges={{servers: {{{server}}}, rewards: {{frozen_lake: {{{rewards}}}}}}}", "algorithm.credit=turn")


def test_a_run_with_judges_of_groups_is_proven_and_replayed_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, log = free_port(), tmp_path / "asked"
    changes = (f"trainer.max_steps={N_STEPS}", "data.n_eval_tasks=2", *judged(port))
    with (
        answering.process("packages.judges.tests.judge_server", port, log),
        training(tmp_path, *changes) as run,
    ):
        assert run.wait(600) == 0, run.text()
    folder = run.folder
    result = verify(folder)
    assert result["ok"], result["violations"]
    groups = [group for version in archive.versions(folder.archive) for group in groups_of(folder, version)]
    assert groups
    for group in groups:
        assert [one.name for one in group.judgements] == ["cup", "duel", "order", "steps"]
        duels = [one.reward_components["duel"] for one in group.trajectories]
        assert sum(duels) == pytest.approx(len(duels) / 2)
        for n, one in enumerate(group.trajectories):
            marks = group.judgements[-1].turns[n]
            turns = [turn.reward for turn in one.turns if turn.role == ASSISTANT]
            assert len(marks) == len(turns)
            assert sum(marks) == pytest.approx(
                one.reward_components["steps/good"] + one.reward_components["steps/short"]
            )
    rows = [orjson.loads(line) for line in folder.metrics.read_bytes().splitlines()]
    assert all("reward/duel" in row and "reward/steps/good" in row for row in rows)
    asked = log.read_text(encoding="utf-8").split()
    assert len(asked) == len(set(asked))

    trust.accept(folder)
    assert replayed(folder)["ok"]
    capsys.readouterr()
    with json_output():
        assert reverify.main(folder.path, only=None, instead=None) == 0
    again = orjson.loads(capsys.readouterr().out)
    assert (again["changed"], again["environments"]["frozen_lake"]["skipped"]) == ([], {}), again


def groups_of(folder: RunFolder, version: Any) -> list[Group]:
    return [Group.decode(payload) for payload in archive.read(folder.archive, folder.name, version)]


def replayed(folder: RunFolder) -> dict[str, Any]:
    command = [sys.executable, "-m", "volley", "replay", str(folder.path), "--from-step", "0", "--json"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return orjson.loads(done.stdout)
