"""Versions out of a bucket, over a server of S3's protocol: which are taken, and which never."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.rollout.weights.updater import WeightUpdater
from shared.errors import Conflict, Forbidden, NotFound, Unavailable, VolleyError, WeightsError
from shared.models.config import ModelConfig
from shared.run.checkpoint_files import MANIFEST, Adapter, Probe
from tests.rollout.server import running_server
from tests.support import models
from tests.support.bucket import own_prefix, s3_server
from tests.support.engine import FakeEngine
from volley_bucket import objects as buckets
from volley_bucket.objects import Bucket
from volley_bucket.versions import CheckpointBucket

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8)
MODEL = ModelConfig.parse(CONFIG)
V0, V1, V2 = (f"e000001-s00000{step}" for step in range(3))
PROBE = Probe((1, 2, 3), (-0.5, -1.5))


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoints."""
    root = tmp_path_factory.mktemp("made")
    for seed, version in enumerate((V0, V1, V2)):
        models.write_checkpoint(root, version, CONFIG, models.random_weights(CONFIG, seed), probe=PROBE)
    return root


@pytest.fixture
def bucket(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return own_prefix(server, tmp_path, monkeypatch)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def updates(engine: FakeEngine, bucket: Bucket, tmp_path: Path) -> WeightUpdater:
    (tmp_path / "run").mkdir()
    return WeightUpdater(engine, tmp_path / "run", MODEL, "test", bucket=_of(bucket.address, tmp_path))


def publish(bucket: Bucket, made: Path, version: str = V1) -> str:
    """The address of a version in the bucket."""
    put(bucket, made, made / version)
    return f"{bucket.address}/checkpoints/{version}"


def put(bucket: Bucket, root: Path, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.upload(f"checkpoints/{path.relative_to(root)}", path)


def copies(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "pulled").glob("*"))


async def test_a_version_serves_out_of_a_bucket(
    updates: WeightUpdater, bucket: Bucket, engine: FakeEngine, made: Path, tmp_path: Path
) -> None:
    address = publish(bucket, made)
    staged, result = await updates.update(address, None)
    assert (updates.current, result.version, engine.loaded) == (V1, V1, [V1])
    n_bytes = sum(p.stat().st_size for p in (made / V1 / "params").rglob("*") if p.is_file())
    assert staged.timings["pulled_bytes"] == n_bytes == sum(engine.n_read.values())
    assert copies(tmp_path) == []


@pytest.mark.long
def test_a_real_server_computes_with_the_weights_of_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    config = models.tiny_config()
    with running_server(tmp_path / "server", config, f"run.bucket={bucket.address}") as server:
        version = server.new_version()
        put(bucket, server.root / "made", server.publish(version, 5, "made"))
        answer = server.post("/update_weights", {"manifest": f"{bucket.address}/checkpoints/{version}"})
        assert (answer["version"], answer["previous"]) == (version, "e000001-s000000")
        assert server.error([5, 6, 7, 8], server.generate([5, 6, 7, 8])) < 1e-3
        assert list(tmp_path.glob("server/test/pulled/*.bucket/*")) == []


async def test_what_serves_is_not_copied_again(
    updates: WeightUpdater, bucket: Bucket, made: Path, tmp_path: Path
) -> None:
    """By whichever of its names; and the same version in a folder is the same version."""
    shutil.copytree(made / V1, tmp_path / "run" / V1)
    address = publish(bucket, made)
    first, _ = await updates.update(address, None)
    assert await updates.stage(f"{address}/") is await updates.stage(f"{address}/{MANIFEST}") is first
    assert await updates.stage(str(tmp_path / "run" / V1)) is first


async def test_adapters_bring_their_base(
    updates: WeightUpdater, bucket: Bucket, engine: FakeEngine, tmp_path: Path
) -> None:
    base = models.write_base(tmp_path, CONFIG, models.random_weights(CONFIG, 0))
    models.write_adapter(tmp_path, V1, CONFIG, models.random_adapter(CONFIG, 1), Adapter(2, 4.0, base))
    put(bucket, tmp_path, base.folder(tmp_path))
    staged, _ = await updates.update(publish(bucket, tmp_path), None)
    assert (updates.current, staged.base) == (V1, base.digest)


async def test_an_object_of_several_parts_is_copied_whole(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(data := bytes(range(256)) * 999)
    bucket.upload("checkpoints/a b/é", tmp_path / "a")
    monkeypatch.setattr(buckets, "PART_BYTES", 10_007)
    bucket.download("checkpoints/a b/é", tmp_path / "b", len(data))
    assert (tmp_path / "b").read_bytes() == data


def truncated(bucket: Bucket, root: Path) -> None:
    (key, path) = _largest(root)
    bucket.upload(key, path.read_bytes()[:-1])


def flipped(bucket: Bucket, root: Path) -> None:
    (key, path) = _largest(root)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    bucket.upload(key, bytes(data))


def removed(bucket: Bucket, root: Path) -> None:
    bucket.remove([_largest(root)[0]])


def without_manifest(bucket: Bucket, root: Path) -> None:
    bucket.remove([f"checkpoints/{V1}/{MANIFEST}"])


def of_another_run(bucket: Bucket, root: Path) -> None:
    _changed(bucket, root, run="another")


def of_another_version(bucket: Bucket, root: Path) -> None:
    _changed(bucket, root, version=V2)


def of_another_model(bucket: Bucket, root: Path) -> None:
    _changed(bucket, root, model=CONFIG | {"hidden_size": 16})


def too_large(bucket: Bucket, root: Path) -> None:
    manifest = json.loads((root / V1 / MANIFEST).read_text(encoding="utf-8"))
    _changed(bucket, root, files=[file | {"size": 2**40} for file in manifest["files"]])


def leading_elsewhere(bucket: Bucket, root: Path) -> None:
    manifest = json.loads((root / V1 / MANIFEST).read_text(encoding="utf-8"))
    _changed(bucket, root, files=[file | {"name": "../../../there"} for file in manifest["files"]])


def with_files_below_a_file(bucket: Bucket, root: Path) -> None:
    manifest = json.loads((root / V1 / MANIFEST).read_text(encoding="utf-8"))
    below = {**manifest["files"][0], "name": f"{manifest['files'][0]['name']}/x"}
    _changed(bucket, root, files=[*manifest["files"], below])


def no_manifest_at_all(bucket: Bucket, root: Path) -> None:
    bucket.upload(f"checkpoints/{V1}/{MANIFEST}", b"<html>")


def _largest(root: Path) -> tuple[str, Path]:
    path = max((p for p in (root / V1 / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    return f"checkpoints/{path.relative_to(root)}", path


def _changed(bucket: Bucket, root: Path, **changes: object) -> None:
    manifest = json.loads((root / V1 / MANIFEST).read_text(encoding="utf-8"))
    bucket.upload(f"checkpoints/{V1}/{MANIFEST}", json.dumps(manifest | changes).encode())


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (truncated, WeightsError, r"has \d+ bytes, expected \d+"),
        (flipped, WeightsError, "digest of params/.* differs"),
        (removed, NotFound, "params/.* does not exist"),
        (without_manifest, NotFound, "manifest.json does not exist"),
        (of_another_run, WeightsError, "belongs to run 'another'"),
        (of_another_version, WeightsError, f"{V1} holds the manifest of {V2}"),
        (of_another_model, WeightsError, "hidden_size is 16"),
        (too_large, WeightsError, "this server's model has"),
        (leading_elsewhere, WeightsError, "names a file"),
        (with_files_below_a_file, WeightsError, "a folder of others"),
        (no_manifest_at_all, WeightsError, "manifest is malformed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_what_is_not_the_version_is_named_and_never_serves(
    updates: WeightUpdater,
    bucket: Bucket,
    engine: FakeEngine,
    made: Path,
    tmp_path: Path,
    damage: Callable[[Bucket, Path], None],
    error: type[VolleyError],
    says: str,
) -> None:
    await updates.update(publish(bucket, made, V0), None)
    address = publish(bucket, made)
    damage(bucket, made)
    with pytest.raises(error, match=says):
        await updates.update(address, None)
    assert (updates.current, engine.loaded) == (V0, [V0])
    assert copies(tmp_path) == []


async def test_a_version_that_is_replaced_while_it_is_loaded_never_serves(
    updates: WeightUpdater, bucket: Bucket, engine: FakeEngine, made: Path
) -> None:
    address = publish(bucket, made)
    engine.on_read = lambda: _changed(bucket, made, created=1.0)
    with pytest.raises(WeightsError, match="changed while it was loaded"):
        await updates.update(address, None)
    assert updates.current is None


async def test_a_server_never_goes_back(updates: WeightUpdater, bucket: Bucket, made: Path) -> None:
    older, newer = (publish(bucket, made, version) for version in (V1, V2))
    await updates.update(newer, None)
    with pytest.raises(Conflict, match=f"{V1} is older than {V2}"):
        await updates.update(older, None)


@pytest.mark.parametrize(
    "address",
    [
        "s3://other/test/checkpoints/V",
        "s3://volley/test2/V",
        "gs://volley/test/V",
        "s3://volley/test",
        "s3://volley/test/../other/V",
        "s3://volley/test//V",
    ],
)
async def test_only_the_runs_bucket_is_asked(engine: FakeEngine, tmp_path: Path, address: str) -> None:
    updates = WeightUpdater(engine, tmp_path, MODEL, "test", bucket=_of("s3://volley/test", tmp_path))
    with pytest.raises(Forbidden, match="is not in s3://volley/test"):
        await updates.update(address, None)


def _of(address: str, folder: Path) -> CheckpointBucket:
    return CheckpointBucket(address, folder / "pulled")


async def test_without_a_bucket_there_is_none(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(Forbidden, match="this run has no bucket"):
        await WeightUpdater(engine, tmp_path, MODEL, "test").update(f"s3://volley/{V1}", None)


def test_a_bucket_that_is_not_there_is_named(bucket: Bucket) -> None:
    with pytest.raises(NotFound, match="there is no such bucket"):
        Bucket("s3://nowhere/runs").read("a", 10)


def test_an_object_that_is_too_large_is_not_read(bucket: Bucket) -> None:
    bucket.upload("checkpoints/a", b"first")
    assert bucket.read("checkpoints/a", 5) == b"first"
    with pytest.raises(WeightsError, match="has 5 bytes, more than 4"):
        bucket.read("checkpoints/a", 4)


def test_without_credentials_the_reason_is_told_without_them(
    bucket: Bucket, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(Forbidden, match="no credentials") as caught:
        bucket.read("checkpoints/a", 10)
    assert server["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_a_bucket_that_does_not_answer_is_asked_again_later(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_N_RETRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(Unavailable, match="cannot be reached now"):
        bucket.read("checkpoints/a", 10)


def test_copies_that_a_killed_server_left_are_gone_at_the_next_start(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "pulled" / "x" / V1).mkdir(parents=True)
    CheckpointBucket(bucket.address, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
