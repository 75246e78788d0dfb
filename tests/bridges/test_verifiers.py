"""Environments of verifiers 0.4 in a run's sessions: the real package beside the real recorder."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from packages.agents.tests.sessions.programs import ProgramEnv, orchestrating
from packages.agents.tests.sessions.recorder import TOKENIZER, WIDE, said
from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.failures import AgentDied
from tests.orchestrator.fakes import ScriptedEngine, spec
from tests.support.asgi import served
from tests.support.foreign import environment

pytestmark = pytest.mark.timeout(900)
BRIDGE = Path("bridges/agents").absolute()
EXAMPLES = BRIDGE / "examples"
COMMAND = ("-m", "volley_agents.verifiers", "guessing", "--eval-tasks", "5")


@pytest.fixture(scope="module")
def python() -> Path:
    project = tomllib.loads((BRIDGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return environment("verifiers", [*project["dependencies"], *project["optional-dependencies"]["verifiers"]])


def variables(python: Path, *folders: Path) -> dict[str, str]:
    """The environment of a process in which `folders` hold modules."""
    path = os.pathsep.join(map(str, (BRIDGE, *folders)))
    return {**os.environ, "PYTHONPATH": path, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}


@asynccontextmanager
async def worker(python: Path, url: str):
    """A worker that plays the tasks of `guessing` for the orchestrator at `url`."""
    command = [str(python), *COMMAND, "--orchestrator", url, "--parallel", "1"]
    process = await asyncio.create_subprocess_exec(*command, env=variables(python, EXAMPLES))
    try:
        yield
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


def expected(answers: Sequence[str], right: str) -> float:
    return float(answers[-1] == right) + 0.5 / len(answers)


@pytest.mark.long
async def test_rollouts_and_rewards_are_those_of_the_package(python: Path, tmp_path: Path) -> None:
    env, bounds = ProgramEnv(kind="external", judged=False, prompt="train 3"), replace(WIDE, timeout_s=240.0)
    for n, answers in enumerate((["1"], ["2", "5", "1"], ["x", "y", "z", "w"])):  # task 3 of the rest is the 8th of all
        engine = ScriptedEngine(script=[said(text) for text in answers])
        async with (
            orchestrating(tmp_path / str(n), env, bounds, engine) as (recorder, runner),
            served(recorder.app) as url,
        ):
            recorder.app.state.sessions.base_url = f"{url}/v1"
            async with worker(python, url):
                trajectory = await runner.run(spec(), TokenBudget(1))
        assert trajectory.reward == pytest.approx(expected(answers, "1"))
        assert sum(trajectory.reward_components.values()) == pytest.approx(trajectory.reward)
        turns = [turn for turn in trajectory.turns if turn.role == "assistant"]
        assert len(turns) == len(answers)
        assert not trajectory.branches
        sampled = [token for token, trained in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if trained]
        assert sampled == [token for ids in engine.outputs for token in ids]
        assert "Guess 8" in TOKENIZER.decode(trajectory.token_ids)


@pytest.mark.long
async def test_an_episode_that_breaks_gives_no_reward(python: Path, tmp_path: Path) -> None:
    """A task that the taskset does not have."""
    env, bounds = ProgramEnv(kind="external", judged=False, prompt="train 99"), replace(WIDE, timeout_s=240.0)
    async with orchestrating(tmp_path, env, bounds) as (recorder, runner), served(recorder.app) as url:
        played = asyncio.create_task(runner.run(spec(), TokenBudget(1)))
        async with worker(python, url):
            await asyncio.wait([played])
        assert isinstance(played.exception(), AgentDied)


@pytest.mark.long
def test_the_class_of_the_tasks_has_the_sizes_of_the_splits(python: Path, tmp_path: Path) -> None:
    command = [str(python), *COMMAND, "--write-tasks", str(tmp_path / "tasks.py")]
    subprocess.run(command, env=variables(python, EXAMPLES), check=True, timeout=300)
    tasks = runpy.run_path(str(tmp_path / "tasks.py"))["Tasks"]()
    assert (tasks.agent, tasks.splits) == ("external", {"train": 15, "eval": 5})
    assert tasks.reset("eval", 4, 0) == "eval 4"


@pytest.mark.parametrize("version", [None, "0.1.6.post0", "0.4.9"])
def test_a_package_that_is_not_supported_is_refused_by_name(tmp_path: Path, version: str | None) -> None:
    """No package, one of another version, and one of this version without the names that are needed."""
    if version:
        (tmp_path / "verifiers" / "v1").mkdir(parents=True)
        for name in ("__init__.py", "v1/__init__.py"):
            (tmp_path / "verifiers" / name).touch()
        (tmp_path / f"verifiers-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n"
        (tmp_path / f"verifiers-{version}.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, *COMMAND],
        env=variables(Path(sys.executable), tmp_path),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert ended.returncode == 1
    assert re.search("verifiers .*0.4: uv pip install", ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_a_taskset_that_cannot_be_loaded_is_named(python: Path) -> None:
    command = [str(python), "-m", "volley_agents.verifiers", "nowhere"]
    ended = subprocess.run(
        command, env=variables(python), capture_output=True, encoding="utf-8", check=False, timeout=300
    )
    assert ended.returncode == 1
    assert "nowhere cannot be loaded" in ended.stderr
    assert "Traceback" not in ended.stderr
