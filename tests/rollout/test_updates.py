"""From disk to the engine, over a fake engine: order, idempotence, what failed versions do."""

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.api.generation import GenerationRunner
from services.rollout.engines.base import GenerateRequest, SamplingParams
from services.rollout.weights import failures as load_failures
from services.rollout.weights.holds import VersionHolds
from services.rollout.weights.serving import Serving
from services.rollout.weights.update_lock import MAX_WAITING
from services.rollout.weights.updater import WeightUpdater
from shared.errors import Conflict, DeviceFailed, Forbidden, OutOfMemory, Unavailable, VolleyError, WeightsError
from shared.models.config import ModelConfig
from shared.published.manifest import Chunk, WeightOffer
from shared.run.checkpoint_files import BAD, MANIFEST, Probe
from tests.support import models
from tests.support.engine import FakeEngine

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8)
MODEL = ModelConfig.parse(CONFIG)


def publish(root: Path, version: str, seed: int = 0) -> Path:
    return models.write_checkpoint(root, version, CONFIG, models.random_weights(CONFIG, seed))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def updates(engine: FakeEngine, tmp_path: Path) -> WeightUpdater:
    return WeightUpdater(engine, tmp_path, MODEL, "test")


async def test_the_newest_version_is_found_and_only_once(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    publish(tmp_path, "e000001-s000001")
    publish(tmp_path, "e000001-s000002")
    await updates.catch_up()
    await updates.catch_up()
    assert (engine.loaded, updates.current, updates.why_not_ready()) == (["e000001-s000002"], "e000001-s000002", None)


async def test_a_higher_epoch_wins_over_a_later_step(updates: WeightUpdater, tmp_path: Path) -> None:
    publish(tmp_path, "e000001-s000009")
    await updates.catch_up()
    publish(tmp_path, "e000002-s000003")
    await updates.catch_up()
    assert updates.current == "e000002-s000003"


async def test_a_version_that_fails_is_reported_and_not_hammered(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    publish(tmp_path, "e000001-s000001")
    engine.refuses = {"e000001-s000001": itertools.repeat(WeightsError("e000001-s000001 is broken"))}
    with pytest.raises(WeightsError):
        await updates.catch_up()
    await updates.catch_up()
    assert "e000001-s000001 is broken" in str(updates.why_not_ready())
    publish(tmp_path, "e000001-s000002")
    await updates.catch_up()
    assert (updates.current, updates.why_not_ready()) == ("e000001-s000002", None)


@pytest.mark.parametrize(
    ("failures", "tries"),
    [
        ([WeightsError("0.0771 nats"), WeightsError("0.0772 nats"), WeightsError("0.0771 nats")], 3),
        ([WeightsError("lm_head is wrong"), OutOfMemory("lm_head is wrong"), WeightsError("lm_head is wrong")], 6),
        ([WeightsError("chunk a is wrong"), WeightsError("chunk b is wrong")], 6),
        ([OutOfMemory("no room")], 6),
        (
            [
                DeviceFailed("INTERNAL: device 0 is lost at 0x7f01"),
                DeviceFailed("INTERNAL: device 0 is lost at 0x7f02"),
            ],
            3,
        ),
        ([Unavailable("Too many open files")], 6),
    ],
    ids=["the same reason", "it may have been memory", "other reasons", "memory", "a lost device", "files"],
)
async def test_weights_refused_three_times_for_one_reason_are_not_read_again_by_this_process(
    updates: WeightUpdater,
    engine: FakeEngine,
    tmp_path: Path,
    failures: list[VolleyError],
    tries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_failures, "RETRY_BAD_S", 0.0)
    publish(tmp_path, "e000001-s000001")
    engine.refuses = {"e000001-s000001": itertools.cycle(failures)}
    for _ in range(6):
        with suppress(VolleyError):
            await updates.catch_up()
    assert len(engine.staging) == tries
    refused = updates.refused
    assert (refused is not None and refused.version == "e000001-s000001") == (tries == 3)
    engine.refuses = {}
    await updates.catch_up()
    assert (updates.current is None) == (tries == 3)
    await WeightUpdater(engine, tmp_path, MODEL, "test").catch_up()
    assert engine.loaded[-1:] == ["e000001-s000001"]  # a server that was started again begins to count anew
    publish(tmp_path, "e000001-s000002")
    await updates.catch_up()
    assert (updates.current, updates.refused) == ("e000001-s000002", None)


async def test_other_weights_of_a_refused_name_are_loaded(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    """As of a run that was begun anew from an empty folder."""
    folder = publish(tmp_path, "e000001-s000001")
    engine.refuses = {folder.name: itertools.repeat(WeightsError("lm_head is wrong"))}
    with pytest.raises(WeightsError):
        await updates.catch_up()
    engine.refuses = {}
    shutil.rmtree(folder)
    publish(tmp_path, folder.name, seed=1)
    await updates.catch_up()
    assert (updates.current, updates.refused) == (folder.name, None)


async def test_a_push_and_the_watcher_may_meet(updates: WeightUpdater, engine: FakeEngine, tmp_path: Path) -> None:
    folder = publish(tmp_path, "e000001-s000001")
    await updates.stage(str(folder / "manifest.json"))
    await updates.stage(str(folder))
    await updates.catch_up()
    result = await updates.commit("e000001-s000001", None, "retract")
    assert engine.loaded == ["e000001-s000001"]
    assert result.version == result.previous == "e000001-s000001"


async def test_a_commit_on_the_wrong_base_is_a_conflict(updates: WeightUpdater, tmp_path: Path) -> None:
    await updates.update(str(publish(tmp_path, "e000001-s000001")), None)
    await updates.stage(str(publish(tmp_path, "e000001-s000003")))
    with pytest.raises(Conflict, match="builds on e000001-s000002, but e000001-s000001 is serving"):
        await updates.commit("e000001-s000003", "e000001-s000002", None)
    with pytest.raises(Conflict, match="not staged"):
        await updates.commit("e000001-s000009", None, None)
    assert (await updates.commit("e000001-s000003", "e000001-s000001", None)).version == "e000001-s000003"


async def test_a_server_without_a_root_takes_no_weights(engine: FakeEngine) -> None:
    with pytest.raises(Forbidden):
        await WeightUpdater(engine, None, MODEL, "test").stage("/etc")


async def test_weights_loaded_by_hand_stay_until_the_run_goes_on(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    publish(tmp_path, "e000001-s000001")
    models.write_hf(tmp_path / "export", CONFIG, models.random_weights(CONFIG, 1))
    await updates.update(str(tmp_path / "export"), None)
    await updates.catch_up()
    assert updates.current == "export"
    publish(tmp_path, "e000001-s000002")
    await updates.catch_up()
    assert updates.current == "e000001-s000002"


@pytest.mark.parametrize(
    ("serving", "late"), [("e000001-s000005", "e000001-s000004"), ("e000002-s000003", "e000001-s000009")]
)
async def test_a_server_never_goes_back(updates: WeightUpdater, tmp_path: Path, serving: str, late: str) -> None:
    """An older push overtaken by a newer one, and a trainer that was replaced after a rollback and wakes up."""
    await updates.update(str(publish(tmp_path / "apart", serving)), None)
    for folder in (publish(tmp_path / "apart", late), publish(tmp_path, late)):
        with pytest.raises(Conflict, match=f"{late} is older than {serving}"):
            await updates.update(str(folder), None)
    await updates.catch_up()
    assert updates.current == serving


async def test_a_replaced_trainer_is_refused_before_the_server_has_followed(
    updates: WeightUpdater, tmp_path: Path
) -> None:
    await updates.update(str(publish(tmp_path, "e000001-s000004")), None)
    publish(tmp_path, "e000002-s000003")
    with pytest.raises(Conflict, match="earlier epoch than e000002-s000003"):
        await updates.update(str(publish(tmp_path, "e000001-s000005")), None)


async def test_a_version_has_one_content(updates: WeightUpdater, tmp_path: Path) -> None:
    await updates.update(str(publish(tmp_path / "a", "e000001-s000001")), None)
    with pytest.raises(Conflict, match="another digest"):
        await updates.update(str(publish(tmp_path / "b", "e000001-s000001", seed=1)), None)


async def test_a_run_that_was_begun_anew_is_followed(updates: WeightUpdater, tmp_path: Path) -> None:
    """Its folder was emptied while this server lived on."""
    await updates.update(str(publish(tmp_path, "e000002-s000009")), None)
    shutil.rmtree(tmp_path / "e000002-s000009")
    await updates.catch_up()
    assert updates.current == "e000002-s000009"
    publish(tmp_path, "e000001-s000000")
    await updates.catch_up()
    assert updates.current == "e000001-s000000"


async def test_a_version_that_was_set_aside_as_damaged_serves_until_a_newer_one_comes(
    updates: WeightUpdater, tmp_path: Path
) -> None:
    """It was whole when it was loaded; what is left on disk is older."""
    publish(tmp_path, "e000001-s000001")
    await updates.update(str(publish(tmp_path, "e000001-s000002") / MANIFEST), None)
    (tmp_path / BAD).mkdir()
    (tmp_path / "e000001-s000002").rename(tmp_path / BAD / "e000001-s000002")
    await updates.catch_up()
    assert (updates.current, updates.state.n_resets) == ("e000001-s000002", 0)
    publish(tmp_path, "e000002-s000001")
    await updates.catch_up()
    assert updates.current == "e000002-s000001"


async def test_a_run_that_was_begun_anew_is_followed_though_nothing_serves(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    await updates.update(str(publish(tmp_path, "e000002-s000009")), None)
    engine.arrays = "others"
    await updates.audit()
    shutil.rmtree(tmp_path / "e000002-s000009")
    publish(tmp_path, "e000001-s000000")
    await updates.catch_up()
    assert (updates.current, updates.why_not_ready()) == ("e000001-s000000", None)


async def test_a_push_that_serves_meanwhile_is_not_undone_by_the_watcher(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    await updates.update(str(publish(tmp_path, "e000001-s000005")), None)
    shutil.rmtree(tmp_path / "e000001-s000005")
    publish(tmp_path, "e000001-s000000")
    engine.stages = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(updates.update(str(publish(tmp_path / "pushed", "e000002-s000000")), None))
        while "e000002-s000000" not in engine.staging:
            await asyncio.sleep(0)
        group.create_task(updates.catch_up())
        await asyncio.sleep(0.05)
        publish(tmp_path, "e000002-s000000")
        engine.stages.set()
    assert (updates.current, updates.state.n_resets) == ("e000002-s000000", 0)


async def test_a_commit_without_an_answer_leaves_nothing_that_serves(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    """The engine may have swapped before the caller gave up."""
    await updates.update(str(publish(tmp_path, "e000001-s000001")), None)
    engine.commits = asyncio.Event()
    pushing = asyncio.ensure_future(updates.update(str(publish(tmp_path, "e000001-s000002")), None))
    while engine.version != "e000001-s000002":
        await asyncio.sleep(0)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert updates.current is None
    assert "its commit was not answered" in str(updates.why_not_ready())
    engine.commits = None
    await updates.catch_up()
    assert (updates.current, updates.why_not_ready()) == ("e000001-s000002", None)


async def test_a_version_is_not_called_bad_for_what_befell_its_update(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    def busy() -> None:
        raise Unavailable("the engine is busy")

    publish(tmp_path, "e000001-s000001")
    engine.on_stage = busy
    with pytest.raises(Unavailable):
        await updates.catch_up()
    assert "cannot be loaded" not in str(updates.why_not_ready())
    engine.on_stage = lambda: None
    await updates.catch_up()
    assert updates.current == "e000001-s000001"


async def test_waiting_for_a_turn_has_its_own_bound(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.weights.update_lock.WAIT_S", 0.05)
    engine.stages = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(updates.update(str(publish(tmp_path, "e000001-s000001")), None))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="did not start"):
            await updates.update(str(publish(tmp_path, "e000001-s000002")), None)
        engine.stages.set()
    await updates.update(str(tmp_path / "e000001-s000002"), None)
    assert updates.current == "e000001-s000002"


async def test_an_engine_that_keeps_old_weights_serves_nothing(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    """It acknowledges the commit and labels tokens with the new version."""
    await updates.update(str(publish(tmp_path, "e000001-s000001")), None)
    engine.stubborn = True
    with pytest.raises(WeightsError, match="computes with other arrays"):
        await updates.update(str(publish(tmp_path, "e000001-s000002", seed=1)), None)
    assert updates.current is None
    assert "e000001-s000002 differs from the weights that were loaded" in str(updates.why_not_ready())
    engine.stubborn = False
    await updates.catch_up()
    assert (updates.current, updates.why_not_ready()) == ("e000001-s000002", None)


@pytest.mark.parametrize(
    ("fault", "value"),
    [("arrays", "others"), ("version", "e000001-s000000"), ("logprobs", np.array([-0.51, -1.51], np.float32))],
)
async def test_weights_that_change_while_they_serve_are_found_and_loaded_again(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path, fault: str, value: Any
) -> None:
    probe = Probe((1, 2, 3), (-0.5, -1.5))
    models.write_checkpoint(tmp_path, "e000001-s000001", CONFIG, models.random_weights(CONFIG, 0), probe=probe)
    await updates.catch_up()
    await updates.audit()
    assert updates.current == "e000001-s000001"
    good = getattr(engine, fault)
    setattr(engine, fault, value)
    await updates.audit()
    assert updates.current is None
    assert "differs from the weights that were loaded" in str(updates.why_not_ready())
    setattr(engine, fault, good)
    await updates.catch_up()
    assert (updates.current, updates.why_not_ready()) == ("e000001-s000001", None)


async def test_updates_that_wait_are_few(updates: WeightUpdater, engine: FakeEngine, tmp_path: Path) -> None:
    folders = [publish(tmp_path, f"e000001-s{i:06d}") for i in range(MAX_WAITING + 3)]
    engine.stages = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(updates.update(str(folder), None)) for folder in folders[:MAX_WAITING]]
        await asyncio.sleep(0.05)
        for folder in folders[MAX_WAITING:]:
            with pytest.raises(Unavailable, match="already waiting"):
                await updates.stage(str(folder))
        engine.stages.set()
    assert [task.result()[0].version for task in tasks] == engine.loaded
    await updates.update(str(folders[-1]), None)
    assert updates.current == folders[-1].name


async def distrusted_by_an_audit(updates: WeightUpdater, engine: FakeEngine, root: Path) -> None:
    good, engine.arrays = engine.arrays, "others"
    await updates.audit()
    engine.arrays = good


async def distrusted_by_its_commit(updates: WeightUpdater, engine: FakeEngine, root: Path) -> None:
    engine.stubborn = True
    with pytest.raises(WeightsError, match="computes with other arrays"):
        await updates.update(str(publish(root, "e000001-s000002", seed=1)), None)
    engine.stubborn = False


async def begun_anew(updates: WeightUpdater, engine: FakeEngine, root: Path) -> None:
    shutil.rmtree(root / "e000001-s000001")
    publish(root, "e000001-s000000")


@pytest.mark.parametrize("happens", [distrusted_by_an_audit, distrusted_by_its_commit, begun_anew])
async def test_what_ran_on_wrong_weights_is_nobodys_data_after_the_right_ones_serve(
    updates: WeightUpdater,
    engine: FakeEngine,
    tmp_path: Path,
    happens: Callable[[WeightUpdater, FakeEngine, Path], Awaitable[None]],
) -> None:
    """Nor are keys and values that they computed read again."""
    updates.default_mode = "in_place"
    generation = GenerationRunner(engine, 1.0, updates)
    request = GenerateRequest("a", np.array([5], np.int32), SamplingParams(max_new_tokens=4))
    publish(tmp_path, "e000001-s000001")
    await updates.catch_up()
    engine.hold = True
    running = asyncio.ensure_future(generation.run([request]))
    await asyncio.sleep(0)
    await happens(updates, engine, tmp_path)
    await updates.catch_up()
    assert updates.why_not_ready() is None
    await engine.abort(None)
    with pytest.raises(Unavailable, match="changed unexpectedly"):
        await running
    engine.hold = False
    await generation.run([request])
    assert engine.modes[-1] == "retract"
    await updates.update(str(publish(tmp_path, "e000001-s000003")), None)
    assert engine.modes[-1] == "in_place"


async def test_a_held_version_serves_until_it_is_released(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    publish(tmp_path, "e000001-s000001")
    await updates.catch_up()
    updates.hold("one", "e000001-s000001", 30)
    updates.hold("two", "e000001-s000001", 30)
    newer = publish(tmp_path, "e000001-s000002", 1)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        updating = group.create_task(updates.update(str(newer), None))
        while updates.staged is None:
            await asyncio.sleep(0.01)
        with pytest.raises(Conflict):
            updates.hold("three", "e000001-s000002", 30)
        await updates.catch_up()
        await updates.audit()
        updates.hold("one", "e000001-s000001", 0)
        await asyncio.sleep(0.05)
        assert (updates.current, updating.done()) == ("e000001-s000001", False)
        updates.hold("two", "e000001-s000001", 0)
    staged, _ = updating.result()
    assert (updates.current, engine.loaded) == ("e000001-s000002", ["e000001-s000001", "e000001-s000002"])
    assert staged.timings["held_s"] > 0
    with pytest.raises(Conflict):
        updates.hold("one", "e000001-s000001", 30)


class SlowlyStaging(WeightUpdater):
    """Stages a checkpoint in place of a published version, once `may_stage` is set."""

    may_stage = asyncio.Event()

    async def _stage(self, wanted: str | WeightOffer, name: str | None = None) -> Any:
        assert isinstance(wanted, WeightOffer)
        await self.may_stage.wait()
        assert self.root is not None
        return await super()._stage(str(self.root / wanted.version), name)


async def test_a_version_can_be_held_while_it_is_loaded(engine: FakeEngine, tmp_path: Path) -> None:
    updates, version = SlowlyStaging(engine, tmp_path, MODEL, "test"), "e000001-s000001"
    publish(tmp_path, version)
    with pytest.raises(Conflict):
        updates.hold("one", version, 30)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(updates.update(WeightOffer(version, Chunk("0" * 64, 1), ()), None))
        await asyncio.sleep(0.01)
        updates.hold("one", version, 30)
        updates.may_stage.set()
    assert updates.current == version


async def test_a_lease_ends_after_its_time() -> None:
    now = [0.0]
    holds = VersionHolds(lambda: now[0])
    holds.take("one", "a", 1e9)
    assert holds.blocks("b")
    assert not holds.blocks("a")
    now[0] = 61.0
    assert not holds.blocks("b")
    await holds.passed("b")
    holds.take("two", "b", 1.0)
    assert holds.blocks("a")


async def test_running_requests_keep_their_cache_if_the_same_weights_are_loaded_again(
    updates: WeightUpdater, engine: FakeEngine, tmp_path: Path
) -> None:
    await updates.update(str(publish(tmp_path, "e000001-s000001")), None)
    assert isinstance(updates.state, Serving)
    assert updates.state.update is not None
    updates.staged = replace(updates.state.update, digest="that of the published version")
    await updates.commit("e000001-s000001", None, "retract")
    await updates.update(str(publish(tmp_path, "e000001-s000002")), None)
    assert engine.modes == ["retract", "in_place", "retract"]
