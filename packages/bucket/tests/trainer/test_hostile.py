"""What comes out of a bucket is read as if somebody hostile had filled it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import orjson
import pytest

from packages.bucket.tests.trainer.runs import RUN_ID, Run, every, head, restore
from services.trainer.checkpoints.store import CheckpointFolders
from shared.errors import ConfigError, VolleyError, WeightsError
from shared.run import commits
from shared.run.checkpoint_files import MANIFEST
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.types import WeightVersion
from tools.simulated.trainer import NumpyArrays
from volley_bucket.objects import Bucket
from volley_bucket.run.head import HEAD, MAX_BYTES, BucketHead

HOSTILE: dict[str, Any] = {
    "schema": [2, None],
    "run": [None, 7],
    "folder": ["../../etc", "", 7, "0" * 17],
    "beginning": ["../x", None],
    "epoch": [-1, 2**40, 1.5, True, "1"],
    "epochs": [[0], [-1], [2**40], ["1"], {}, [1] * 60_000, [], [2], [1, 1], [2, 1]],
    "version": ["e000001-s999999999999", "../x", 7, "e000001-s000002/../.."],
    "lineage": [[[1]], [[-1, 0]], [[2, 5], [1, 0]], "x", []],
    "checkpoints": [[["../../x", "0" * 64]], [["e000001-s000001", "0"]], [["e000001-s000001"]], [], [1] * 9],
    "lines": [
        {"../../x": []},
        {"config.yaml": []},
        {"ledger.jsonl": [[1, "../x", 1]]},
        {"ledger.jsonl": [[1, "0" * 64, 2**40]]},
        {"ledger.jsonl": [[1, "0" * 64, -1]]},
        {"ledger.jsonl": [["1/..", "0" * 64, 1]]},
        [],
    ],
    "refused": [[["../x", 1]], [["e000001-s000001", 2**40]], [["e000001-s000001", -1]], [["e000001-s000001"]]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in HOSTILE.items() for value in values])
def test_names_and_numbers_of_a_head_are_checked(key: str, value: Any) -> None:
    good = BucketHead("r", RUN_ID, RUN_ID, 1, (1,), WeightVersion(1, 1), ((1, 0),), (("e000001-s000001", "0" * 64),))
    assert BucketHead.from_json(good.to_json()) == good
    with pytest.raises(WeightsError):
        BucketHead.from_json(orjson.dumps(orjson.loads(good.to_json()) | {key: value}))


def test_a_head_that_is_none_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    for data in (b"", b"[]", b"{}", b"\xff", b"[" * 10_000, b"0" * (MAX_BYTES + 1)):
        bucket.upload(HEAD, data)
        for call in (run.upload, lambda: restore(bucket, tmp_path / "empty" / "r")):
            with pytest.raises(ConfigError):
                call()
    bucket.remove([HEAD])
    assert every(bucket) == []


def _manifest(bucket: Bucket, **changes: Any) -> None:
    """The newest checkpoint's, changed, as the head then names it."""
    name = head(bucket).checkpoints[-1][0]
    key = f"checkpoints/{name}/{MANIFEST}"
    data = orjson.dumps(orjson.loads(bucket.read(key, 2**20)) | changes)
    bucket.upload(key, data)
    _rename(bucket, name, data)


def _rename(bucket: Bucket, name: str, data: bytes) -> None:
    bucket.upload(HEAD, replace(head(bucket), checkpoints=((name, blake3.blake3(data).hexdigest()),)).to_json())


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [{"name": "../../../x", "size": 1, "blake3": "0" * 64}]},
        {"files": [{"name": "/tmp/x", "size": 1, "blake3": "0" * 64}]},
        {"files": [{"name": "params/x", "size": 2**60, "blake3": "0" * 64}]},
        {"files": [{"name": "state.json", "size": 1, "blake3": "0" * 64}]},
        {"files": [{"name": "manifest.json/x", "size": 1, "blake3": "0" * 64}]},
        {"files": [{"name": "params/x", "size": -1, "blake3": "0" * 64}]},
        {"run": "other"},
        {"version": "e000001-s000009"},
    ],
)
def test_names_and_sizes_of_a_manifest_are_checked(bucket: Bucket, tmp_path: Path, changes: dict[str, Any]) -> None:
    run = Run(tmp_path / "r", bucket)
    run.upload()
    _manifest(bucket, **changes)
    new = tmp_path / "new" / "r"
    with pytest.raises(WeightsError, match="none of the 1 checkpoints"):
        restore(bucket, new)
    assert not [path for path in tmp_path.rglob("x") if path.is_file()]
    assert head(bucket).folder == orjson.loads(run.folder.bucket.read_bytes())["folder"]


def test_lines_and_groups_of_another_content_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    run.step()
    run.upload()
    (piece,) = bucket.keys("lines")
    data = bucket.read(piece, 2**20)
    bucket.upload(piece, bytes(len(data)))
    with pytest.raises(WeightsError, match="is damaged"):
        restore(bucket, tmp_path / "new" / "r")
    bucket.upload(piece, data)
    bucket.upload("archive/e000001/s000001.zst", bytes(2**20 + 1))
    with pytest.raises(WeightsError, match="has 1048577 bytes"):
        restore(bucket, tmp_path / "new" / "r")
    bucket.remove(["archive/e000001/s000001.zst"])
    with pytest.raises(VolleyError):
        restore(bucket, tmp_path / "new" / "r")


def test_a_state_is_of_a_checkpoint_and_of_the_log(bucket: Bucket, tmp_path: Path) -> None:
    """What is restored is a folder that a trainer takes up: its checkpoint, then its records."""
    run = Run(tmp_path / "r", bucket)
    run.step(save=True)
    run.step()
    run.upload()
    new = RunFolder(tmp_path / "new" / "r")
    restore(bucket, new.path)
    found = CheckpointFolders(new.checkpoints, "r", 2, NumpyArrays()).newest()
    assert found is not None
    assert found.state.version == WeightVersion(1, 1)
    newest: TrainerState | None = commits.newest(new)
    assert newest == run.state
