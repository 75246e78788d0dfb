"""Every way in which a checkpoint can be wrong on disk is refused, over an engine that reads its files and loads
nothing.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.weights.updater import WeightUpdater
from shared.errors import Conflict, Forbidden, WeightsError
from shared.models.config import ModelConfig
from shared.run.checkpoint_files import MANIFEST, MAX_MANIFEST_BYTES, Probe
from tests.support import models
from tests.support.engine import SETTINGS, FakeEngine

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8)
MODEL = ModelConfig.parse(CONFIG)
VERSION = "e000001-s000005"
PROBE = Probe((1, 2, 3), (-0.5, -1.5))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    return models.write_checkpoint(root, VERSION, CONFIG, models.random_weights(CONFIG, 0), probe=PROBE)


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / VERSION))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def updates(engine: FakeEngine, tmp_path: Path) -> WeightUpdater:
    return WeightUpdater(engine, tmp_path, MODEL, "test")


def files(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "params").rglob("*") if p.is_file())


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


async def refused(updates: WeightUpdater, folder: Path, kind: type[Exception] = WeightsError) -> str:
    with pytest.raises(kind) as error:
        await updates.update(str(folder), None)
    assert (updates.current, updates.staged) == (None, None)
    return str(error.value)


async def test_a_flipped_byte_in_any_file_is_found(updates: WeightUpdater, engine: FakeEngine, folder: Path) -> None:
    for path in files(folder):
        whole = path.read_bytes()
        for at in (0.0, 0.5, 1.0):
            flip(path, at)
            assert f"digest of {path.relative_to(folder)} differs" in await refused(updates, folder)
            path.write_bytes(whole)
    assert engine.loaded == []
    await updates.update(str(folder), None)
    assert updates.current == VERSION


async def test_any_file_cut_gone_or_added_is_found(updates: WeightUpdater, folder: Path) -> None:
    for path in files(folder):
        whole = path.read_bytes()
        os.truncate(path, len(whole) - 1)
        assert "bytes, expected" in await refused(updates, folder)
        path.unlink()
        assert "is missing" in await refused(updates, folder)
        path.symlink_to("/etc/hostname")
        await refused(updates, folder, Forbidden)
        path.unlink()
        path.write_bytes(whole)
    (folder / "params" / "more").symlink_to(folder)
    assert "more is not in the manifest" in await refused(updates, folder)


async def test_a_file_that_changes_before_it_is_read_is_found(
    updates: WeightUpdater, engine: FakeEngine, folder: Path
) -> None:
    """It was whole when the manifest was read."""
    engine.on_stage = lambda: flip(largest(folder))
    assert "differs" in await refused(updates, folder)
    with pytest.raises(Conflict, match="not staged"):
        await updates.commit(VERSION, None, None)


async def test_a_file_that_changes_after_it_was_read_does_no_harm(
    updates: WeightUpdater, engine: FakeEngine, folder: Path
) -> None:
    """The bytes that were verified are the ones that are loaded. Others never get in."""
    engine.on_read = lambda: flip(largest(folder))
    await updates.update(str(folder), None)
    assert updates.current == VERSION
    await updates.update(str(folder), None)
    assert engine.loaded == [VERSION]


def largest(folder: Path) -> Path:
    return max(files(folder), key=lambda file: file.stat().st_size)


async def test_every_file_is_read_once(updates: WeightUpdater, engine: FakeEngine, folder: Path) -> None:
    """Also when the same version is pushed, found, staged and committed again."""
    await updates.stage(str(folder))
    await updates.update(str(folder), None)
    await updates.catch_up()
    assert engine.n_read == {str(path.relative_to(folder)): path.stat().st_size for path in files(folder)}


@pytest.mark.parametrize("when", ["on_stage", "on_read"])
async def test_a_checkpoint_replaced_while_it_is_loaded_is_refused(
    updates: WeightUpdater, engine: FakeEngine, folder: Path, when: str
) -> None:
    """By another that is whole: before its files are read, or after."""

    def swap() -> None:
        shutil.rmtree(folder)
        models.write_checkpoint(folder.parent, VERSION, CONFIG, models.random_weights(CONFIG, 1), probe=PROBE)

    setattr(engine, when, swap)
    reason = await refused(updates, folder)
    assert re.search("is missing|not in the manifest" if when == "on_stage" else "changed while it was loaded", reason)


@pytest.mark.parametrize("when", ["on_stage", "on_read"])
async def test_a_checkpoint_removed_while_it_is_loaded_is_refused(
    updates: WeightUpdater, engine: FakeEngine, folder: Path, when: str
) -> None:
    setattr(engine, when, lambda: shutil.rmtree(folder))
    await refused(updates, folder)


def edited(folder: Path, **fields: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"run": "other"}, "belongs to run 'other', but this server serves run 'test'"),
        ({"version": "e000001-s000006"}, "folder e000001-s000005 holds the manifest of e000001-s000006"),
        ({"kind": "lora"}, "kind 'lora'"),
        ({"model": CONFIG | {"rope_theta": 5e6}}, "another model than this server: rope_theta"),
        ({"path": "nowhere"}, "No such file"),
        (
            {"probe": {"input_ids": [1, 8], "logprobs": [-1.0], "noise": None}},
            "the probe has token 8, but the vocabulary has only 8 tokens",
        ),
        ({"probe": {"input_ids": [1, 2], "logprobs": [None], "noise": None}}, "malformed"),
        ({"probe": {"input_ids": [1, 2], "logprobs": [-1.0, -1.0], "noise": None}}, "malformed"),
        ({"probe": {"input_ids": ["1", 2], "logprobs": [-1.0], "noise": None}}, "malformed"),
        ({"tree": [{"key": "a", "shape": ["1"], "dtype": "float32"}]}, "malformed"),
        ({"files": {"name": "x"}}, "malformed"),
        ({"version": "e000001-s" + "1" * 5000}, "malformed"),
        ({"schema": 2}, "schema 2"),
        ({"path": "\0"}, "malformed"),
    ],
)
async def test_a_manifest_that_lies_is_refused(
    updates: WeightUpdater, folder: Path, fields: dict[str, Any], named: str
) -> None:
    edited(folder, **fields)
    assert named in await refused(updates, folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(b"{", b"[", 1),
        lambda text: b"[" * 100_000,
        lambda text: b'{"a":' * 5_000,
        lambda text: text + b" " * MAX_MANIFEST_BYTES,
        lambda text: b"\xff\xfe" + text,
        lambda text: b"5",
    ],
)
async def test_a_manifest_that_is_none_is_refused(
    updates: WeightUpdater, folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = folder / MANIFEST
    path.write_bytes(damage(path.read_bytes()))
    await refused(updates, folder)


@pytest.mark.parametrize("name", ["..", "/etc", "a\0b", "a/" * 3000, "loop", "outside", "x" * 300, "."])
async def test_no_path_leads_out_or_astray(updates: WeightUpdater, tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "outside").symlink_to("/etc")
    with pytest.raises((Forbidden, WeightsError)):
        await updates.stage(name)


async def test_a_version_without_its_manifest_is_no_export(updates: WeightUpdater, tmp_path: Path) -> None:
    """A Hugging Face folder is labelled with its name: it may not be a version's."""
    models.write_hf(tmp_path / VERSION, CONFIG, models.random_weights(CONFIG, 1))
    await refused(updates, tmp_path / VERSION)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELD = st.sampled_from(
    [
        "schema",
        "run",
        "version",
        "base_version",
        "step",
        "kind",
        "path",
        "files",
        "tree",
        "model",
        "probe",
        "created",
        "state",
    ]
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=FIELD, value=JSON)
async def test_any_manifest_is_taken_or_refused_but_never_an_error_of_ours(
    checkpoint: Path, field: str, value: Any
) -> None:
    root = checkpoint.parent
    engine = FakeEngine()
    updates = WeightUpdater(engine, root, MODEL, "test")
    app = build_app(SETTINGS, engine, updates, GenerationRunner(engine, 1.0, updates), None)
    whole = (checkpoint / MANIFEST).read_text(encoding="utf-8")
    edited(checkpoint, **{field: value})
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            answer = await client.post("/weights/stage", json={"manifest": str(checkpoint)})
    finally:
        (checkpoint / MANIFEST).write_text(whole, encoding="utf-8")
    assert answer.status_code in (200, 403, 409, 422)
