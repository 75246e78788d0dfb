"""Rollout servers in front of servers that answer wrongly, and what they leave on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from packages.engines.tests.rollout.support import (
    CONFIG,
    V1,
    V2,
    V3,
    Kind,
    asking,
    committed,
    each_kind,
    in_front,
    running,
    same_for_each,
    weights,
)
from services.rollout.engines.base import NewTokens
from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.checkpoint import examine
from shared.errors import Unavailable, WeightsError
from shared.models.config import ModelConfig
from shared.models.weight_files import UNMERGED
from tests.support import models


@same_for_each
async def test_one_folder_of_weights_is_kept(tmp_path: Path, kind: Kind):
    """Refused and failed loads leave no folder behind."""
    loads = tmp_path / "loads"
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        other = models.tiny_config(**{**CONFIG, "tie_word_embeddings": True})
        where = models.write_checkpoint(tmp_path / "others", V2, other, models.random_weights(other, 2))
        with pytest.raises(WeightsError):
            await engine.stage(examine(where, ModelConfig.parse(other), "test"))
        assert len([*loads.iterdir()]) == 1
        foreign.engine.refuse_loads = 2
        await engine.stage(weights(tmp_path, V2, 2))
        with pytest.raises(WeightsError):
            await engine.commit(V2, "retract")
        await committed(engine, tmp_path, V3, 3)
        assert len([*loads.iterdir()]) == 1


@same_for_each
async def test_adapters_beside_their_base_are_refused(tmp_path: Path, kind: Kind):
    """The server would serve the base alone."""
    folder = models.write_hf(tmp_path / "hf", CONFIG, models.random_weights(CONFIG, 1))
    (folder / UNMERGED).write_bytes(b"")
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        with pytest.raises(WeightsError, match=UNMERGED):
            await engine.stage(examine(folder, ModelConfig.parse(CONFIG), "test"))


@each_kind
@pytest.mark.parametrize("streams", [False, True])
async def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, kind: Kind, streams: bool):
    """The server serves a model of 64 tokens, the run has one of 4."""
    small, got = {**CONFIG, "vocab_size": 4}, list[NewTokens]()
    async with running(kind, tmp_path) as foreign:
        models.write_hf(tmp_path / "small", small, models.random_weights(small, 0))
        async with in_front(replace(foreign, folder=tmp_path / "small")) as engine:
            await engine.stage(StagedWeights(str(foreign.folder), V1, kind="hf"))
            await engine.commit(V1, "retract")
            with pytest.raises(Unavailable):
                await engine.generate(asking(20, ignore_eos=True), got.append if streams else None)
            assert all((new.output_ids < 4).all() for new in got)
