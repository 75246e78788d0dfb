"""The two stand-ins: tokens depend on seed and prompt alone, weights on everything that is trained, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engines.base import EngineInfo, EngineSpec, GenerateRequest, SamplingParams
from services.rollout.engines.staged import StagedWeights
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.groups.group_buffer import ready_group
from shared.errors import Unavailable, WeightsError
from shared.run.checkpoint_files import digest_files, read_manifest
from shared.run.state import initial_state
from shared.types import Group, VersionSpan, WeightVersion
from tests.support.small_run import group
from tests.support.tokenizer import FOLDER
from tools.simulated.rollout import SimulatedEngine, draw, load, open_engine
from tools.simulated.trainer import NumpyArrays, SimulatedBackend

INFO = EngineInfo(512, 256, 4096, 16, (2,), 0.0, 1)
V1 = WeightVersion(1, 0)
GROUPS = [group(ticket, V1) for ticket in (1, 2, 3)]


def backend(folder: Path, epoch: int = 1) -> SimulatedBackend:
    checkpoints = CheckpointFolders(folder, "r", 3, NumpyArrays())
    checkpoints.fence(epoch)
    return SimulatedBackend(checkpoints, {}, 0)


def trained(folder: Path, groups: Sequence[Group]) -> bytes:
    one = backend(folder)
    one.build()
    one.step([ready_group(g, b"", "") for g in groups], V1)
    return b"".join(value.tobytes() for _, value in sorted(one.params.items()))


def test_weights_are_a_function_of_the_groups(tmp_path: Path):
    assert trained(tmp_path, GROUPS) == trained(tmp_path, GROUPS)


@pytest.mark.parametrize(
    "others", [GROUPS[:2], [*GROUPS, GROUPS[2]], [GROUPS[1], GROUPS[0], GROUPS[2]]], ids=["lost", "doubled", "swapped"]
)
def test_a_group_lost_doubled_or_swapped_changes_them(tmp_path: Path, others: list[Group]):
    assert trained(tmp_path, others) != trained(tmp_path, GROUPS)


def test_a_reward_changes_them_and_an_attempt_does_not(tmp_path: Path):
    first, *rest = GROUPS[0].trajectories
    again = replace(GROUPS[0], trajectories=(replace(first, attempt=3, timings={"total_s": 1.0}), *rest))
    better = replace(GROUPS[0], trajectories=(replace(first, reward=first.reward + 1e-9), *rest))
    assert trained(tmp_path, [again]) == trained(tmp_path, GROUPS[:1])
    assert trained(tmp_path, [better]) != trained(tmp_path, GROUPS[:1])


def test_a_resumed_learner_goes_on_bit_by_bit(tmp_path: Path):
    first = backend(tmp_path / "a")
    state = initial_state(0).starting_epoch(1, keep_reference=False)
    first.build()
    first.start(state)
    first.step([ready_group(GROUPS[0], b"", "")], V1)
    first.save(replace(state, step=1), V1)
    second = backend(tmp_path / "a", 2)
    restored = second.restore()
    assert restored is not None
    second.build()
    second.start(restored.starting_epoch(2, keep_reference=False))
    for one in (first, second):
        one.step([ready_group(GROUPS[1], b"", "")], WeightVersion(1, 1))
    assert all(np.array_equal(first.params[name], second.params[name]) for name in first.params)


def test_tokens_depend_on_seed_and_prompt_alone():
    prompt, sampling = np.array([5, 6, 7], np.int32), SamplingParams(max_new_tokens=8, sampling_seed=3)
    (ids, logprobs), (again, _) = draw(prompt, sampling, INFO), draw(prompt, sampling, INFO)
    assert ids.tolist() == again.tolist()
    assert logprobs.max() <= 0
    assert draw(prompt, replace(sampling, sampling_seed=4), INFO)[0].tolist() != ids.tolist()
    assert draw(prompt[:2], sampling, INFO)[0].tolist() != ids.tolist()


async def test_every_token_tells_the_version_that_served(tmp_path: Path):
    request = GenerateRequest(
        "a", np.array([5], np.int32), SamplingParams(max_new_tokens=6, sampling_seed=1, stop_token_ids=(2,))
    )
    async with open_engine(EngineSpec(str(FOLDER))) as engine:
        with pytest.raises(Unavailable):
            await engine.generate(request)
        await serve(engine, tmp_path, 1)
        running = asyncio.ensure_future(engine.generate(request))
        while engine.output_tokens < 1:
            await asyncio.sleep(0)
        await engine.pause()
        await serve(engine, tmp_path, 2)
        await engine.resume()
        result = await running
    assert result.versions == (VersionSpan("e000001-s000001", 0, 1), VersionSpan("e000001-s000002", 1, 6))
    assert len(result.output_ids) == len(result.logprobs) == 6


async def serve(engine: SimulatedEngine, root: Path, step: int) -> None:
    """Makes a checkpoint, and the engine load it."""
    one = backend(root)
    one.build()
    folder = one.save(replace(initial_state(0).starting_epoch(1, keep_reference=False), step=step), None)
    manifest = read_manifest(folder)
    loaded = await engine.stage(
        StagedWeights(str(folder), manifest.version, below=manifest.path, files=manifest.files, tree=manifest.tree)
    )
    committed = await engine.commit(manifest.version, "in_place")
    assert committed.live.checksum == loaded.checksum


def test_other_leaves_than_the_manifest_names_are_refused(tmp_path: Path):
    NumpyArrays().write(tmp_path / "params", {"w": np.zeros(2, np.float32)})
    with pytest.raises(WeightsError, match="other leaves"):
        load(StagedWeights(str(tmp_path), "e000001-s000001", below="params", files=digest_files(tmp_path, "params")))
