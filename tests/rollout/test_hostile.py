"""What a stranger may send or leave on disk: paths out of the run's folder, and checkpoints full of code."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.engines.arrays.restore import open_checkpoint, open_hugging_face
from services.rollout.weights.checkpoint import examine
from services.rollout.weights.updater import WeightUpdater
from shared import codec
from shared.errors import Forbidden, WeightsError
from shared.models.config import ModelConfig
from shared.run.checkpoint_files import MANIFEST, digest_files, read_manifest, write_manifest
from tests.support import models
from tests.support.engine import SETTINGS, FakeEngine
from tests.support.hostile import infect, works

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8)
MODEL = ModelConfig.parse(CONFIG)
VERSION = "e000001-s000005"
ROUTES = {"/weights/stage": "manifest", "/update_weights": "manifest", "/update_weights_from_disk": "model_path"}
PATHS = {
    "absolute": "/etc",
    "parent": "../outside",
    "hidden parent": f"{VERSION}/../../outside/{MANIFEST}",
    "link": "link/manifest.json",
    "link to a file": "passwd",
    "loop": "loop",
    "null": "a\0b",
    "device": "/dev/zero",
    "process": "/proc/self/environ",
    "long": "a" * 5000,
    "long path": "a/" * 5000,
    "home": "~root",
    "percent": "%2e%2e/outside",
    "backslash": "..\\outside",
    "newline": "\n../outside",
    "root": ".",
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_checkpoint(
        tmp_path_factory.mktemp("published"), VERSION, CONFIG, models.random_weights(CONFIG, 0)
    )


@pytest.fixture
def root(published: Path, tmp_path: Path) -> Path:
    """A run's checkpoints, with a valid checkpoint and links out of it; beside it a folder that is none of its
    business.
    """
    root = tmp_path / "checkpoints"
    for folder in (root, tmp_path / "outside"):
        shutil.copytree(published, folder / VERSION)
    (root / "link").symlink_to(tmp_path / "outside" / VERSION)
    (root / "passwd").symlink_to("/etc/passwd")
    (root / "loop").symlink_to("loop")
    return root


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def http(engine: FakeEngine, root: Path) -> AsyncIterator[httpx.AsyncClient]:
    updates = WeightUpdater(engine, root, MODEL, "test")
    app = build_app(SETTINGS, engine, updates, GenerationRunner(engine, 0.2, updates), None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        yield client


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("route", ROUTES)
async def test_no_path_leads_out_of_the_runs_checkpoints(
    http: httpx.AsyncClient, engine: FakeEngine, route: str, path: str
) -> None:
    answer = await http.post(route, json={ROUTES[route]: path})
    assert answer.status_code in (403, 422)
    assert engine.loaded == []
    assert "root:" not in answer.text


@pytest.mark.parametrize("name", ["absolute", "parent", "hidden parent", "link", "loop", "null", "process"])
async def test_a_path_that_leads_out_is_forbidden(http: httpx.AsyncClient, name: str) -> None:
    assert (await http.post("/weights/stage", json={"manifest": PATHS[name]})).status_code == 403


@pytest.mark.parametrize("route", ROUTES)
async def test_bytes_that_are_no_text_are_malformed(http: httpx.AsyncClient, route: str) -> None:
    in_json = await http.post(
        route, content=b'{"%s": "\xff\xfe"}' % ROUTES[route].encode(), headers={"Content-Type": "application/json"}
    )
    packed = codec.pack({ROUTES[route]: "ab"}).replace(b"ab", b"\xff\xfe")
    in_msgpack = await http.post(route, content=packed, headers={"Content-Type": codec.MEDIA_TYPE})
    assert [answer.status_code for answer in (in_json, in_msgpack)] == [400] * 2


async def test_the_checkpoint_itself_is_taken(http: httpx.AsyncClient, root: Path) -> None:
    for path in (VERSION, f"{VERSION}/{MANIFEST}", str(root / VERSION), f"./{VERSION}/../{VERSION}"):
        assert (await http.post("/weights/stage", json={"manifest": path})).status_code == 200


def test_weights_of_a_hugging_face_folder_that_lie_elsewhere_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    (root / "hf").mkdir()
    (root / "hf" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(Forbidden, match="outside"):
        examine(root / "hf", MODEL, "test")


def with_true_digests(root: Path) -> None:
    files = digest_files(root / VERSION, "params")
    write_manifest(root / VERSION, dataclasses.replace(read_manifest(root / VERSION), files=files))


def restored(root: Path) -> models.Weights:
    staged = examine(root / VERSION, MODEL, "test")
    with open_checkpoint(Path(staged.folder), staged.below, staged.files, staged.version) as leaves:
        return {name: leaf.read() for name, leaf in leaves.items()}


def test_a_checkpoint_of_pickles_is_refused_by_its_digests(root: Path, tmp_path: Path) -> None:
    assert works(tmp_path)
    infect(root / VERSION, tmp_path / "canary", keep=(MANIFEST,))
    with pytest.raises(WeightsError, match=r"bytes, expected|differs"):
        restored(root)
    assert not (tmp_path / "canary").exists()


def test_a_manifest_of_pickles_is_malformed(root: Path, tmp_path: Path) -> None:
    infect(root / VERSION, tmp_path / "canary")
    with pytest.raises(WeightsError, match="malformed"):
        examine(root / VERSION, MODEL, "test")
    assert not (tmp_path / "canary").exists()


def test_a_checkpoint_of_pickles_with_true_digests_is_not_executed(root: Path, tmp_path: Path) -> None:
    """Whoever can write the manifest too is stopped by the decoding: Orbax' own format holds no code."""
    infect(root / VERSION / "params", tmp_path / "canary")
    with_true_digests(root)
    with pytest.raises(WeightsError, match="Orbax"):
        restored(root)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("n", range(6))
def test_a_single_pickle_among_true_files_is_not_executed(root: Path, tmp_path: Path, n: int) -> None:
    """One file after the other: none of them is ever unpickled."""
    files = sorted(path for path in (root / VERSION / "params").rglob("*") if path.is_file())
    aside = tmp_path / "aside"
    shutil.copytree(root / VERSION, aside)
    infect(aside, tmp_path / "canary")
    victim = files[n % len(files)]
    shutil.copy(aside / victim.relative_to(root / VERSION), victim)
    with_true_digests(root)
    try:
        arrays = restored(root)
    except WeightsError:
        arrays = {}
    assert all(value.dtype != object for value in arrays.values())
    assert not (tmp_path / "canary").exists()


def test_a_safetensors_file_that_is_a_pickle_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "hf").mkdir()
    (root / "hf" / "model.safetensors").write_bytes(b"")
    infect(root / "hf", tmp_path / "canary")
    with pytest.raises(WeightsError):
        open_hugging_face(root / "hf")
    assert not (tmp_path / "canary").exists()
