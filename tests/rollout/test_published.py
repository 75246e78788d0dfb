"""Published versions into a server, over real connections to a trainer: which it takes, and which never."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.weights import pulling
from services.rollout.weights.pulling import ChunkPuller
from services.rollout.weights.updater import WeightUpdater
from shared.clients.chunks import WeightSource
from shared.errors import (
    Conflict,
    DecodeError,
    EngineDied,
    Forbidden,
    MalformedAnswer,
    NotFound,
    Unavailable,
    VolleyError,
    WeightsError,
    WeightsUnpublished,
)
from shared.models.config import ModelConfig
from shared.published.chunks import ChunkFolder, cut, in_order, reads
from shared.published.delta import encode
from shared.published.manifest import Chunk, Delta, PublishedAdapter, PublishedManifest, WeightOffer, WeightTree
from shared.published.serving import Uplink
from shared.run.checkpoint_files import ManifestLeaf, Probe
from shared.services_schema import Limits
from shared.web.http import create_app
from shared.web.problems import problem_response
from tests.support import families, models
from tests.support.asgi import served
from tests.support.engine import SETTINGS, FakeEngine

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8)
MODEL = ModelConfig.parse(CONFIG)
PROBE = Probe((1, 2, 3), (-0.5, -1.5), (1e-3, 1e-3))
V = [f"e000001-s00000{step}" for step in range(6)]
HUGE = WeightTree((ManifestLeaf("w", (9 * 2**21,), "float32"),), (Chunk("0" * 64, 2**23),) * 9)
"""72 MiB, of which there is not a byte."""


@dataclass
class Trainer:
    """Publishes what a test wants."""

    chunks: ChunkFolder
    url: str = ""
    newest: WeightOffer | None = None
    answers: bool = True

    def offer(self, name: str, seed: int = 0, **changes: object) -> WeightOffer:
        arrays = models.random_weights(CONFIG, seed)
        leaves = in_order(ManifestLeaf(name, value.shape, str(value.dtype)) for name, value in arrays.items())
        parts = cut(leaves, {key: partial(np.asarray, value) for key, value in arrays.items()})
        tree = WeightTree(tuple(leaves), tuple(Chunk(self.chunks.put(part), len(part)) for part in parts))
        manifest = PublishedManifest("test", "first", name, tree, CONFIG, PROBE, 1.0)
        data = replace(manifest, **changes).to_json()
        return WeightOffer(name, Chunk(self.chunks.put(data), len(data)), (self.url,))

    async def ask(self) -> WeightOffer:
        if not self.answers:
            raise Unavailable("nothing listens there")
        if self.newest is None:
            raise WeightsUnpublished("this trainer has published no weights yet")
        return self.newest


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[Trainer]:
    made = Trainer(ChunkFolder(tmp_path / "published"))
    async with served(_uplink(Uplink(made.chunks.read))) as made.url:
        yield made


def _uplink(uplink: Uplink) -> FastAPI:
    app = create_app("source", limits=Limits(), tokens=None, ready=lambda: None)

    async def chunk(request: Request) -> Response:
        try:
            return await uplink.answer(request, request.path_params["digest"])
        except VolleyError as error:
            return problem_response(error)

    app.add_route("/weights/chunks/{digest}", chunk)
    return app


@dataclass
class ReadingEngine(FakeEngine):
    """Reads chunks as the real one does."""

    arrays_of: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    async def stage(self, weights, arriving=None):
        if arriving is not None:
            await arriving
        if weights.kind == "chunks":
            tree = WeightTree(weights.tree, tuple(Chunk(file.blake3, file.size) for file in weights.files))
            found = reads(Path(weights.folder), tree, weights.version)
            self.arrays_of[weights.version] = {name: read() for name, read in found.items()}
        return await super().stage(weights)


@pytest.fixture
def engine() -> ReadingEngine:
    return ReadingEngine()


@pytest.fixture
def updates(engine: ReadingEngine, trainer: Trainer, tmp_path: Path, monkeypatch) -> WeightUpdater:
    monkeypatch.setattr(pulling, "PATIENCE_FIRST_S", 0.5)
    puller = ChunkPuller(ChunkFolder(tmp_path / "pulled"), lambda url: WeightSource(url), "http://own")
    root = tmp_path / "checkpoints"
    root.mkdir()
    return WeightUpdater(engine, root, MODEL, "test", puller=puller, newest_offer=trainer.ask)


def is_right(engine: ReadingEngine, version: str, seed: int) -> bool:
    wanted, found = models.random_weights(CONFIG, seed), engine.arrays_of[version]
    return wanted.keys() == found.keys() and all(np.array_equal(wanted[name], found[name]) for name in wanted)


async def test_an_offered_version_is_pulled_and_serves(updates, engine, trainer):
    staged, result = await updates.update(trainer.offer(V[1], 1), None)
    assert (updates.current, result.version, updates.why_not_ready()) == (V[1], V[1], None)
    assert is_right(engine, V[1], 1)
    assert staged.timings["pulled_bytes"] > 0
    assert updates.digest == staged.digest


async def test_what_serves_or_is_staged_is_not_loaded_again(updates, engine, trainer):
    offer = trainer.offer(V[1])
    await updates.stage(offer)
    await updates.stage(offer)
    await updates.update(offer, None)
    await updates.update(offer, None)
    assert engine.loaded == [V[1]]


@pytest.mark.parametrize("other", [V[1], V[2]], ids=["of the same name", "of a later version"])
async def test_a_push_of_weights_that_were_refused_for_good_reads_nothing(updates, engine, trainer, other):
    offer, engine.refuses = trainer.offer(V[1]), {V[1]: itertools.repeat(WeightsError("lm_head is wrong"))}
    for _ in range(5):
        with pytest.raises(WeightsError, match="lm_head is wrong"):
            await updates.update(offer, None)
    assert len(engine.staging) == 3
    engine.refuses = {}
    await updates.update(trainer.offer(other, 1, run_id="second"), None)
    assert (updates.current, updates.refused) == (other, None)


async def test_what_serves_is_passed_on_and_older_chunks_are_not(updates, trainer):
    first, second = trainer.offer(V[1], 1), trainer.offer(V[2], 2)
    with pytest.raises(NotFound):
        updates.read_chunk(first.manifest.blake3)
    await updates.update(first, None)
    assert updates.read_chunk(first.manifest.blake3) == trainer.chunks.read(first.manifest.blake3)
    await updates.stage(second)
    for offer in (first, second):
        updates.read_chunk(offer.manifest.blake3)
    await updates.commit(V[2], None, None)
    with pytest.raises(NotFound):
        updates.read_chunk(first.manifest.blake3)


async def test_other_servers_are_told_what_is_here(updates, engine, trainer):
    """By the routes of the service, to the client that servers use; of what was never pulled, nothing."""
    offer = trainer.offer(V[1], 1)
    await updates.update(offer, None)
    names = list(PublishedManifest.from_json(trainer.chunks.read(offer.manifest.blake3)).chunks())
    app = build_app(SETTINGS, engine, updates, GenerationRunner(engine, 0.2, updates), None)
    async with WeightSource("http://x", transport=httpx.ASGITransport(app)) as source:
        told = await source.holding(offer.manifest.blake3, len(names))
        assert told.has.all()
        assert not told.pending.any()
        with pytest.raises(DecodeError):
            await source.holding(offer.manifest.blake3, 8 * len(names) + 8)
        with pytest.raises(MalformedAnswer):
            await source.holding(offer.manifest.blake3, 0)
        for other in (V[1], "0" * 64):
            with pytest.raises(NotFound):
                await source.holding(other, len(names))
        await updates.update(trainer.offer(V[2], 2), None)
        assert not (await source.holding(offer.manifest.blake3, len(names))).has.any()


async def test_a_server_without_a_puller_passes_nothing_on(engine):
    alone = WeightUpdater(engine, None, MODEL, "test")
    for ask in (alone.read_chunk, alone.holding):
        with pytest.raises(NotFound, match="does not share weights"):
            ask("0" * 64)


async def test_a_server_that_missed_a_push_asks_the_trainer(updates, engine, trainer):
    await updates.catch_up()
    assert updates.current is None
    trainer.newest = trainer.offer(V[2], 2)
    await updates.catch_up()
    await updates.catch_up()
    assert (updates.current, engine.loaded) == (V[2], [V[2]])


async def test_while_no_trainer_answers_the_folder_is_looked_at(updates, engine, trainer):
    models.write_checkpoint(updates.root, V[1], CONFIG, models.random_weights(CONFIG, 1), probe=PROBE)
    trainer.answers = False
    await updates.catch_up()
    assert updates.current == V[1]
    trainer.answers, trainer.newest = True, trainer.offer(V[2], 2)
    await updates.catch_up()
    assert updates.current == V[2]
    assert is_right(engine, V[2], 2)


async def test_one_version_may_come_by_both_ways(updates, trainer):
    """Digests of files are no digests of weights: they do not contradict each other."""
    folder = models.write_checkpoint(updates.root, V[1], CONFIG, models.random_weights(CONFIG, 1), probe=PROBE)
    await updates.update(str(folder), None)
    await updates.update(trainer.offer(V[1], 1), None)
    await updates.update(str(folder), None)
    assert updates.current == V[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "other"}, "belongs to run 'other'"),
        ({"model": CONFIG | {"rope_theta": 7.0}}, "another model than this server"),
        ({"version": V[3]}, f"the offer of {V[2]} names the manifest of {V[3]}"),
        ({"weights": HUGE}, "has 75497472 bytes"),
        ({"adapter": PublishedAdapter(4, 8.0, HUGE)}, "has 75497472 bytes"),
        ({"probe": Probe((1, 9), (-0.5,), None)}, "the probe has token 9"),
    ],
)
async def test_what_is_not_of_this_run_and_model_is_not_pulled(updates, engine, trainer, changes, message):
    await updates.update(trainer.offer(V[1], 1), None)
    with pytest.raises(WeightsError, match=message):
        await updates.update(trainer.offer(V[2], 2, **changes), None)
    assert (updates.current, engine.loaded, updates.why_not_ready()) == (V[1], [V[1]], None)


@pytest.mark.parametrize("name", families.NAMES)
def test_a_model_says_how_many_numbers_it_has_at_most(name):
    case = families.case(name)
    n = sum(value.size for value in case.weights.values())
    assert n <= ModelConfig.parse(case.config).n_numbers <= 1.1 * n


async def test_a_manifest_that_is_none_is_refused(updates, trainer):
    for data in (b"{}", b"no json", b"[" * 100_000):
        offer = WeightOffer(V[1], Chunk(trainer.chunks.put(data), len(data)), (trainer.url,))
        with pytest.raises(WeightsError, match="malformed"):
            await updates.update(offer, None)


async def test_an_older_push_is_fenced(updates, trainer):
    await updates.update(trainer.offer(V[2], 2), None)
    with pytest.raises(Conflict, match="only moves forward"):
        await updates.update(trainer.offer(V[1], 1), None)
    with pytest.raises(Conflict, match="another digest"):
        await updates.update(trainer.offer(V[2], 3), None)
    trainer.newest = trainer.offer("e000003-s000001", 4)
    await updates.catch_up()
    with pytest.raises(Conflict):
        await updates.update(trainer.offer("e000002-s000009", 5), None)
    assert updates.current == "e000003-s000001"


async def test_a_run_that_was_begun_anew_is_followed_where_its_trainer_says_so(updates, engine, trainer):
    """And not because somebody pushes."""
    await updates.update(trainer.offer(V[4], 4), None)
    anew = trainer.offer(V[1], 1, run_id="second")
    for offer in (anew, trainer.offer(V[5], 5, run_id="second")):
        with pytest.raises(Conflict, match="another run id"):
            await updates.update(offer, None)
    trainer.newest = trainer.offer(V[2], 2)  # an older trainer that still runs
    await updates.catch_up()
    assert updates.current == V[4]
    trainer.newest = anew
    await updates.catch_up()
    assert updates.current == V[1]
    assert is_right(engine, V[1], 1)
    assert updates.state.n_resets == 1


async def test_without_sources_that_have_it_the_old_weights_serve(updates, trainer):
    await updates.update(trainer.offer(V[1], 1), None)
    offer = trainer.offer(V[2], 2)
    trainer.chunks.clear()
    with pytest.raises(Unavailable, match="no source has chunk"):
        await updates.update(offer, None)
    assert (updates.current, updates.why_not_ready()) == (V[1], None)


@dataclass
class HastyEngine(FakeEngine):
    """Does not wait for what is on its way: it has it already, or fails."""

    error: VolleyError | None = None

    async def stage(self, weights, arriving=None):
        assert arriving is not None
        assert not arriving.done()
        if self.error is not None:
            raise self.error
        return await super().stage(weights)


async def test_an_engine_that_has_the_weights_already_waits_for_what_is_passed_on(trainer, updates):
    updates.engine = HastyEngine()
    offer = trainer.offer(V[1], 1)
    staged = await updates.stage(offer)
    assert staged.timings["pulled_bytes"] > 0
    for digest in staged.chunks:
        assert updates.read_chunk(digest) == trainer.chunks.read(digest)


@pytest.mark.parametrize("error", [EngineDied("gone"), WeightsError("another model")])
async def test_an_engine_that_fails_ends_the_pull(trainer, updates, engine, error, monkeypatch):
    await updates.update(trainer.offer(V[1], 1), None)
    monkeypatch.setattr(updates, "engine", HastyEngine(error=error))
    with pytest.raises(type(error), match=error.detail):
        await updates.stage(trainer.offer(V[2], 2))
    assert (updates.current, updates.staged) == (V[1], None)
    monkeypatch.setattr(updates, "engine", engine)
    await updates.update(trainer.offer(V[2], 2), None)
    assert is_right(engine, V[2], 2)


async def test_chunks_of_a_pull_that_was_overtaken_are_bases_of_the_next_version(updates, engine, trainer):
    """A server that joins over a slow link gets there, however fast versions follow each other."""
    first = PublishedManifest.from_json(trainer.chunks.read(trainer.offer(V[1], 1).manifest.blake3)).weights
    (base,) = first.chunks
    await updates.puller.pull(first.chunks, [trainer.url])
    moved = bytearray(trainer.chunks.read(base.blake3))
    moved[5] ^= 1
    made, delta = (
        Chunk(trainer.chunks.put(moved), len(moved)),
        encode(bytes(trainer.chunks.read(base.blake3)), moved, 4),
    )
    deltas = {made.blake3: Delta(base.blake3, Chunk(trainer.chunks.put(delta), len(delta)))}
    staged, _ = await updates.update(
        trainer.offer(V[2], 1, weights=replace(first, chunks=(made,)), deltas=deltas), None
    )
    assert staged.timings["pulled_bytes"] == len(delta)
    assert not is_right(engine, V[2], 1)
    assert sum((a != engine.arrays_of[V[2]][name]).sum() for name, a in models.random_weights(CONFIG, 1).items()) == 1
    assert base.blake3 not in updates.puller.chunks


async def test_a_pull_that_is_overtaken_twice_ends_with_the_right_bytes(updates, engine, trainer, monkeypatch):
    """Two chunks: the second never arrives; the first gets a delta for each version that overtakes the pull."""
    monkeypatch.setattr(pulling, "PATIENCE_S", 0.3)
    whole = PublishedManifest.from_json(trainer.chunks.read(trainer.offer(V[1], 1).manifest.blake3)).weights
    data = trainer.chunks.read(whole.chunks[0].blake3)
    half = len(data) // 8 * 4
    parts, deltas = [bytearray(data[:half]), bytearray(data[half:])], dict[str, Delta]()
    trees = list[tuple[Chunk, ...]]()
    for step in (1, 2, 3):
        before = [bytes(part) for part in parts]
        for part in parts:
            part[4 * step] ^= 1
        trees.append(tuple(Chunk(trainer.chunks.put(bytes(part)), len(part)) for part in parts))
        if step > 1:
            for old, new, base, made in zip(before, parts, *trees[-2:], strict=True):
                delta = encode(old, bytes(new), 4)
                deltas[made.blake3] = Delta(base.blake3, Chunk(trainer.chunks.put(delta), len(delta)))
    for step, tree in enumerate(trees[:2], 1):
        (trainer.chunks.folder / tree[1].blake3).unlink()
        with pytest.raises(Unavailable):
            await updates.update(trainer.offer(V[step], 1, weights=replace(whole, chunks=tree), deltas=deltas), None)
        assert tree[0].blake3 in updates.puller.chunks
    staged, _ = await updates.update(
        trainer.offer(V[3], 1, weights=replace(whole, chunks=trees[2]), deltas=deltas), None
    )
    assert staged.timings["pulled_bytes"] == trees[2][1].size + deltas[trees[2][0].blake3].chunk.size
    leaves = reads(trainer.chunks.folder, replace(whole, chunks=trees[2]), V[3])
    assert all((read() == engine.arrays_of[V[3]][name]).all() for name, read in leaves.items())
    kept = {path.name for path in updates.puller.chunks.folder.iterdir()}
    assert not kept & {chunk.blake3 for tree in trees[:2] for chunk in tree}


async def test_a_server_of_no_run_takes_none(engine, trainer):
    with pytest.raises(Forbidden):
        await WeightUpdater(engine, None, MODEL, "test").update(trainer.offer(V[1]), None)


async def test_a_pull_that_is_given_up_leaves_nothing_behind_that_is_not_whole(updates, engine, trainer):
    """Cancelled at whatever moment, and tried again: right weights, or the old ones."""
    await updates.update(trainer.offer(V[1], 1), None)
    offer = trainer.offer(V[2], 2)
    for n_ticks in range(0, 60, 3):
        task = asyncio.ensure_future(updates.stage(offer))
        for _ in range(n_ticks):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert updates.current == V[1]
    await updates.update(offer, None)
    assert is_right(engine, V[2], 2)
