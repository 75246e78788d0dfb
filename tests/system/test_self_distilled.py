"""A run that is its own teacher, shown the answers or a better sibling: trained end to end, proven, and replayed. The
real engine and trainer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

from shared.models.chat import ChatTokenizer
from shared.run import archive
from shared.types import Group, Trajectory, WeightVersion
from tests.support.stack import PROJECT, training
from volley_proof.verify.command import verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

N_STEPS = 4
GAME = '''
class Game:
    """Two turns. Even tasks tell the right answer; it is rewarded with the number of letters of the model's answers."""

    splits = {"train": 40, "eval": 4}

    def __init__(self, **settings_of_frozen_lake):
        pass

    def reset(self, split, index, seed):
        self.index, self.turn = 2 * index + (split == "eval"), 0
        return f"task {self.index}"

    def step(self, text):
        self.turn += 1
        info = {"success": False} | ({"expected": f"Right {self.index}"} if self.index % 4 == 0 else {})
        return f"turn {self.turn}", float(len(text)), self.turn == 2, False, info

    def demonstration(self, split, index):
        texts = [f"task {2 * index + (split == 'eval')}", "Up", "turn 1", "Up"]
        return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts)], False
'''


def test_a_run_that_teaches_itself_is_proven_and_replayed_bit_for_bit(tmp_path: Path) -> None:
    game = tmp_path / "game.py"
    game.write_text(GAME, encoding="utf-8")
    changes = (
        f"trainer.max_steps={N_STEPS}",
        "trainer.checkpointing_options.max_to_keep=9",
        f"data.env={game}",
        "data.n_eval_tasks=2",
        "model.path=configs/models/quickstart",
        "orchestrator.max_turns=2",
        "algorithm.name=mopd",
        "algorithm.outcome_coef=1",
        "services.orchestrator.teacher={url: self, templates: ['It is {expected} {sibling}.', '{expected}']}",
    )
    with training(tmp_path, *changes) as run:
        assert run.wait(800) == 0, run.text()
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    rows = [orjson.loads(line) for line in run.folder.metrics.read_bytes().splitlines()]
    tokenizer = ChatTokenizer(PROJECT / "configs/models/quickstart")
    taught = lacking = 0
    for version, row in zip(archive.versions(run.folder.archive), rows, strict=True):
        payloads = archive.read(run.folder.archive, run.folder.path.name, version)
        episodes = [one for payload in payloads for one in Group.decode(payload).trajectories]
        views = [one.teacher_view for one in episodes]
        assert sum(bool(view.lacks) for view in views) == row.get("teacher_lacks/expected", 0)
        for one in episodes:
            if one.teacher_view.lacks:
                lacking += 1
                assert (one.teacher_logprobs, "expected" in one.teacher_view.lacks) == (None, True)
            else:
                taught += 1
                check_taught(one, version, tokenizer)
    assert taught
    assert lacking
    command = [sys.executable, "-m", "volley", "replay", str(run.folder.path), "--from-step", "1", "--json"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert orjson.loads(done.stdout)["first_divergence"] is None


def check_taught(one: Trajectory, version: WeightVersion, tokenizer: ChatTokenizer) -> None:
    """The teacher saw the hint in front of the task and the same tokens after it, with weights before the step."""
    (prompt,) = one.teacher_view.prompts
    assert prompt.replaces == one.prompt_len
    assert WeightVersion.parse(prompt.version) < version
    text = tokenizer.decode(prompt.token_ids.tolist())
    assert "Right" in text
    own = tokenizer.decode(one.token_ids[: one.prompt_len].tolist())
    assert text.endswith(own[own.index("task ") :])
    sampled = one.loss_mask.astype(bool)
    assert np.isfinite(one.teacher_logprobs).all()
    assert (one.teacher_logprobs[sampled] < 0).all()
    assert not one.teacher_logprobs[~sampled].any()
