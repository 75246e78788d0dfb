"""A run with trainer.lora on the real stack, whose trainer and rollout server are killed: adapters alone are kept and
sent, what is served is what was meant, and the proof and the replay hold.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from shared.run.checkpoint_files import BASE, read_manifest, versions
from tests.support.stack import training
from volley.layout import PROJECT
from volley.reporting import jsonl
from volley_proof.verify.command import verify

N_STEPS, N_GROUPS = 5, 2

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_run_of_adapters_survives_its_trainer_and_its_server(tmp_path: Path) -> None:
    settings = [f"trainer.max_steps={N_STEPS}", "trainer.lora.rank=4", "algorithm.beta=0.01"]
    with training(tmp_path, *settings) as run:
        for step, victim in enumerate(("trainer", "rollout"), start=1):
            run.wait_for(rf"^step +{step}/{N_STEPS}", 300)
            run.kill(victim)
            run.wait_for(rf"^{victim}(-0)? ended with signal 9 \(SIGKILL\); restarting", 60)
        assert run.wait(400) == 0, run.text()
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    assert (result["lost"], result["doubly_trained"]) == (0, 0)
    assert result["by_disposition"]["trained"] == N_STEPS * N_GROUPS
    largest = [row["logprob_abs_diff_current_max"] for row in jsonl.read(run.folder.metrics)]
    assert 0 < max(value for value in largest if value is not None) <= 1e-4

    root = run.folder.checkpoints
    manifests = [read_manifest(root / str(version)) for version in versions(root)]
    assert {manifest.kind for manifest in manifests} == {"adapter"}
    (base,) = {manifest.adapter.base.digest for manifest in manifests if manifest.adapter}
    assert [path.name for path in (root / BASE).iterdir()] == [base]
    retained = [version.step for version in versions(root) if version.step]
    command = [sys.executable, "-m", "volley", "replay", str(run.folder.path), "--json"]
    done = subprocess.run([*command, "--from-step", str(min(retained))], capture_output=True, cwd=PROJECT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert orjson.loads(done.stdout)["first_divergence"] is None
