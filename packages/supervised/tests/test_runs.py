"""`volley sft` and `volley dpo`: the configuration they make, what they show and report, what is proven of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from shared import config, packages
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.run import pinned
from shared.run import state as states
from shared.run.folder import RunFolder
from shared.run.protected_files import FollowedFiles
from shared.run.state import TrainerState, initial_state
from volley.__main__ import parse_arguments
from volley.commands import train
from volley.local import stack
from volley.reporting.lines import sft_line
from volley.runs.record import claimed, mark_finished
from volley_dashboard.report import report
from volley_proof.verify.command import verify
from volley_supervised import command
from volley_supervised.report import make

ROOT = Path(__file__).parents[3]
STEPS = 3


def configured(monkeypatch: pytest.MonkeyPatch, *words: str) -> LoadedConfig:
    """Configuration that the command would run."""
    found: list[LoadedConfig] = []

    def run(loaded: LoadedConfig, _seams: stack.StackSeams) -> int:
        found.append(loaded)
        return 0

    monkeypatch.setattr(command.train, "start_or_continue", run)
    arguments = parse_arguments(words)
    assert arguments.command(arguments) == 0
    return found[0]


def test_files_and_a_model_are_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    words = ("sft", "--model", "m", "--eval", "b.jsonl", "--epochs", "3", "a.jsonl", "c=d.jsonl", "sft.batch_size=4")
    (tmp_path / "c=d.jsonl").touch()
    made = configured(monkeypatch, *words).config
    assert made.mode == "sft"
    assert made.sft.train == (tmp_path / "a.jsonl", tmp_path / "c=d.jsonl")
    assert made.sft.eval == (tmp_path / "b.jsonl",)
    assert (made.sft.epochs, made.sft.batch_size, made.run.name) == (3, 4, "sft")
    assert not made.needs_environment


def test_a_configuration_of_rl_gives_its_environments_demonstrations(monkeypatch: pytest.MonkeyPatch):
    made = configured(monkeypatch, "sft", "--config", str(ROOT / "configs/quickstart.yaml")).config
    assert (made.run.name, made.sft.train, made.needs_environment) == ("quickstart-sft", (), True)
    assert made.sft.max_steps == 600
    pairs = configured(monkeypatch, "dpo", "p.jsonl", "--model", "m", "run.name=x", "dpo.beta=0.3").config
    assert (pairs.mode, pairs.run.name, pairs.dpo.beta) == ("dpo", "x", 0.3)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("sft", "a.jsonl"), "no model is named"),
        (("sft", "--model", "m"), "data.env is missing"),
        (("dpo", "--model", "m"), "needs sft.train"),
        (("sft", "a.jsonl", "--model", "m", "sft.epochs=1", "sft.max_steps=5"), "both set the length"),
        (("sft", "a.jsonl", "--model", "m", "mode=sft+rl", "data.env=e"), "needs sft.max_steps or sft.epochs"),
    ],
)
def test_what_is_missing_is_named(words: tuple[str, ...], why: str):
    arguments = parse_arguments(words)
    with pytest.raises(ConfigError, match=why):
        arguments.command(arguments)


def test_files_that_are_not_there_are_found_before_anything_is_started(tmp_path: Path):
    arguments = parse_arguments(
        ["sft", str(tmp_path / "a.jsonl"), "--model", str(tmp_path), f"run.dir={tmp_path}/runs"]
    )
    with pytest.raises(ConfigError, match=r"a\.jsonl: no such file or folder"):
        arguments.command(arguments)
    assert not (tmp_path / "runs").exists()


def line(step: int, **more: Any) -> dict[str, Any]:
    measured = (
        {"loss": 2.0 / step, "grad_norm": 1.0, "tokens": 10, "tokens_per_sec": 100.0, "step_s": 0.1} if step else {}
    )
    known = {"step": step, "max_steps": STEPS, "epoch": step / 2, "version": f"e000001-s{step:06d}"}
    return {**known, **measured, **more}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run that has ended."""
    tree = {"mode": "sft", "run": {"name": "r", "dir": str(tmp_path)}, "model": {"path": str(tmp_path)}}
    loaded = config.validate({**tree, "sft": {"train": [str(tmp_path / "a.jsonl")], "batch_size": 4}})
    told = [line(0, examples=8, dropped=2, truncated=0, eval_loss=3.0), line(1), line(2), line(3, eval_loss=1.5)]
    with claimed(loaded) as claim:
        made = claim.folder
        made.sft.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in told))
        data = {"digest": "abc", "examples": 8, "epoch": 1, "offset": 4}
        begun = initial_state(0).starting_epoch(1, keep_reference=False, settings=pinned.relevant(loaded.config))
        saved(made, replace(begun, step=STEPS, phase="done", metrics=tuple(told[1:]), data=data))
        mark_finished(made, claim.record)
    return made


def saved(folder: RunFolder, state: TrainerState) -> None:
    """A checkpoint without weights."""
    from services.trainer.checkpoints.store import CheckpointFolders
    from services.trainer.models.arrays import CheckpointContents
    from tools.simulated.trainer import NumpyArrays

    checkpoints = CheckpointFolders(folder.checkpoints, "r", 3, NumpyArrays())
    checkpoints.fence(1)
    checkpoints.save(state, CheckpointContents({"w": np.zeros(2, np.float32)}, {}, None, {}, None), None)


def test_a_run_is_reported_from_its_lines(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    assert report.main(folder.path) == 0
    told = capsys.readouterr().out
    for part in (
        "3 of 3 (1.50 epochs)",
        "8 examples, 2 too long and dropped",
        "2.0000 → 0.6667",
        "3.0000 → 1.5000",
        "e000001-s000003",
        f"model.path={folder.path}@latest",
    ):
        assert part in told
    summary = orjson.loads(folder.summary.read_bytes())
    assert (summary["tokens_trained"], summary["tokens_per_sec"], summary["finished"]) == (30, 100.0, True)


def test_a_finished_run_is_reported_without_the_dashboard(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    points = {name: point for name, point in packages.found(packages.PARTS).items() if name != "report"}
    monkeypatch.setattr(packages, "found", lambda group: points)
    assert train.resume(folder.path, []) == 0
    assert "3 of 3 (1.50 epochs)" in capsys.readouterr().out


def test_what_is_proven_of_a_run(folder: RunFolder):
    proof = verify(folder)
    assert proof["violations"] == []
    assert (proof["ok"], proof["steps"], proof["head"]) == (True, STEPS, "e000001-s000003")
    whole = folder.sft.read_bytes().splitlines(keepends=True)
    for lines, detail in (
        (whole[:2] + whole[3:], "holds"),
        (whole[:3] + whole[2:], "after step"),
        ([*whole[:3], orjson.dumps(line(3, loss=9.0)) + b"\n"], "its line differs from the one in e000001-s000003"),
        ([*whole, b"{]\n"], "not a line"),
    ):
        folder.sft.write_bytes(b"".join(lines))
        found = verify(folder)["violations"]
        if lines == whole[:2] + whole[3:]:  # the checkpoint holds the line that is gone
            assert found == []
        else:
            assert [one["kind"] for one in found] == ["metrics"]
            assert detail in found[0]["detail"]
    folder.sft.write_bytes(b"".join(whole))
    folder.config.write_text(
        folder.config.read_text(encoding="utf-8").replace("batch_size: 4", "batch_size: 5"), encoding="utf-8"
    )
    assert {one["kind"] for one in verify(folder)["violations"]} == {"config", "state"}


def test_a_finished_run_names_the_way_on(folder: RunFolder):
    with pytest.raises(ConfigError, match="continue from its weights"), claimed(config.stored(folder.path)):
        pass


def test_a_line_for_people():
    others = {"eval_examples": 3, "eval_dropped": 1, "identical": 1, "without_tools": 2}
    told = sft_line(line(0, examples=8, **others))
    assert "8 examples, 1 with two identical answers and dropped, 2 whose tools the chat template leaves out" in told
    assert "3 held out, 1 too long and dropped" in told
    assert sft_line(line(0, examples=8, dropped=2, truncated=1)).split("  ") == [
        "step 0/3",
        "8 examples, 2 too long and dropped, 1 too long and truncated",
        "epoch 0.00",
        "weights e000001-s000000",
    ]
    assert sft_line(line(3, eval_loss=1.5)).startswith("step 3/3  epoch 1.50  loss 0.6667  held-out loss 1.5000")
    assert sft_line(line(3) | {"max_steps": 600}) == ""


def test_demonstrations_that_are_not_those_that_were_learned_are_named(folder: RunFolder):
    lines = [b'{"messages":[{"role":"user","content":"%d"}]}\n' % n for n in range(3)]
    folder.demonstrations.write_bytes(b"".join(lines))
    found = FollowedFiles(folder).now()
    state, _ = states.read(folder.checkpoints / f"e000001-s{STEPS:06d}")
    saved(folder, replace(state, files=found))
    assert verify(folder)["violations"] == []
    for changed in (b"".join(lines[::-1]), b"", b"".join(lines[:2])):
        folder.demonstrations.write_bytes(changed)
        assert [one["file"] for one in verify(folder)["violations"]] == ["demonstrations.jsonl"]
    folder.demonstrations.unlink()
    assert [one["file"] for one in verify(folder)["violations"]] == ["demonstrations.jsonl"]


def test_lines_after_the_last_step_are_named_and_not_reported(folder: RunFolder):
    steps = make(folder)["steps"]
    with folder.sft.open("ab") as file:
        file.write(orjson.dumps(line(STEPS + 4, loss=0.0)) + b"\n")
    assert [one["file"] for one in verify(folder)["violations"]] == ["sft.jsonl"]
    assert make(folder)["steps"] == steps
