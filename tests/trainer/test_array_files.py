"""Arrays whose metadata claim what no trainer writes: refused before a chunk of them is read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tensorstore as ts

from packages.proof.tests.trainer.test_parameters import made as checkpoints
from shared.errors import WeightsError
from shared.run.array_files import open_arrays
from shared.run.folder import RunFolder
from volley_proof.verify import parameters as proof

GOOD: dict[str, Any] = {
    "shape": [4],
    "chunks": [4],
    "dtype": "<f4",
    "compressor": None,
    "fill_value": None,
    "order": "C",
    "filters": None,
    "zarr_format": 2,
}
BAD = {
    "a chunk larger than its array": {"chunks": [2**29]},
    "a chunk without elements": {"chunks": [0]},
    "a negative chunk": {"chunks": [-4]},
    "a chunk of half an element": {"chunks": [0.5]},
    "a chunk of a truth": {"chunks": [True]},
    "no chunks": {"chunks": None},
    "chunks of another rank": {"chunks": [4, 1]},
    "a shape of 2**62": {"shape": [2**62], "chunks": [2**20]},
    "a shape and a chunk of 2**62": {"shape": [2**62], "chunks": [2**62]},
    "a rank of 10000": {"shape": [1] * 10_000, "chunks": [1] * 10_000},
    "zstd": {"compressor": {"id": "zstd", "level": 1}},
    "zlib": {"compressor": {"id": "zlib", "level": 9}},
    "blosc": {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}},
    "an unknown codec": {"compressor": {"id": "mine"}},
    "filters": {"filters": [{"id": "delta", "dtype": "<f4"}]},
    "an unknown dtype": {"dtype": "|O"},
    "many fields": {"dtype": [[f"f{n}", "<f4", [2**20]] for n in range(100)]},
    "another format": {"zarr_format": 3},
}


def database(folder: Path, values: dict[str, bytes]) -> None:
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    for key, value in values.items():
        store.write(key, value).result()


def made(folder: Path, metadata: bytes) -> None:
    database(folder, {"x.w/.zarray": metadata, "x.w/0": np.arange(4, dtype=np.float32).tobytes()})


def test_arrays_as_a_trainer_writes_them_are_opened(tmp_path: Path) -> None:
    made(tmp_path, orjson.dumps(GOOD))
    assert open_arrays(tmp_path)["x.w"].read().result().tolist() == [0, 1, 2, 3]


def test_a_path_may_lead_through_a_parent_folder(tmp_path: Path) -> None:
    """As `volley verify ../runs/NAME` does."""
    (tmp_path / "b").mkdir()
    made(tmp_path / "a", orjson.dumps(GOOD))
    assert open_arrays(tmp_path / "b" / ".." / "a").keys() == {"x.w"}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in BAD.items()])
def test_arrays_that_no_trainer_writes_are_not_opened(tmp_path: Path, change: dict[str, Any]) -> None:
    made(tmp_path, orjson.dumps({**GOOD, **change}))
    with pytest.raises(WeightsError):
        open_arrays(tmp_path)


@pytest.mark.parametrize(
    "metadata",
    [
        orjson.dumps(GOOD).replace(b"[4]", b"[1%s]" % (b"0" * 30), 1),
        orjson.dumps(GOOD).replace(b"[4]", b"[1e999]", 1),
        orjson.dumps(GOOD).replace(b"[4]", b"[" * 10_000, 1),
        b" " * 2**20 + orjson.dumps(GOOD),
        b"[]",
        b"7",
        b"",
        b"\xff",
    ],
)
def test_metadata_that_are_none_are_refused(tmp_path: Path, metadata: bytes) -> None:
    made(tmp_path, metadata)
    with pytest.raises(WeightsError):
        open_arrays(tmp_path)


def test_arrays_of_more_bytes_than_the_files_are_not_opened(tmp_path: Path) -> None:
    """Many small chunks, of which one is there."""
    made(tmp_path, orjson.dumps({**GOOD, "shape": [2**20], "chunks": [4]}))
    with pytest.raises(WeightsError, match="4194304 bytes"):
        open_arrays(tmp_path)


def test_nodes_of_a_database_that_unpack_to_gigabytes_end_their_reader(tmp_path: Path) -> None:
    """TensorStore has no bound on them: the process that `volley verify` reads with has."""
    found, records = checkpoints(tmp_path, rounded=False)
    place = tmp_path / "checkpoints" / str(found[0].version) / "params"
    shutil.rmtree(place)
    config = {"max_inline_value_bytes": 2**20, "max_decoded_node_bytes": 2**31}
    store = ts.KvStore.open({"driver": "ocdbt", "config": config, "base": f"file://{place}/"}).result()
    with ts.Transaction() as transaction:
        for n in range(1500):
            store.with_transaction(transaction)[f"a{n}/.zarray"] = bytes(2**20 - 1)
    assert sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) < 2**17
    violations, _ = proof.check(RunFolder(tmp_path), found, records)
    assert [one.step for one in violations] == [1, 2]
    assert "more memory or CPU time" in violations[0].detail
