"""From disk to the engine, over a fake engine: order, idempotence, what failed versions do."""

from pathlib import Path

import pytest

from services.rollout.updates import Updates
from shared.errors import Conflict, Forbidden, WeightsError
from tests.rollout.fakes import FakeEngine
from tests.support import models

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8)


def publish(root: Path, version: str) -> Path:
    return models.write_checkpoint(root, version, CONFIG, models.random_weights(CONFIG, 0))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def updates(engine: FakeEngine, tmp_path: Path) -> Updates:
    return Updates(engine, tmp_path, CONFIG, "test")


async def test_the_newest_version_is_found_and_only_once(updates: Updates, engine: FakeEngine, tmp_path: Path) -> None:
    publish(tmp_path, "e000001-s000001")
    publish(tmp_path, "e000001-s000002")
    await updates.catch_up()
    await updates.catch_up()
    assert (engine.loaded, updates.current, updates.why_not_ready()) == (["e000001-s000002"], "e000001-s000002", None)


async def test_a_higher_epoch_wins_over_a_later_step(updates: Updates, tmp_path: Path) -> None:
    publish(tmp_path, "e000001-s000009")
    await updates.catch_up()
    publish(tmp_path, "e000002-s000003")
    await updates.catch_up()
    assert updates.current == "e000002-s000003"


async def test_a_version_that_fails_is_reported_and_not_hammered(updates: Updates, engine: FakeEngine, tmp_path: Path) -> None:
    publish(tmp_path, "e000001-s000001")
    engine.broken = {"e000001-s000001"}
    with pytest.raises(WeightsError):
        await updates.catch_up()
    await updates.catch_up()
    assert "e000001-s000001 is broken" in (updates.why_not_ready() or "")
    publish(tmp_path, "e000001-s000002")
    await updates.catch_up()
    assert (updates.current, updates.why_not_ready()) == ("e000001-s000002", None)


async def test_a_push_and_the_watcher_may_meet(updates: Updates, engine: FakeEngine, tmp_path: Path) -> None:
    folder = publish(tmp_path, "e000001-s000001")
    await updates.stage(str(folder / "manifest.json"))
    await updates.stage(str(folder))
    await updates.catch_up()
    result = await updates.commit("e000001-s000001", None, "retract")
    assert engine.loaded == ["e000001-s000001"]
    assert result.version == result.previous == "e000001-s000001"


async def test_a_commit_on_the_wrong_base_is_a_conflict(updates: Updates, tmp_path: Path) -> None:
    await updates.update(str(publish(tmp_path, "e000001-s000001")), None)
    await updates.stage(str(publish(tmp_path, "e000001-s000003")))
    with pytest.raises(Conflict, match="builds on e000001-s000002, but e000001-s000001 is serving"):
        await updates.commit("e000001-s000003", "e000001-s000002", None)
    with pytest.raises(Conflict, match="not staged"):
        await updates.commit("e000001-s000009", None, None)
    assert (await updates.commit("e000001-s000003", "e000001-s000001", None)).version == "e000001-s000003"


async def test_a_server_without_a_root_takes_no_weights(engine: FakeEngine) -> None:
    with pytest.raises(Forbidden):
        await Updates(engine, None, CONFIG, "test").stage("/etc")


async def test_weights_loaded_by_hand_stay_until_the_run_goes_on(updates: Updates, engine: FakeEngine, tmp_path: Path) -> None:
    publish(tmp_path, "e000001-s000001")
    models.write_hf(tmp_path / "export", CONFIG, models.random_weights(CONFIG, 1))
    await updates.update(str(tmp_path / "export"), None)
    await updates.catch_up()
    assert updates.current == "export"
    publish(tmp_path, "e000001-s000002")
    await updates.catch_up()
    assert updates.current == "e000001-s000002"
