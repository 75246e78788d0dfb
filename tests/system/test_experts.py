"""A run of a small mixture of experts in bfloat16 on the real stack: every token is trained by the experts that the
engine has sent it to, and the proof and the replay hold.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from shared.run import archive
from shared.types import Group
from tests.support.stack import training
from volley.layout import PROJECT
from volley.reporting import jsonl
from volley_proof.verify.command import verify

N_STEPS = 3

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_run_replays_the_routing_of_its_engine(tmp_path: Path) -> None:
    settings = [
        f"model.path={mixture(tmp_path / 'model')}",
        "model.dtype=bfloat16",
        f"trainer.max_steps={N_STEPS}",
        "trainer.checkpointing_options.max_to_keep=9",
        "trainer.optimizer_config.learning_rate=1e-3",
        "data.n_eval_tasks=2",
    ]
    with training(tmp_path, *settings) as run:
        assert run.wait(600) == 0, run.text()
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    for version in archive.versions(run.folder.archive):
        for payload in archive.read(run.folder.archive, run.folder.path.name, version):
            for one in Group.decode(payload).trajectories:
                assert one.routed_experts is not None
                assert one.routed_experts.shape == (len(one.token_ids) - 1, 2, 2)
    told = [row["routing_diff"] for row in jsonl.read(run.folder.metrics)]
    assert len(told) == N_STEPS
    assert all(0.0 <= share < 0.5 for share in told)
    command = [sys.executable, "-m", "volley", "replay", str(run.folder.path), "--from-step", "0", "--json"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert orjson.loads(done.stdout)["first_divergence"] is None


def mixture(folder: Path) -> Path:
    """The tiny model, with eight experts in each layer, and its tokenizer."""
    shutil.copytree(PROJECT / "configs/models/tiny", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (folder / "config.json").write_text(json.dumps(config | family | sizes), encoding="utf-8")
    return folder
