"""Published weights as bytes: trees cut into chunks, chunks made of others, manifests."""

import os
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import blake3
import numpy as np
import orjson
import pytest

from shared.errors import InputError, NotFound, StorageDenied, WeightsError
from shared.published import chunks, delta, manifest
from shared.published.chunks import ChunkFolder
from shared.published.manifest import Chunk, Delta, PublishedAdapter, PublishedManifest, WeightOffer, WeightTree
from shared.run.checkpoint_files import ManifestLeaf, Probe


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for module in (chunks, manifest):
        monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    monkeypatch.setattr(chunks, "SPARE_BYTES", 60)


def tree_of(folder: ChunkFolder, arrays: dict[str, np.ndarray]) -> WeightTree:
    leaves = chunks.in_order(ManifestLeaf(name, value.shape, str(value.dtype)) for name, value in arrays.items())
    parts = chunks.cut(leaves, {name: partial(np.asarray, value) for name, value in arrays.items()})
    return WeightTree(tuple(leaves), tuple(Chunk(folder.put(part), len(part)) for part in parts))


def random_arrays(rng) -> dict[str, np.ndarray]:
    shapes = [tuple(rng.integers(1, 12, rng.integers(0, 3))) for _ in range(rng.integers(1, 12))]
    return {f"l{i}": rng.normal(size=shape).astype(rng.choice(["f4", "f2"])) for i, shape in enumerate(shapes)}


def a_manifest(tmp_path: Path, **changes) -> PublishedManifest:
    tree = tree_of(ChunkFolder(tmp_path / "chunks"), {"w": np.arange(100, dtype=np.float32)})
    probe = Probe((1, 2), (-0.5,), (1e-3,))
    return replace(PublishedManifest("r", "b", "e000001-s000002", tree, {"hidden_size": 8}, probe, 1.0), **changes)


@pytest.mark.parametrize("seed", range(40))
def test_arrays_come_out_of_chunks_bit_by_bit(tmp_path, seed):
    arrays = random_arrays(np.random.default_rng(seed))
    folder = ChunkFolder(tmp_path / "chunks")
    tree = tree_of(folder, arrays)
    assert tree.n_bytes == sum(value.nbytes for value in arrays.values())
    assert all(chunk.size <= 64 for chunk in tree.chunks)
    for name, read in chunks.reads(folder.folder, tree, "v").items():
        assert (read().dtype, read().shape, read().tobytes()) == (
            arrays[name].dtype,
            arrays[name].shape,
            arrays[name].tobytes(),
        )


def test_in_their_order_arrays_are_made_of_chunks_that_are_read_once(tmp_path):
    arrays = {f"l{i:02}": np.full(9, i, np.float16) for i in range(11)} | {"m": np.arange(100, dtype=np.float32)}
    folder, n_reads = ChunkFolder(tmp_path / "chunks"), 0
    tree = tree_of(folder, arrays)

    def count(path: Path) -> None:
        nonlocal n_reads
        n_reads += path.is_file()

    for name, read in chunks.reads(folder.folder, tree, "v", count).items():
        value = read()
        assert np.array_equal(value, arrays[name])
        assert value.ctypes.data % value.itemsize == 0
    assert n_reads == len(tree.chunks) > 2


def test_an_array_of_many_chunks_shares_none(tmp_path):
    arrays = {"a": np.zeros(3, np.float32), "b": np.arange(100, dtype=np.float32), "c": np.ones(3, np.float32)}
    folder = ChunkFolder(tmp_path / "chunks")
    tree = tree_of(folder, arrays)
    assert [leaf.key for leaf in tree.leaves] == ["a", "c", "b"]
    changed = tree_of(folder, arrays | {"b": arrays["b"] + 1})
    assert tree.chunks[0] == changed.chunks[0]
    assert not set(tree.chunks[1:]) & set(changed.chunks[1:])


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "gone"])
def test_a_chunk_that_is_not_what_its_name_says_makes_no_array(tmp_path, damage):
    folder = ChunkFolder(tmp_path / "chunks")
    tree = tree_of(folder, {"w": np.arange(100, dtype=np.float32)})
    path = folder.path(tree.chunks[1].blake3)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    change = {"flip": bytes(data), "cut": bytes(data[:-1]), "longer": path.read_bytes() + b"x", "gone": None}[damage]
    path.unlink()
    if change is not None:
        path.write_bytes(change)
    read = chunks.reads(folder.folder, tree, "v")["w"]
    if damage == "longer":  # what is behind its end is not read
        assert read().tobytes() == np.arange(100, dtype=np.float32).tobytes()
        return
    with pytest.raises(WeightsError, match=tree.chunks[1].blake3):
        read()


def test_only_data_with_its_digest_become_a_chunk(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks")
    digest = folder.put(b"abc")
    assert not folder.add(Chunk(digest, 3), b"abd")
    assert folder.read(digest) == b"abc"
    folder.retain([])
    with pytest.raises(NotFound):
        folder.read(digest)
    assert list(folder.folder.iterdir()) == []


def test_a_folder_that_was_removed_is_made_again_but_not_the_runs(tmp_path):
    folder = ChunkFolder(tmp_path / "run" / "pulled" / "server")
    for gone in ("pulled/server", "pulled"):
        shutil.rmtree(tmp_path / "run" / gone)
        folder.retain(["another"])
        assert folder.read(folder.put(b"abc")) == b"abc"
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageDenied, match="was removed"):
        folder.put(b"abc")
    assert not (tmp_path / "run").exists()


def test_the_next_chunks_are_written_over_those_that_nobody_needs(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks")
    first, second, short = folder.put(b"a" * 64), folder.put(b"b" * 64), folder.put(b"c" * 59)
    file = folder.path(first).stat().st_ino
    folder.retain([second])
    assert first not in folder
    assert short not in folder
    assert len(list(folder.folder.iterdir())) == 2
    third, fourth = folder.put(b"d" * 64), folder.put(b"e" * 64)
    assert folder.path(third).stat().st_ino == file
    assert [folder.read(digest) for digest in (second, third, fourth)] == [b"b" * 64, b"d" * 64, b"e" * 64]
    folder.retain([second])
    folder.retain([second])
    assert len(list(folder.folder.iterdir())) == 2  # no more room is kept than is used
    folder.clear()
    assert list(folder.folder.iterdir()) == []


def test_a_chunk_is_written_over_one_of_its_size(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks")
    old = {size: folder.put(bytes(size)) for size in (64, 61, 62)}
    files = {size: folder.path(digest).stat().st_ino for size, digest in old.items()}
    folder.retain(["new"] * 3)
    new = {size: folder.put(b"n" * size) for size in (60, 61, 62, 64)}
    assert {size: folder.path(new[size]).stat().st_ino for size in files} == files
    assert [folder.read(digest) for digest in new.values()] == [b"n" * size for size in new]


def test_files_of_sizes_that_nobody_wants_make_room(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks")
    folder.put(bytes(61))
    folder.retain(["new"])
    wanted = folder.path(folder.put(bytes(64))).stat().st_ino
    folder.retain(["new"])
    assert [path.stat().st_ino for path in folder.folder.iterdir()] == [wanted]


def test_a_file_that_is_being_written_is_taken_by_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64)
    folder = ChunkFolder(tmp_path / "chunks")
    kept = folder.put(b"a" * 64)
    folder.put(b"b" * 64)
    folder.retain([kept, "another"])  # there is a file to write over
    writing, go_on, rename = threading.Event(), threading.Event(), Path.rename

    def later(path, target):
        if path.name.startswith(".draft-"):
            writing.set()
            assert go_on.wait(60)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", later)
    thread = threading.Thread(target=folder.put, args=(b"c" * 64,))
    thread.start()
    assert writing.wait(60)
    drafts = list(folder.folder.glob(".draft-*"))
    folder.retain([kept, "another"])
    assert list(folder.folder.glob(".draft-*")) == drafts
    assert len(drafts) == 1
    go_on.set()
    thread.join()
    assert folder.read(blake3.blake3(b"c" * 64).hexdigest()) == b"c" * 64


def test_nobody_reads_a_chunk_that_is_written_over(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**20)
    folder = ChunkFolder(tmp_path / "chunks")
    kept = folder.put(bytes(100))
    versions = [bytes([i]) * 2**20 for i in range(6)]
    newest, found = [folder.put(versions[0])], list[tuple[str, str]]()
    ended = threading.Event()

    def read():
        while not ended.is_set():
            with suppress(NotFound):
                digest = newest[-1]
                found.append((digest, blake3.blake3(folder.read(digest)).hexdigest()))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for i in range(120):
        newest.append(folder.put(versions[i % len(versions)]))
        folder.retain([newest[-1], kept])
    ended.set()
    for reader in readers:
        reader.join()
    assert found
    assert all(asked == got for asked, got in found)


@pytest.mark.parametrize("width", [2, 4])
def test_a_chunk_is_made_of_another_bit_by_bit(width):
    rng = np.random.default_rng(0)
    for n, share in ((2048, 0.01), (2048, 0.0), (1, 0.0), (40_000, 0.1)):
        base = rng.integers(0, 2 ** (8 * width), n, dtype=f"u{width}")  # NaNs among them
        new = np.where(rng.random(n) < share, rng.integers(0, 2 ** (8 * width), n, dtype=f"u{width}"), base)
        made = delta.encode(base.tobytes(), new.tobytes(), width)
        assert made is not None
        data = bytearray(base.tobytes())
        delta.apply(data, made)
        assert data == new.tobytes()


def test_where_most_elements_differ_there_is_no_delta():
    rng = np.random.default_rng(0)
    assert delta.encode(rng.bytes(800), rng.bytes(800), 2) is None


def test_whatever_a_delta_holds_it_is_refused_or_makes_as_many_bytes():
    rng = np.random.default_rng(0)
    base = rng.bytes(4096)
    new = bytearray(base)
    new[7] ^= 3
    good = delta.encode(base, bytes(new), 2)
    assert good is not None
    n_refused = 0
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            bad[rng.integers(len(bad))] = rng.integers(256)
        data = bytearray(base)
        try:
            delta.apply(data, bytes(bad))
        except ValueError:
            n_refused += 1
            assert data == base
    assert n_refused
    with pytest.raises(ValueError, match="the length in its header"):
        delta.apply(bytearray(base), delta.zstandard.compress(b"\0" * 2**26))  # 64 MiB are never made


def test_a_manifest_says_what_it_was_told(tmp_path):
    plain = a_manifest(tmp_path)
    adapter = PublishedAdapter(4, 8.0, plain.weights)
    first = plain.weights.chunks[0]
    for one in (plain, replace(plain, adapter=adapter), replace(plain, deltas={first.blake3: Delta("0" * 64, first)})):
        assert PublishedManifest.from_json(one.to_json()) == one


def test_the_digest_is_that_of_the_weights(tmp_path):
    one = a_manifest(tmp_path)
    assert replace(one, version="e000002-s000002", created=2.0, run="other").digest == one.digest
    nudged = tree_of(ChunkFolder(tmp_path / "chunks"), {"w": np.nextafter(np.arange(100, dtype=np.float32), 9)})
    renamed = WeightTree((ManifestLeaf("v", (100,), "float32"),), one.weights.chunks)
    adapter = PublishedAdapter(4, 8.0, one.weights)
    others = [replace(one, weights=nudged), replace(one, weights=renamed), replace(one, adapter=adapter)]
    others.append(replace(one, adapter=replace(adapter, alpha=9.0)))
    assert len({one.digest, *(other.digest for other in others)}) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.pop("weights"),
        lambda raw: raw.update(schema=2),
        lambda raw: raw.update(digest="0" * 64),
        lambda raw: raw.update(version="newest"),
        lambda raw: raw.update(deltas=[1]),
        lambda raw: raw["weights"]["chunks"].pop(),
        lambda raw: raw["weights"]["chunks"].__setitem__(0, ["../etc", 64]),
        lambda raw: raw["weights"]["chunks"].__setitem__(0, ["0" * 64, 2**40]),
        lambda raw: raw["weights"]["leaves"][0].update(dtype="object"),
        lambda raw: raw["weights"]["leaves"][0].update(shape=[-1]),
        lambda raw: raw["weights"].update(leaves=[]),
        lambda raw: raw["weights"].update(leaves=raw["weights"]["leaves"] * 2, chunks=raw["weights"]["chunks"] * 2),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, change):
    raw = orjson.loads(a_manifest(tmp_path).to_json())
    change(raw)
    with pytest.raises(WeightsError):
        PublishedManifest.from_json(orjson.dumps(raw))


def test_the_shorter_way_is_taken(tmp_path):
    """Three deltas of 20 bytes make a chunk of 64 of the one three versions before; four are no shorter than it."""
    names = [f"{i:064x}" for i in range(6)]
    steps = {names[i + 1]: Delta(names[i], Chunk(f"{i + 9:064x}", 20)) for i in range(5)}
    found = a_manifest(tmp_path, deltas=steps)
    wanted = Chunk(names[5], 64)
    assert found.delta_chain(wanted, {names[4], names[0]}.__contains__) == [steps[names[5]]]
    assert found.delta_chain(wanted, {names[2]}.__contains__) == [steps[names[n]] for n in (3, 4, 5)]
    assert found.delta_chain(wanted, {names[1]}.__contains__) == []
    circle = a_manifest(tmp_path, deltas={names[0]: Delta(names[0], Chunk("1" * 64, 1))})
    assert circle.delta_chain(Chunk(names[0], 2**23), lambda _: False) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "newest"},
        {"manifest": None},
        {"manifest": {"blake3": "x", "size": 1}},
        {"manifest": {"blake3": "0" * 64, "size": 2**40}},
        {"sources": []},
        {"sources": "http://a"},
        {"sources": ["file:///etc/passwd"]},
        {"sources": ["http://user:pw@a"]},
        {"sources": ["http://a"] * 100},
    ],
)
def test_an_offer_names_a_version_its_manifest_and_addresses(wrong):
    good = {"version": "e000001-s000001", "manifest": {"blake3": "0" * 64, "size": 9}, "sources": ["http://a:1"]}
    assert WeightOffer.from_json(good).to_json() == good
    with pytest.raises(InputError):
        WeightOffer.from_json(good | wrong)


def test_a_chunk_that_was_damaged_is_written_again_and_asked_for_again(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks")
    arrays = {"w": np.arange(100, dtype=np.float32)}
    tree = tree_of(folder, arrays)
    damaged = folder.path(tree.chunks[1].blake3)
    for _ in range(2):
        damaged.write_bytes(bytes(64))
        with pytest.raises(WeightsError, match="differs"):
            chunks.reads(folder.folder, tree, "v")["w"]()
        assert tree.chunks[1].blake3 not in folder
        assert tree_of(folder, arrays) == tree
    damaged.write_bytes(bytes(64))
    assert tree_of(folder, arrays) == tree
    assert np.array_equal(chunks.reads(folder.folder, tree, "v")["w"](), arrays["w"])


@pytest.mark.parametrize(
    "url", ["http://a..b", "http://.", f"http://{'a' * 250}", "http://-", "http://a b", "ftp://a", "http://a:123456"]
)
def test_what_is_no_address_is_no_source(url):
    with pytest.raises(InputError, match="address"):
        WeightOffer.from_json(offer(url))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:80", "https://trainer", "http://rollout-1.pool:1/x", "http://[::1]:5", "http://a_b"]
)
def test_an_address_is_a_source(url):
    assert WeightOffer.from_json(offer(url)).sources == (url,)


def offer(url: str) -> dict:
    return WeightOffer("e000001-s000001", Chunk("a" * 64, 5), (url,)).to_json()


def test_a_chunk_that_came_after_the_wrong_one_is_not_removed(tmp_path, monkeypatch):
    """A reader that was held up reads what another chunk was written over; meanwhile the right one came again."""
    folder = ChunkFolder(tmp_path / "chunks")
    tree = tree_of(folder, {"w": np.arange(8, dtype=np.float32)})
    (chunk,) = tree.chunks
    path, right, readv = folder.path(chunk.blake3), folder.read(chunk.blake3), os.readv

    def held_up(file: int, into: list[memoryview]) -> int:
        path.rename(tmp_path / "spare")
        (tmp_path / "spare").write_bytes(bytes(len(right)))
        folder.put(right)
        return readv(file, into)

    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", held_up)
        with pytest.raises(WeightsError, match="digest"):
            chunks.reads(folder.folder, tree, "v")["w"]()
    assert folder.read(chunk.blake3) == right
