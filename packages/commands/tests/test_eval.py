"""`volley eval`: one version measured alone, around simulated services, and nothing left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.run.folder import RunFolder
from volley.__main__ import parse_arguments
from volley.layout import PROJECT
from volley.reporting import jsonl
from volley.reporting.intervals import wilson
from volley_commands import evaluate

PROGRAM = """
import pathlib, sys
from volley.commands import train
from volley_commands import evaluate
from volley.local.stack import StackSeams
from tools.chaos.arena import SIMULATED
what, target, *rest = sys.argv[1:]
seams = StackSeams(SIMULATED)
if what == "train":
    raise SystemExit(train.main([target], rest, seams))
config, output, *overrides = rest
raise SystemExit(evaluate.main(target, [config] if config else [], overrides, pathlib.Path(output), seams))
"""
CONFIG = str(PROJECT / "configs/chaos.yaml")
MODEL = str(PROJECT / "configs/models/tiny")
RANDOM = "model.initial_weights=random"


def ran(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(300)
def test_a_model_is_measured_and_nothing_is_left(tmp_path: Path):
    told = ran(
        tmp_path, "eval", MODEL, CONFIG, "out.json", "data.n_eval_tasks=3", "run.dir=made/runs", "run.seed=4", RANDOM
    )
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (found["model"], found["manifest"], found["seed"]) == (MODEL, None, 4)
    by_env = {row["env"]: row for row in found["evaluations"]}
    assert by_env.keys() == {"frozen_lake", "sokoban"}
    for row in by_env.values():
        assert (row["n_tasks"], row["failed"]) == (3, 0)
        assert (row["low"], row["high"]) == wilson(round(3 * row["success"]), 3)
    assert f"held-out tasks, greedy; weights {MODEL}" in told
    assert list((tmp_path / "made/runs").iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_version_of_a_run_is_measured_as_the_run_measured_it(tmp_path: Path):
    ran(tmp_path, "train", CONFIG, f"model.path={MODEL}", "trainer.max_steps=3", "data.n_eval_tasks=3", "run.dir=runs")
    run = RunFolder(tmp_path / "runs/chaos")
    last = {row.get("env"): row for row in jsonl.read(run.evals) if row["step"] == 3}
    before = {path: path.read_bytes() for path in run.path.rglob("*.jsonl")}
    ran(tmp_path, "eval", "runs/chaos", "", "out.json")
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["model"] == f"{run.path}@{last[None]['version_max']}"
    assert len(found["manifest"]) == 64
    for row in found["evaluations"]:
        theirs = last[None if row["env"] == "frozen_lake" else row["env"]]
        assert all(row[key] == theirs[key] for key in ("success", "reward_mean", "turns_mean", "tokens", "ends"))
    assert {path: path.read_bytes() for path in run.path.rglob("*.jsonl")} == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["chaos"]


@pytest.mark.parametrize(
    ("target", "given", "why"),
    [
        ("nowhere", [], "is not the folder of a run"),
        (MODEL, [], "to evaluate a model, give --config"),
        ("nowhere", [CONFIG], "is no folder"),
        ("nowhere@latest", [CONFIG], "does not exist"),
        (f"{MODEL}@e000001-s000001", [CONFIG], "has no checkpoint"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, given: list[str], why: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        evaluate.main(target, given, [], None)
    assert why in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_could_not_be_written_is_refused_first(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no folder"):
        evaluate.main(MODEL, [CONFIG], [], tmp_path / "nowhere" / "out.json")


def test_values_may_stand_on_both_sides_of_an_option():
    arguments = parse_arguments(["eval", "runs/x", "a=1", "--config", "c.yaml", "b=2", "--json", "o.json", "c=3"])
    assert (arguments.target, arguments.overrides) == ("runs/x", ["a=1", "b=2", "c=3"])
    for wrong in (
        ["eval", "runs/x", "--config", "c.yaml", "b"],
        ["eval", "runs/x", "--bogus=1"],
        ["verify", "r", "a=1"],
    ):
        with pytest.raises(ConfigError, match=r"unrecognized arguments|is not of the form key\.path=value"):
            parse_arguments(wrong)


def test_a_folder_without_weights_is_not_measured_from_random_ones(tmp_path: Path):
    """Though the configuration's own model starts from them."""
    with pytest.raises(ConfigError, match=r"configs/models/tiny holds no model\.safetensors"):
        evaluate.main(MODEL, [CONFIG], [f"run.dir={tmp_path}"], None)


def test_nothing_is_generated_for_training_beside_the_evaluation():
    loaded, _ = evaluate._configured(MODEL, [CONFIG], [RANDOM])
    assert loaded.config.orchestrator.generation.eval_share is None
