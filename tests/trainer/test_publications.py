"""What a trainer publishes: which versions can be had, and of what they can be made."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from services.trainer.publishing import publications
from services.trainer.publishing.publications import ModelToPublish, Publications, PublishedVersion
from services.trainer.publishing.run_id import run_id
from shared.errors import NotFound
from shared.published.chunks import ChunkFolder, reads
from shared.published.manifest import PublishedManifest
from shared.run.checkpoint_files import ManifestLeaf
from shared.run.folder import RunFolder
from shared.types import WeightVersion

N = 5000


def published(made: Publications, step: int, weights: np.ndarray, epoch: int = 1) -> PublishedVersion:
    leaves = [ManifestLeaf("w", weights.shape, str(weights.dtype))]
    model = ModelToPublish(leaves, {"w": partial(np.asarray, weights)}, {}, None)
    return made.publish(WeightVersion(epoch, step), model)


def manifest_of(made: Publications, version: PublishedVersion) -> PublishedManifest:
    return PublishedManifest.from_json(made.read(version.manifest.blake3))


def steps(n: int) -> list[np.ndarray]:
    """float16, of which each step moves some."""
    rng = np.random.default_rng(0)
    found = [rng.normal(size=N).astype(np.float16)]
    while len(found) < n:
        found.append(np.where(rng.random(N) < 0.02, np.nextafter(found[-1], np.float16(9)), found[-1]))
    return found


def had(made: Publications, version: PublishedVersion, folder: Path) -> np.ndarray:
    chunks = ChunkFolder(folder)
    manifest = manifest_of(made, version)
    for digest in manifest.chunks():
        chunks.put(made.read(digest))
    return reads(folder, manifest.weights, "v")["w"]()


def test_a_version_can_be_had_before_it_is_announced_but_nobody_is_told(tmp_path):
    made, (weights,) = Publications(tmp_path, "r"), steps(1)
    version = published(made, 3, weights)
    assert made.newest is None
    made.announce(version)
    assert made.newest == version
    assert had(made, version, tmp_path / "had").tobytes() == weights.tobytes()
    manifest = manifest_of(made, version)
    assert (manifest.run, manifest.version, manifest.digest) == ("r", "e000001-s000003", version.digest)


def test_equal_weights_have_one_digest_and_are_kept_once(tmp_path):
    made, (weights,) = Publications(tmp_path, "r"), steps(1)
    one, two = published(made, 1, weights), published(made, 2, weights)
    assert (one.digest, one.version) != (two.digest, two.version)
    assert one.digest == two.digest
    assert manifest_of(made, one).weights.chunks == manifest_of(made, two).weights.chunks


def test_the_last_two_are_kept_and_those_that_are_asked_for(tmp_path, monkeypatch):
    made = Publications(tmp_path, "r")
    versions = []
    for step, weights in enumerate(steps(5)):
        versions.append(published(made, step, weights + 9 * step))
        if step < 4:
            made.read(versions[1 if step > 1 else 0].manifest.blake3)  # somebody is pulling the second one
    readable: Callable[[int], object] = lambda i: made.read(versions[i].manifest.blake3)  # noqa: E731
    for i in (1, 3, 4):
        readable(i)
    for i in (0, 2):
        with pytest.raises(NotFound):
            readable(i)
    monkeypatch.setattr(publications, "_ASKED_S", -1.0)
    published(made, 5, steps(1)[0])
    with pytest.raises(NotFound):
        readable(1)
    made.close()
    assert {path.name for path in tmp_path.iterdir()} == {"beginning"}


def test_a_version_whose_chunks_were_removed_is_published_again(tmp_path):
    made, (weights,) = Publications(tmp_path / "published", "r"), steps(1)
    version = published(made, 1, weights)
    shutil.rmtree(tmp_path / "published")
    assert not made.has_lost
    with pytest.raises(NotFound):
        made.read(version.manifest.blake3)
    assert made.has_lost
    again = published(made, 1, weights)
    assert again.digest == version.digest
    assert had(made, again, tmp_path / "had").tobytes() == weights.tobytes()
    assert not made.has_lost


def test_a_chunk_of_no_version_is_not_served(tmp_path):
    made = Publications(tmp_path, "r")
    for digest in ("0" * 64, "../beginning"):
        with pytest.raises(NotFound):
            made.read(digest)
    version = published(made, 1, steps(1)[0])
    (folder,) = tmp_path.glob("e*")
    stray = ChunkFolder(folder).put(b"stray")
    with pytest.raises(NotFound):
        made.read(stray)
    made.read(version.manifest.blake3)


def test_deltas_lead_from_the_last_versions_to_the_newest(tmp_path):
    made, weights = Publications(tmp_path, "r"), steps(12)
    versions = [(one := published(made, step, value), manifest_of(made, one)) for step, value in enumerate(weights)]
    version, newest = versions[-1]
    assert 0 < version.delta_bytes < 0.08 * version.n_bytes
    (wanted,) = newest.weights.chunks
    for back in range(1, 9):
        (had_before,) = versions[-1 - back][1].weights.chunks
        deltas = newest.delta_chain(wanted, lambda digest, known=had_before.blake3: digest == known)
        assert len(deltas) == back
        for delta in deltas:
            made.read(delta.chunk.blake3)
    (too_old,) = versions[-10][1].weights.chunks
    assert newest.delta_chain(wanted, lambda digest: digest == too_old.blake3) == []


@pytest.mark.parametrize("n_left", [None, 100])
def test_what_becomes_of_old_chunks_keeps_no_version_from_being_published(tmp_path, n_left):
    """They were removed, or cut short: there are no deltas then."""
    made, (first, second) = Publications(tmp_path / "p", "r"), steps(2)
    published(made, 1, first)
    for path in filter(Path.is_file, (tmp_path / "p").rglob("*")):
        if n_left is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:n_left])
    version = published(made, 2, second)
    assert version.delta_bytes == 0
    assert had(made, version, tmp_path / "had").tobytes() == second.tobytes()


def test_float32_that_moves_everywhere_has_no_deltas(tmp_path):
    made, weights = Publications(tmp_path, "r"), np.random.default_rng(0).normal(size=N).astype(np.float32)
    published(made, 0, weights)
    version = published(made, 1, weights * np.float32(1.001))
    assert version.delta_bytes == 0
    assert manifest_of(made, version).deltas == {}


def test_a_successor_removes_what_it_replaces_and_never_the_reverse(tmp_path):
    old, new, (weights,) = Publications(tmp_path, "r"), Publications(tmp_path, "r"), steps(1)
    published(old, 1, weights, epoch=1)
    version = published(new, 1, weights, epoch=2)
    late = Publications(tmp_path, "r")  # a trainer that was stopped before its first version, and wakes up
    published(late, 1, weights, epoch=1)
    assert had(new, version, tmp_path / "had").tobytes() == weights.tobytes()
    assert len(list(tmp_path.glob("e000002-*"))) == 1


def test_a_run_id_outlives_trainers_and_not_the_folder(tmp_path):
    root, run_ids = tmp_path / "published", []
    for epoch in (1, 2):
        made = Publications(root, "r")
        run_ids.append(manifest_of(made, published(made, 1, steps(1)[0], epoch)).run_id)
        made.close()
    shutil.rmtree(root)
    made = Publications(root, "r")
    run_ids.append(manifest_of(made, published(made, 1, steps(1)[0])).run_id)
    assert run_ids[0] == run_ids[1] != run_ids[2]


@pytest.mark.parametrize("lost", [["published"], [".beginning"], ["published", ".beginning"]])
def test_a_run_id_outlives_its_files_while_there_is_a_log(tmp_path, lost):
    folder = RunFolder(tmp_path)
    known = run_id(folder.published)
    folder.recorded_run_id.write_text(known, encoding="utf-8")  # by the orchestrator
    (folder.archive / "e000001").mkdir(parents=True)
    (folder.archive / "e000001/s000001.json").write_bytes(b"{}")
    for name in lost:
        remove(tmp_path / name)
    assert run_id(folder.published) == known
    assert folder.run_id.read_text(encoding="utf-8") == known
    (folder.published / "beginning").write_bytes(b"")
    assert run_id(folder.published) == known


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def test_of_deltas_that_no_reader_would_take_the_oldest_are_left_out(tmp_path, monkeypatch):
    made, weights = Publications(tmp_path, "r"), steps(6)
    whole = published(made, 0, weights[0]).manifest.size
    monkeypatch.setattr(publications, "MAX_MANIFEST_BYTES", whole + 420)  # room for two
    for step, value in enumerate(weights[1:], start=1):
        version = published(made, step, value)
    found = manifest_of(made, version)
    assert version.manifest.size <= whole + 420
    assert 0 < len(found.deltas) < 5
    assert {chunk.blake3 for chunk in found.weights.chunks} <= found.deltas.keys()
