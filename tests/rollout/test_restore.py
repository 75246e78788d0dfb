"""A checkpoint's arrays are those of the bytes that were verified, each of which is read once; restoring again and
again, as a run does at each of its steps, takes no more memory.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from services.rollout.engines.sglang_jax.weights.restore import CheckpointLeaf, open_checkpoint, open_hugging_face
from shared.errors import WeightsError
from shared.run.weights import digest_files, read_manifest
from tests.support import models

CONFIG = models.tiny_config()
VERSION = "e000001-s000001"


def opened(folder: Path) -> AbstractContextManager[dict[str, CheckpointLeaf]]:
    manifest = read_manifest(folder)
    return open_checkpoint(folder, manifest.path, manifest.files, manifest.version)


def restored(folder: Path) -> models.Weights:
    with opened(folder) as leaves:
        return {name: leaf.read() for name, leaf in leaves.items()}


def assert_equal(found: models.Weights, expected: models.Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def params(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "params").rglob("*") if path.is_file())


def n_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_nothing_is_left_of_a_restore(tmp_path: Path) -> None:
    folders = [
        models.write_checkpoint(tmp_path, f"e000001-s{i:06d}", CONFIG, models.random_weights(CONFIG, i))
        for i in range(4)
    ]
    for folder in folders[:2]:
        restored(folder)
    before, n_open = n_objects(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        for folder in folders:
            restored(folder)
    assert n_objects() - before < 20
    assert len(os.listdir("/proc/self/fd")) <= n_open


def test_checkpoints_of_different_trees_are_told_apart(tmp_path: Path) -> None:
    small, large = CONFIG, json.loads(Path("configs/models/tiny/config.json").read_text())
    for name, config in (("a", small), ("b", large), ("c", small)):
        weights = models.random_weights(config, 0)
        folder = models.write_checkpoint(tmp_path / name, VERSION, config, weights)
        assert_equal(restored(folder), models.to_tunix(weights, config))


def test_bfloat16_is_restored_as_it_is(tmp_path: Path) -> None:
    weights = {k: v.astype(ml_dtypes.bfloat16) for k, v in models.random_weights(CONFIG, 0).items()}
    folder = models.write_checkpoint(tmp_path, VERSION, CONFIG, weights)
    with opened(folder) as leaves:
        assert {str(leaf.dtype) for leaf in leaves.values()} == {"bfloat16"}
    assert_equal(restored(folder), models.to_tunix(weights, CONFIG))


def test_every_byte_is_read_once(tmp_path: Path) -> None:
    """`rchar` counts what the kernel hands to this process, so also what is read again of the copies: the metadata."""
    weights = models.random_weights(CONFIG | {"vocab_size": 4096}, 0)
    folder = models.write_checkpoint(tmp_path, VERSION, CONFIG | {"vocab_size": 4096}, weights)
    manifest = read_manifest(folder)
    restored(folder)

    def rchar() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = rchar()
    with opened(folder) as leaves:
        assert rchar() - before < 1.1 * sum(file.size for file in manifest.files)
        shutil.rmtree(folder)
        found = {name: leaf.read().shape for name, leaf in leaves.items()}
    assert found == {leaf.key: leaf.shape for leaf in manifest.tree}


@pytest.mark.parametrize("kind", ["removed", "overwritten", "replaced"])
def test_what_was_verified_is_what_is_loaded_whatever_becomes_of_the_files(tmp_path: Path, kind: str) -> None:
    """All that happens after the digests were taken comes too late to matter."""
    weights = models.random_weights(CONFIG, 0)
    folder = models.write_checkpoint(tmp_path / "a", VERSION, CONFIG, weights)
    other = models.write_checkpoint(tmp_path / "b", VERSION, CONFIG, models.random_weights(CONFIG, 1))
    with opened(folder) as leaves:
        if kind == "overwritten":
            for path in params(folder):
                path.write_bytes(os.urandom(path.stat().st_size))
        else:
            shutil.rmtree(folder)
        if kind == "replaced":
            shutil.copytree(other, folder)
        found = {name: leaf.read() for name, leaf in leaves.items()}
    assert_equal(found, models.to_tunix(weights, CONFIG))


def test_files_that_change_while_they_are_read_are_found_or_do_no_harm(tmp_path: Path) -> None:
    """A thread goes on flipping a bit of the largest file, there and back: half of the time it is whole."""
    weights = models.random_weights(CONFIG, 0)
    folder = models.write_checkpoint(tmp_path, VERSION, CONFIG, weights)
    expected, done, seen = models.to_tunix(weights, CONFIG), threading.Event(), set[str]()
    largest = max(params(folder), key=lambda path: path.stat().st_size)
    at = largest.stat().st_size // 2
    byte = largest.read_bytes()[at]

    def flip() -> None:
        descriptor, now = os.open(largest, os.O_WRONLY), byte
        while not done.is_set():
            now ^= 0x10
            os.pwrite(descriptor, bytes([now]), at)
        os.close(descriptor)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        while seen != {"refused", "taken"}:
            try:
                found = restored(folder)
            except WeightsError:
                seen.add("refused")
            else:
                assert_equal(found, expected)
                seen.add("taken")
    finally:
        done.set()
        thread.join()


def test_an_array_without_its_numbers_is_not_taken_for_zeros(tmp_path: Path) -> None:
    """As Zarr would have it: a chunk that is not there holds the fill value."""
    import tensorstore as ts

    store = {"driver": "ocdbt", "base": f"file://{tmp_path}/params/", "path": "norm.w/"}
    ts.open({"driver": "zarr", "kvstore": store}, create=True, dtype=ts.float32, shape=[4]).result()
    opening = open_checkpoint(tmp_path, "params", digest_files(tmp_path, "params"), VERSION)
    with opening as leaves, pytest.raises(WeightsError, match=r"norm\.w"):
        leaves["norm.w"].read()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_hugging_faces_files_are_read_as_they_are(tmp_path: Path, dtype: type) -> None:
    weights = {k: v.astype(dtype) for k, v in models.random_weights(CONFIG, 0).items()}
    folder = models.write_hf(tmp_path, CONFIG, weights)
    assert_equal({k: leaf.read() for k, leaf in open_hugging_face(folder).items()}, weights)
