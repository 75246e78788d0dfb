"""A trainer that is given other settings: recorded at its epoch, or refused; a run with more steps goes on."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.config import load
from shared.errors import ConfigError
from shared.run import pinned
from shared.run import state as states
from shared.run.checkpoint_files import newest
from shared.schema import RunConfig
from shared.types import WeightVersion
from tests.support.small_run import STEPS, Incarnation, make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that is done: two epochs, five steps."""
    return make(tmp_path / "runs" / "r")


def configured(folder: Path, *overrides: str) -> RunConfig:
    return load([folder / "config.yaml"], overrides).config


def head(folder: Path) -> states.TrainerState:
    found = newest(folder / "checkpoints")
    assert found is not None
    return states.verify(found)[1]


def go_on(folder: Path, *overrides: str) -> None:
    """Until the trainer has nothing to do; two more steps at most."""

    async def script(trainer: Incarnation) -> None:
        await trainer.until(lambda status: status.epoch)
        trainer.feed(13, 14, version=WeightVersion(trainer.status.epoch, STEPS))
        await trainer.until(lambda status: status.phase == "done" or status.durable_step == STEPS + 1)

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(Incarnation(folder, executor, config=configured(folder, *overrides)).run(script))


def test_what_is_in_force_is_recorded_once(folder: Path) -> None:
    state = head(folder)
    assert (state.phase, [epoch for epoch, _ in state.lineage]) == ("done", [1, 2])
    assert state.settings == ((1, pinned.relevant(configured(folder))),)


def test_a_run_with_more_steps_and_another_rate_goes_on_as_a_branch(folder: Path) -> None:
    go_on(folder, "trainer.max_steps=7", "trainer.optimizer_config.learning_rate=1e-6")
    state = head(folder)
    assert (state.phase, state.step, state.lineage[-1]) == ("rl", STEPS + 1, (3, STEPS))
    assert state.settings[1:] == ((3, {"trainer.max_steps": 7, "trainer.optimizer_config.learning_rate": 1e-6}),)
    assert pinned.in_force(state.settings, 2)["trainer.optimizer_config.learning_rate"] == 1e-5


def test_a_run_that_may_end_where_it_is_is_done(folder: Path) -> None:
    go_on(folder, "trainer.max_steps=6")
    assert head(folder).phase == "done"
    with pytest.raises(ConfigError, match=r"max_steps \(was 6, now 5\) may not change: 6 steps are already trained"):
        go_on(folder)


def test_what_may_not_change_ends_the_trainer_before_it_begins(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match=r"run\.seed \(was 0, now 1\) may not change"):
        go_on(folder, "run.seed=1")
    assert sorted(folder.rglob("*")) == before
