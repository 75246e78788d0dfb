"""Runs of a Python program: started, stopped, continued, read, exported, and from a running event loop."""

from __future__ import annotations

from pathlib import Path

import pytest

import volley
from shared.config import load
from shared.run.folder import RunFolder
from volley.layout import PROJECT
from volley_proof.verify.command import verify
from volley_python.process import CommandFailed

CONFIG = "tests/system/small.yaml"

pytestmark = pytest.mark.timeout(900)  # whole runs: a busy machine takes minutes to start one


@pytest.mark.long
def test_a_run_is_stopped_continued_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = volley.train(config=CONFIG, name="mine", run={"dir": str(tmp_path)}, trainer={"max_steps": 400}, wait=False)
    with run:
        assert (run.state, run.folder) == ("running", tmp_path / "mine")
        assert any(event.kind == "step" for event in run.follow())
    assert run.state == "stopped"
    with pytest.raises(CommandFailed, match="was stopped"):
        run.wait()
    done = int(run.client.steps()[-1]["step"])
    again = volley.resume(run.folder, trainer={"max_steps": done + 1})
    assert again.state == "finished"
    assert again.summary()["steps"] == done + 1
    assert len(again.trajectories(step_min=done + 1)) == 8
    assert "DONE: steps=" in capsys.readouterr().out
    exported = again.export(tmp_path / "exported")
    assert (exported / "model.safetensors").exists()


async def test_supervised_rows_from_a_running_loop(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    settings = {"run.dir": str(tmp_path), "model.initial_weights": "random", "rollout.engine.context_length": 64}
    run = await volley.aio.sft([talk] * 8, "configs/models/tiny", epochs=1, display=False, **settings)
    assert run.state == "finished"
    assert (await run.summary())["steps"] >= 1
    assert len([*run.folder.glob("inputs/*/train.jsonl")]) == 1


def test_rows_and_a_reward_are_enough(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(completion, row):\n    return len(completion) / row['n']\n", "utf-8")
    rows = [{"prompt": f"Write {i}.", "n": 100} for i in range(20)]
    settings = {"run.dir": str(tmp_path), "model.initial_weights": "random", "trainer.max_steps": 1}
    settings |= {"grpo_config.max_response_length": 8, "trainer.groups_per_step": 2}
    model, reward = PROJECT / "configs/models/quickstart", tmp_path / "reward.py"
    run = volley.train(model, rows, reward, name="own", display=False, **settings)
    assert run.state == "finished"
    assert run.summary()["steps"] == 1
    (source,) = load([run.folder / "config.yaml"]).config.data.sources
    assert {episode.env for episode in run.trajectories()} == {source}
    assert verify(RunFolder(run.folder))["violations"] == []
