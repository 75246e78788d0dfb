"""A checkpoint's arrays are those of the bytes that were verified, each of which is read once; restoring again and
again, as a run does at each of its steps, takes no more memory.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.arrays.restore import CheckpointLeaf, open_checkpoint, open_hugging_face
from services.rollout.engines.sglang_jax.loading.staging import load_leaves
from services.rollout.engines.staged import StagedWeights
from shared import codec
from shared.errors import Conflict, WeightsError, problem
from shared.run.checkpoint_files import ManifestFile, ManifestLeaf, digest, digest_files, read_manifest
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
    small, large = CONFIG, json.loads(Path("configs/models/tiny/config.json").read_text(encoding="utf-8"))
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
        return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])

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
    spec = {"driver": "zarr", "kvstore": store, "metadata": {"compressor": None}}
    ts.open(spec, create=True, dtype=ts.float32, shape=[4]).result()
    (tmp_path / "params" / "room").write_bytes(bytes(16))
    opening = open_checkpoint(tmp_path, "params", digest_files(tmp_path, "params"), VERSION)
    with opening as leaves, pytest.raises(WeightsError, match=r"norm\.w"):
        leaves["norm.w"].read()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_hugging_faces_files_are_read_as_they_are(tmp_path: Path, dtype: type) -> None:
    weights = {k: v.astype(dtype) for k, v in models.random_weights(CONFIG, 0).items()}
    folder = models.write_hf(tmp_path, CONFIG, weights)
    assert_equal({k: leaf.read() for k, leaf in open_hugging_face(folder).items()}, weights)


def test_what_is_decoded_is_the_copy_also_of_an_absolute_folder(tmp_path: Path) -> None:
    weights = models.random_weights(CONFIG, 0)
    folder = models.write_checkpoint(tmp_path, VERSION, CONFIG, weights)
    files = read_manifest(folder).files
    with open_checkpoint(folder, str((folder / "params").resolve()), files, VERSION) as leaves:
        shutil.rmtree(folder)
        assert_equal({name: leaf.read() for name, leaf in leaves.items()}, models.to_tunix(weights, CONFIG))


def test_a_copy_that_does_not_fit_is_no_copy(tmp_path: Path) -> None:
    """The kernel may take a part of a write, as it does at the limit of a file's size."""
    program = f"""
import resource, signal
from pathlib import Path
from services.rollout.engines.arrays.restore import open_checkpoint
from shared.run.checkpoint_files import digest_files
folder = Path({str(tmp_path)!r})
files = digest_files(folder, "params")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20 - 5, 2**20 - 5))
try:
    with open_checkpoint(folder, "params", files, "{VERSION}"):
        print("opened")
except MemoryError as error:
    print(error)
"""
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "d").write_bytes(bytes(2**20))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True)
    assert "copy of the checkpoint: File too large" in done.stdout


def test_reading_ends_when_nobody_wants_the_weights_any_more(tmp_path: Path) -> None:
    folder = models.write_checkpoint(tmp_path, VERSION, CONFIG, models.random_weights(CONFIG, 0))

    def check() -> None:
        raise Conflict("nobody waits")

    with pytest.raises(Conflict), open_checkpoint(folder, "params", read_manifest(folder).files, VERSION, check):
        pass


def test_a_manifest_that_names_a_file_twice(tmp_path: Path) -> None:
    folder = models.write_checkpoint(tmp_path, VERSION, CONFIG, models.random_weights(CONFIG, 0))
    files = read_manifest(folder).files
    with pytest.raises(WeightsError, match="twice"), open_checkpoint(folder, "params", (*files, files[0]), VERSION):
        pass


def test_a_file_whose_name_is_no_text_is_named_all_the_same(tmp_path: Path) -> None:
    folder = models.write_checkpoint(tmp_path, VERSION, CONFIG, models.random_weights(CONFIG, 0))
    with open(os.fsencode(folder) + b"/params/\xff", "wb"):
        pass
    with pytest.raises(WeightsError, match="not in the manifest") as failure, opened(folder):
        pass
    assert "\\udcff" in str(failure.value)
    assert codec.pack(problem(failure.value))


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "d"
    file.write_bytes(bytes(100))
    with pytest.raises(WeightsError, match="grew"):
        digest(file, most=99)


def test_more_than_the_model_is_not_read_into_memory() -> None:
    """A sparse file, or a header of an array, may promise any size."""
    runner = SimpleNamespace(**one_leaf(np.zeros((4, 4), np.float32)))
    files = (ManifestFile("params/d", 2**40, "0" * 64),)
    weights = StagedWeights("/nowhere", VERSION, "", below="params", files=files)
    with pytest.raises(WeightsError, match="more than a model of 16 numbers"):
        load_leaves(runner, weights, Arrival(lambda: None, is_complete=True))


def test_an_array_larger_than_any_of_the_model_is_not_read(tmp_path: Path) -> None:
    import tensorstore as ts

    store = {"driver": "ocdbt", "base": f"file://{tmp_path}/params/", "path": "w/"}
    spec = {"driver": "zarr", "kvstore": store, "metadata": {"compressor": None, "chunks": [8, 8]}}
    ts.open(spec, create=True, dtype=ts.float32, shape=[8, 8]).result()
    (tmp_path / "params" / "room").write_bytes(bytes(256))
    tree = (ManifestLeaf("w", (8, 8), "float32"),)
    weights = StagedWeights(
        str(tmp_path), VERSION, "", below="params", files=digest_files(tmp_path, "params"), tree=tree
    )
    runner = SimpleNamespace(**one_leaf(np.zeros((4, 4), np.float32)))
    with pytest.raises(WeightsError, match="larger than any array"):
        load_leaves(runner, weights, Arrival(lambda: None, is_complete=True))


def one_leaf(value: np.ndarray) -> dict[str, Any]:
    """What a model runner of one array has of these."""
    import jax

    leaves, definition = jax.tree_util.tree_flatten({"w": value})
    return {"model_state_leaves": leaves, "_model_state_def": definition}
