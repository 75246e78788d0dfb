"""Shapes that an engine compiles because an earlier one did."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.engines.base import EngineSpec, GenerateRequest, SamplingParams
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.engines.sglang_jax.scheduling.inputs import Layout, blank
from services.rollout.engines.sglang_jax.scheduling.shapes import CaptureHiddenMode, ForwardMode, KnownShapes, file_of
from services.rollout.engines.sglang_jax.scheduling.shapes import SpeculativeAlgorithm as Algorithm
from tests.support import models


def layout(n: int, n_top: int = 0) -> Layout:
    parts = (("input_ids", 8), ("out_cache_loc", 8), ("cache_loc", 64))
    return Layout(ForwardMode.EXTEND, CaptureHiddenMode.NULL, Algorithm.NONE, n, n_top, parts)


def test_the_next_engine_compiles_what_the_one_before_did_in_the_same_order(tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    first = KnownShapes(file)
    assert first.next() is None
    for known in (layout(1), layout(2), layout(1), layout(2, n_top=20)):
        first.add(known)
    second = KnownShapes(file)
    second.add(layout(1))
    assert [second.next() for _ in range(3)] == [layout(2), layout(2, n_top=20), None]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[[1, 0, 1, 2]]",
        b'[[1, 0, 1, 2, 0, [["input_ids"]]]]',
        b'[[1, 0, 1, 2, 1e999, [["input_ids", 8]]]]',
        b"\xff",
        b"[" * 200_000,
    ],
)
def test_a_damaged_file_holds_no_shapes(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "shapes.json"
    file.write_bytes(content)
    assert KnownShapes(file).next() is None


def test_a_long_file_is_read_in_part_and_what_fails_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps([layout(n) for n in range(100)]), encoding="utf-8")
    shapes = KnownShapes(file)
    first = shapes.next()
    assert first == layout(68)
    shapes.drop(first)
    assert KnownShapes(file).next() == layout(69)


def test_each_setting_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.write_hf(tmp_path / "model", models.tiny_config(), {})
    spec = EngineSpec(str(folder), context_length=64)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert file_of(spec) is None
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert file_of(spec) == file_of(EngineSpec(str(folder), context_length=64))
    assert file_of(spec) != file_of(EngineSpec(str(folder), context_length=65))
    assert file_of(EngineSpec(str(folder), bs_paddings=(8,))) is None


def test_a_blank_step_writes_no_keys() -> None:
    assert blank(layout(2)).tolist() == [0] * 8 + [-1] * 8 + [0] * 64


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_second_engine_compiles_its_shapes_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    config = models.tiny_config()
    folder = models.write_hf(tmp_path / "model", config, models.random_weights(config, 1))
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True, logit_bias=((5, 1.0),))
    compiled, known = 0, list[Any]()
    for is_second in (False, True):
        async with open_engine(EngineSpec(str(folder), context_length=64, max_running_requests=8)) as engine:
            async with asyncio.timeout(60):
                while (before := (await engine.status()).compilations) < compiled:
                    await asyncio.sleep(0.2)
            await engine.generate(GenerateRequest("a", np.arange(3, 20, dtype=np.int32), sampling))
            compiled = (await engine.status()).compilations
            assert (compiled == before) == is_second
        (file,) = (tmp_path / "cache").glob("shapes-*.json")
        if not is_second:
            known = json.loads(file.read_bytes())
            file.write_text(json.dumps([[*known[0][:5], []], *known]), encoding="utf-8")
    assert json.loads(file.read_bytes()) == known
