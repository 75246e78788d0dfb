"""Data of environments is recorded by content, and an environment whose data have changed is not played."""

from __future__ import annotations

import json
import shutil
import sqlite3
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from services.env.catalogue import CatalogueEntry
from services.env.content import ContentRecord
from shared.errors import ConfigError
from tests.env.conftest import ROWS, OpenClient
from volley_environments import problem_files
from volley_environments.gsm8k.data import read_problems

MATH = [{"problem": "1+1", "answer": "2"}]
CODE = [{"question": "f", "tests": ["assert f(1) == 1"]}]
SQL = [{"question": "q", "sql": "SELECT a FROM t", "db_id": "db"}]
KINDS = {"gsm8k": ROWS[:2], "math": MATH, "code": CODE, "text_to_sql": SQL}


def written(path: Path, rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def database(folder: Path, value: int) -> Path:
    file = folder / "db" / "db.sqlite"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE t (a INTEGER)")
        connection.execute("INSERT INTO t VALUES (?)", (value,))
    connection.close()
    return folder


def files(folder: Path, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {part: written(folder / f"{part}.jsonl", KINDS[kind]) for part in ("train", "eval")}
    return found | ({"databases": database(folder, 1)} if kind == "text_to_sql" else {})


async def told(open_client: OpenClient, kind: str, config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    async with open_client(env=kind, configs={kind: config}, **changes) as client:
        rows = (await client.get("/environments")).json()["environments"]
        return next(row["data"] for row in rows if row["name"] == kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["train", "eval"])
async def test_a_file_that_was_replaced_is_refused_with_both_digests(
    open_client: OpenClient, tmp_path: Path, kind: str, part: str
) -> None:
    config = files(tmp_path / "a", kind)
    first = await told(open_client, kind, config)
    assert await told(open_client, kind, config) == first
    stat = config[part].stat()
    kept = config[part].read_bytes()
    config[part].write_bytes(kept.replace(b"1", b"3").replace(b"q", b"p"))
    assert config[part].stat().st_size == stat.st_size
    old = first["parts"][part]["digest"][:16]
    with pytest.raises(ConfigError, match=f"{kind}: {config[part]} has changed.*it was {old}") as refused:
        await told(open_client, kind, config)
    assert "restore the file" in refused.value.hint
    config[part].write_bytes(kept)
    assert await told(open_client, kind, config) == first


async def test_a_database_that_was_replaced_is_refused(open_client: OpenClient, tmp_path: Path) -> None:
    config = files(tmp_path / "a", "text_to_sql")
    assert "databases/db.sqlite" in (await told(open_client, "text_to_sql", config))["parts"]
    database(tmp_path / "a", 2)
    with pytest.raises(ConfigError, match=r"db\.sqlite has changed"):
        await told(open_client, "text_to_sql", config)


async def test_a_database_of_the_sql_tool_that_was_replaced_is_refused(open_client: OpenClient, tmp_path: Path) -> None:
    file = database(tmp_path / "a", 1) / "db/db.sqlite"
    config = {"tools": [{"sql": {"database": str(file)}}]}
    assert (await told(open_client, "frozen_lake", config))["parts"]["tools/database"]["source"] == str(file)
    database(tmp_path / "a", 2)
    with pytest.raises(ConfigError, match=r"frozen_lake: .*db\.sqlite has changed"):
        await told(open_client, "frozen_lake", config)


async def test_the_same_content_at_another_path_is_the_same_data(open_client: OpenClient, tmp_path: Path) -> None:
    first = await told(open_client, "text_to_sql", files(tmp_path / "a", "text_to_sql"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = {part: tmp_path / "b" / f"{part}.jsonl" for part in ("train", "eval")} | {"databases": tmp_path / "b"}
    again = await told(open_client, "text_to_sql", moved)
    assert again["digests"] == first["digests"]
    assert again["parts"]["train"]["source"] == str(tmp_path / "b/train.jsonl")


async def test_a_run_without_digests_goes_on_and_has_them_from_then_on(
    open_client: OpenClient, tmp_path: Path, gsm8k_files: dict[str, Path]
) -> None:
    await told(open_client, "gsm8k", gsm8k_files)
    (tmp_path / "environments/data.json").unlink()
    written(gsm8k_files["train"], ROWS)
    await told(open_client, "gsm8k", gsm8k_files)
    written(gsm8k_files["train"], ROWS[:1])
    with pytest.raises(ConfigError, match="has changed"):
        await told(open_client, "gsm8k", gsm8k_files)


async def test_the_version_of_a_package_that_makes_the_tasks_is_recorded(tmp_path: Path) -> None:
    entry = CatalogueEntry("reasoning_gym", "reasoning_gym", {}, None)  # type: ignore[arg-type]
    first = record_in(tmp_path)
    await first.ensure(entry)
    version = metadata.version("reasoning-gym")
    assert (first.of("reasoning_gym") or {})["parts"]["package"] == {"source": "reasoning-gym", "digest": version}
    kept = tmp_path / "environments/data.json"
    kept.write_text(kept.read_text(encoding="utf-8").replace(version, "0.0.1"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is installed, but the run began with 0\.0\.1 .*reasoning-gym==0\.0\.1"):
        await record_in(tmp_path).ensure(entry)


def record_in(folder: Path, **options: bool) -> ContentRecord:
    return ContentRecord(folder / "environments", folder / "environments/submitted", **options)


async def test_an_environment_that_joins_later_is_recorded_when_it_does(
    open_client: OpenClient, gsm8k_files: dict[str, Path]
) -> None:
    variant = {"name": "one", "base": "gsm8k", "config": {"max_turns": 2}}
    configs = {"gsm8k": gsm8k_files}
    async with open_client(configs=configs) as client:
        listed = {row["name"]: row["data"] for row in (await client.get("/environments")).json()["environments"]}
        assert listed["gsm8k"] is None
        assert (await client.post("/environments", json=variant)).status_code == 201
        episode = {"request_id": "r", "env": "math", "split": "train", "index": 0}
        assert (await client.post("/episodes", json=episode)).status_code == 422  # it has no files
        listed = {row["name"]: row["data"] for row in (await client.get("/environments")).json()["environments"]}
        assert set(listed["one"]["parts"]) == {"train", "eval"}
    written(gsm8k_files["eval"], ROWS[:1])
    with pytest.raises(ConfigError, match=r"one: .*has changed"):
        async with open_client(configs=configs):
            pass


async def test_a_built_in_environment_is_recorded_with_its_first_episode(
    open_client: OpenClient, gsm8k_files: dict[str, Path]
) -> None:
    """A running run may be given one that its configuration does not name."""
    episode = {"request_id": "r", "env": "gsm8k", "split": "train", "index": 0}
    async with open_client(configs={"gsm8k": gsm8k_files}) as client:
        assert (await client.post("/episodes", json=episode)).status_code == 201
    written(gsm8k_files["train"], ROWS)
    async with open_client(configs={"gsm8k": gsm8k_files}) as client:
        refused = await client.post("/episodes", json=episode)
    assert "has changed since the run began" in refused.json()["detail"]


async def test_the_files_of_a_submitted_version_are_recorded(tmp_path: Path) -> None:
    source = tmp_path / "environments/submitted/adder/1/source"
    source.mkdir(parents=True)
    (source / "env.py").write_text("a = 1", encoding="utf-8")
    entry = CatalogueEntry("adder@1", "python", {}, None)  # type: ignore[arg-type]
    await record_in(tmp_path).ensure(entry)
    (source / "__pycache__").mkdir()
    (source / "__pycache__/env.pyc").write_bytes(b"1")
    await record_in(tmp_path).ensure(entry)
    (source / "env.py").write_text("a = 2", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"adder@1: .*source has changed"):
        await record_in(tmp_path).ensure(entry)


async def test_changed_code_is_played_where_it_is_allowed_but_not_changed_data(
    tmp_path: Path, gsm8k_files: dict[str, Path]
) -> None:
    source = tmp_path / "environments/submitted/adder/1/source"
    source.mkdir(parents=True)
    code = CatalogueEntry("adder@1", "python", {}, None)  # type: ignore[arg-type]
    data = CatalogueEntry("gsm8k", "gsm8k", {"train": str(gsm8k_files["train"])}, None)  # type: ignore[arg-type]
    (source / "env.py").write_text("a = 1", encoding="utf-8")
    await record_in(tmp_path).ensure_all([code, data])
    recorded = (tmp_path / "environments/data.json").read_bytes()
    (source / "env.py").write_text("a = 2", encoding="utf-8")
    written(gsm8k_files["train"], ROWS)
    mended = record_in(tmp_path, allow_changed_code=True)
    await mended.ensure(code)
    with pytest.raises(ConfigError):
        await mended.ensure(data)
    assert (tmp_path / "environments/data.json").read_bytes() == recorded


@pytest.fixture
def _as_before():
    yield
    problem_files.expect({})
    problem_files._expected.clear()


@pytest.mark.usefixtures("_as_before")
def test_a_process_that_reads_later_than_the_service_reads_the_same(gsm8k_files: dict[str, Path]) -> None:
    problem_files.expect({str(gsm8k_files["train"]): "0" * 64})
    with pytest.raises(ConfigError, match=r"train\.jsonl has changed: its digest is .*, it was 0000000000000000"):
        read_problems(gsm8k_files["train"])
    assert len(read_problems(gsm8k_files["eval"])) == 1
