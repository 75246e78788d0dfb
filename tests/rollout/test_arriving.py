"""Weights are placed while their chunks are still on their way: whole, or not at all."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pytest_asyncio

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.base import Engine, EngineSpec
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.engines.sglang_jax.loading.staging import load_leaves
from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.checkpoint import examine_published
from shared.errors import Conflict, Unavailable, WeightsError
from shared.models.config import ModelConfig
from shared.published import chunks as chunks_module
from shared.published import manifest as manifest_module
from shared.published.chunks import ChunkFolder, cut, in_order
from shared.published.manifest import Chunk, PublishedAdapter, PublishedManifest, WeightTree
from shared.published.order import drawn
from shared.run.checkpoint_files import ManifestFile, ManifestLeaf
from tests.support import models

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=32, vocab_size=512)
MODEL = ModelConfig.parse(CONFIG)
PATH = Path("nowhere")


def on_the_engine[T](test: T) -> T:
    return pytest.mark.usefixtures("small_chunks")(pytest.mark.asyncio(loop_scope="module")(test))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunks_module, manifest_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2**12)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    folder = models.write_hf(tmp_path_factory.mktemp("engine") / "model", CONFIG)
    sizes = {"context_length": 32, "max_running_requests": 2, "max_prefill_tokens": 32, "max_total_tokens": 64}
    spec = EngineSpec(str(folder), load_weights=False, token_paddings=(32,), bs_paddings=(2,), **sizes)
    async with open_engine(spec) as engine:
        yield engine


def tree_of(folder: ChunkFolder, arrays: models.Weights) -> WeightTree:
    leaves = in_order(ManifestLeaf(name, value.shape, str(value.dtype)) for name, value in arrays.items())
    parts = cut(leaves, {key: partial(np.asarray, value) for key, value in arrays.items()})
    return WeightTree(tuple(leaves), tuple(Chunk(folder.put(part), len(part)) for part in parts))


class Arriving:
    """A version whose chunks come one after the other, from `source` into `folder`."""

    def __init__(self, root: Path, name: str, seed: int) -> None:
        self.source, self.folder = ChunkFolder(root / f"source-{name}"), ChunkFolder(root / f"pulled-{name}")
        tree = tree_of(self.source, models.random_weights(CONFIG, seed))
        manifest = PublishedManifest("test", "first", name, tree, CONFIG, None, 1.0)
        self.weights = replace(examine_published(manifest, self.folder.folder, MODEL, "test"), seed=seed)
        self.digests = [chunk.blake3 for chunk in drawn(tree.chunks, seed)]
        self.done = asyncio.get_running_loop().create_future()

    def come(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self.folder.put(self.source.read(digest))

    def at_once(self) -> StagedWeights:
        return replace(self.weights, folder=str(self.source.folder), version=f"{self.weights.version}-again")


async def still_waits(staging: asyncio.Future) -> None:
    await asyncio.sleep(0.3)
    assert not staging.done()


@on_the_engine
async def test_what_comes_bit_by_bit_is_what_lies_there(engine: Engine, tmp_path: Path) -> None:
    """In whatever order; nothing waits for the end of the pull but what is missing."""
    version = Arriving(tmp_path, "v1", 1)
    assert len(version.digests) > 20
    staging = asyncio.ensure_future(engine.stage(version.weights, version.done))
    first, *others = version.digests
    for digest in np.random.default_rng(0).permutation(others):
        version.come([str(digest)])
        await asyncio.sleep(0.002)
    await still_waits(staging)
    version.come([first])
    version.done.set_result(None)
    loaded = await staging
    assert all(seconds >= 0 for seconds in loaded.timings.values())
    assert loaded.checksum == (await engine.stage(version.at_once())).checksum
    await engine.commit("v1-again", "retract")
    assert (await engine.audit()).checksum == loaded.checksum


@on_the_engine
async def test_what_does_not_come_whole_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    """A pull that fails, one that ends without a chunk, a chunk that is another when it is read, a caller that has
    gone: each is told as it is, and the next version is loaded.
    """
    served = Arriving(tmp_path, "v0", 0)
    loaded = await engine.stage(served.at_once())
    await engine.commit("v0-again", "retract")

    failing = Arriving(tmp_path, "v1", 1)
    failing.come(failing.digests[:5])
    staging = asyncio.ensure_future(engine.stage(failing.weights, failing.done))
    await still_waits(staging)
    failing.done.set_exception(Unavailable("no source has it"))
    with pytest.raises(Unavailable, match="no source has it"):
        await staging

    lacking = Arriving(tmp_path, "v2", 2)
    lacking.come(lacking.digests[:-1])
    lacking.done.set_result(None)
    with pytest.raises(WeightsError, match=f"chunk {lacking.digests[-1]}"):
        await engine.stage(lacking.weights, lacking.done)

    wrong = Arriving(tmp_path, "v3", 3)
    wrong.come(wrong.digests[:-1])
    wrong.folder.path(wrong.digests[1]).write_bytes(bytes(2**12))
    with pytest.raises(WeightsError, match=f"digest of chunk {wrong.digests[1]} differs"):
        await engine.stage(wrong.weights, wrong.done)
    assert not wrong.done.done()

    gone = Arriving(tmp_path, "v4", 4)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.stage(gone.weights, gone.done), 0.3)
    assert not gone.done.done()

    live, status = await engine.audit(), await engine.status()
    assert (live.version, live.checksum, status.staged) == ("v0-again", loaded.checksum, None)
    right = Arriving(tmp_path, "v5", 5)
    staging = asyncio.ensure_future(engine.stage(right.weights, right.done))
    right.come(right.digests)
    right.done.set_result(None)
    await staging
    assert (await engine.commit("v5", "retract")).live.version == "v5"


@on_the_engine
async def test_what_is_staged_while_its_pull_fails_is_not_kept(engine: Engine, tmp_path: Path) -> None:
    """All that it was made of may have been there, or the caller be gone."""
    failing, gone = Arriving(tmp_path, "v1", 1), Arriving(tmp_path, "v2", 2)
    for version in (failing, gone):
        version.come(version.digests)
    staging = asyncio.ensure_future(engine.stage(failing.weights, failing.done))
    await is_staged(engine, failing)
    failing.done.set_exception(Unavailable("no source has it"))
    with pytest.raises(Unavailable, match="no source has it"):
        await staging
    assert (await engine.status()).staged is None
    staging = asyncio.ensure_future(engine.stage(gone.weights, gone.done))
    await is_staged(engine, gone)
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staging
    assert (await engine.status()).staged is None


async def is_staged(engine: Engine, version: Arriving) -> None:
    async with asyncio.timeout(60):
        while (await engine.status()).staged != version.weights.version:
            await asyncio.sleep(0.01)


@on_the_engine
async def test_what_becomes_of_an_overtaken_version_is_nothing_to_the_next(engine: Engine, tmp_path: Path) -> None:
    older, newer = Arriving(tmp_path, "v1", 1), Arriving(tmp_path, "v2", 2)
    first = asyncio.ensure_future(engine.stage(older.weights, older.done))
    await still_waits(first)
    second = asyncio.ensure_future(engine.stage(newer.weights, newer.done))
    with pytest.raises(Conflict, match="other weights are being staged"):
        await first
    older.done.set_result(None)
    newer.come(newer.digests[:-1])
    await still_waits(second)
    newer.come(newer.digests)
    newer.done.set_result(None)
    assert (await second).checksum == (await engine.stage(newer.at_once())).checksum


@pytest.mark.usefixtures("small_chunks")
def test_a_load_that_has_failed_does_not_wait_for_the_next_array(tmp_path: Path) -> None:
    """Which may be half of the model, on a slow link."""
    arrays = {"model.norm.weight": np.zeros(8, np.float32), "model.embed_tokens.weight": np.zeros((512, 8), np.float32)}
    shapes = {"model.norm.scale": (8,), "model.embed_tokens.embedding": (512, 8)}
    source, folder = ChunkFolder(tmp_path / "source"), ChunkFolder(tmp_path / "pulled")
    tree = tree_of(source, arrays)
    folder.put(source.read(tree.chunks[0].blake3))
    leaves, structure = jax.tree.flatten({name: jnp.zeros(shape, jnp.bfloat16) for name, shape in shapes.items()})
    runner = SimpleNamespace(
        model_state_leaves=leaves, _model_state_def=structure, model_config=SimpleNamespace(head_dim=8)
    )
    files = tuple(ManifestFile(chunk.blake3, chunk.size, chunk.blake3) for chunk in tree.chunks)
    weights = StagedWeights(str(folder.folder), "v1", kind="chunks", files=files, tree=tree.leaves)
    failures, ended = list[BaseException](), threading.Event()

    def load() -> None:
        try:
            load_leaves(runner, weights, Arrival(lambda: None, is_complete=False))
        except WeightsError as error:
            failures.append(error)

    in_a_thread(load, ended)
    assert ended.wait(60)
    assert "the engine computes with bfloat16" in str(failures[0])


@on_the_engine
async def test_adapters_and_their_base_are_waited_for(engine: Engine, tmp_path: Path) -> None:
    source, folder = ChunkFolder(tmp_path / "source"), ChunkFolder(tmp_path / "pulled")
    base = tree_of(source, models.to_tunix(models.random_weights(CONFIG, 7), CONFIG))
    tree = tree_of(source, models.random_adapter(CONFIG, 1))
    manifest = PublishedManifest("test", "first", "v1", tree, CONFIG, None, 1.0, PublishedAdapter(2, 4.0, base))
    staged = replace(examine_published(manifest, folder.folder, MODEL, "test"), seed=5)
    done = asyncio.get_running_loop().create_future()
    staging = asyncio.ensure_future(engine.stage(staged, done))
    for chunk in (*drawn(base.chunks, 5), *drawn(tree.chunks, 5)):
        await asyncio.sleep(0.002)
        folder.put(source.read(chunk.blake3))
    done.set_result(None)
    loaded = await staging
    assert loaded.checksum == (await engine.stage(replace(staged, folder=str(source.folder), version="v2"))).checksum


def test_a_file_that_is_there_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "chunk").touch()
    Arrival(lambda: None, is_complete=False).wait_for(tmp_path / "chunk")


def test_once_all_is_there_nothing_is_waited_for() -> None:
    Arrival(lambda: None, is_complete=True).wait_for(PATH)
    arrival, ended = Arrival(lambda: None, is_complete=False), threading.Event()
    thread = in_a_thread(lambda: arrival.wait_for(PATH), ended)
    assert not ended.wait(0.1)
    began = time.perf_counter()
    arrival.complete()
    thread.join(60)
    assert ended.is_set()
    assert arrival.is_complete
    assert arrival.completed_at >= began


def test_who_is_not_wanted_any_more_waits_no_longer() -> None:
    wanted = threading.Event()
    wanted.set()

    def still() -> None:
        if not wanted.is_set():
            raise Conflict("others are staged")

    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(Conflict):
            Arrival(still, is_complete=False).wait_for(PATH)

    thread = in_a_thread(wait, ended)
    assert not ended.wait(0.1)
    wanted.clear()
    thread.join(60)
    assert ended.is_set()


def test_seconds_before_the_last_chunk_do_not_count() -> None:
    arrival, begun = Arrival(lambda: None, is_complete=False), time.perf_counter()
    assert arrival.seconds_since(begun) == 0
    time.sleep(0.05)
    arrival.complete()
    assert 0 <= arrival.seconds_since(begun) < time.perf_counter() - begun - 0.04
    later = time.perf_counter()
    assert 0 <= arrival.seconds_since(later) <= time.perf_counter() - later


def in_a_thread(work: Callable[[], None], ended: threading.Event) -> threading.Thread:
    def run() -> None:
        work()
        ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
