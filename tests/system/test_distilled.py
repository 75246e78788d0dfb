"""A run that is distilled from a teacher: trained end to end, the teacher killed in between, proven, and replayed when
nobody can be asked any more. The real engine and trainer.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import orjson
import pytest

from shared.process.ports import free_port
from shared.run import archive
from shared.run.folder import RunFolder
from shared.types import Group
from tests.support import answering
from tests.support.stack import PROJECT, training
from tests.support.teacher import told
from volley_proof.verify.command import verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

N_STEPS = 8


def test_a_distilled_run_outlives_its_teacher_and_replays_without_it(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "asked"
    changes = (
        f"trainer.max_steps={N_STEPS}",
        "data.n_eval_tasks=2",
        "trainer.checkpointing_options.max_to_keep=9",
        "algorithm.name=on_policy_distillation",
        f"services.orchestrator.teacher.url=http://127.0.0.1:{port}",
    )
    with ExitStack() as teachers:
        teachers.enter_context(answering.process("tests.support.teacher", port, log))
        with training(tmp_path, *changes) as run:
            run.wait_for(r"^step +2/", 400)
            teachers.close()
            stopped_at = len(lines(run.folder))
            time.sleep(8)
            assert len(lines(run.folder)) <= stopped_at + 3, "steps went on without a teacher"
            teachers.enter_context(answering.process("tests.support.teacher", port, log))
            assert run.wait(400) == 0, run.text()
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    rows = lines(run.folder)
    assert [row["step"] for row in rows] == list(range(1, N_STEPS + 1))
    assert all(np.isfinite(row["teacher_kl"]) for row in rows)
    for version in archive.versions(run.folder.archive):
        for payload in archive.read(run.folder.archive, run.folder.path.name, version):
            for one in Group.decode(payload).trajectories:
                wanted = np.array([told(int(t)) for t in one.token_ids], np.float32) * one.loss_mask
                assert one.teacher_logprobs is not None
                np.testing.assert_array_equal(one.teacher_logprobs, wanted)
    asked = log.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "volley", "replay", str(run.folder.path), "--from-step", "1", "--json"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert orjson.loads(done.stdout)["first_divergence"] is None
    assert log.read_text(encoding="utf-8") == asked


def lines(folder: RunFolder) -> list[dict[str, float]]:
    return [orjson.loads(line) for line in folder.metrics.read_bytes().splitlines()]
