"""The SQL tool's library, without its processes: what it can reach, and what it says."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InputError
from volley_sandbox.tools import sql_library
from volley_sandbox.tools.settings import SqlSettings


def run(query: str, script: str = "", *, writable: bool = True, max_rows: int = 10) -> dict[str, Any]:
    return sql_library.run(json.dumps({"schema": script}), writable, max_rows, query)


def test_an_empty_database_is_asked_and_filled() -> None:
    asked = run("SELECT count(*) AS n FROM sqlite_master")
    assert asked == {"shown": "n\n0\n(1 row)", "problem": "", "image": None}
    image = run("CREATE TABLE t(a)")["image"]
    assert sql_library.run(json.dumps({"image": image}), True, 10, "SELECT * FROM t")["shown"] == "a\n(0 rows)"


def test_a_transaction_that_cannot_be_kept_is_told() -> None:
    script = "PRAGMA foreign_keys = ON; CREATE TABLE p(a PRIMARY KEY);"
    script += "CREATE TABLE c(a REFERENCES p(a) DEFERRABLE INITIALLY DEFERRED)"
    assert "cannot be kept: FOREIGN KEY" in run("BEGIN; INSERT INTO c VALUES (1)", script)["problem"]


def test_any_name_of_a_file_is_only_read(tmp_path: Path) -> None:
    file = tmp_path / "a?b%20c#.db"
    with closing(sqlite3.connect(file)) as made:
        made.execute("CREATE TABLE t(a)")
    source = json.dumps({"file": str(file)})
    sql_library.prepare(source, False, 10)
    assert sql_library.run(source, False, 10, "SELECT * FROM t")["shown"] == "a\n(0 rows)"
    with pytest.raises(InputError, match="cannot be opened"):
        sql_library.prepare(json.dumps({"file": str(tmp_path / "none?.db")}), False, 10)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert SqlSettings(database=Path("x.db")).database == Path.cwd() / "x.db"


def test_bytes_that_are_no_text_are_shown_in_every_database() -> None:
    image = run("CREATE TABLE t(a); INSERT INTO t VALUES (CAST(x'ff41' AS TEXT))")["image"]
    assert "\ufffdA" in sql_library.run(json.dumps({"image": image}), True, 10, "SELECT a FROM t")["shown"]


def test_the_clock_stands_still_and_chance_is_refused() -> None:
    fixed = "2000-01-01 00:00:00"
    query = "SELECT datetime('now'), datetime(), CURRENT_TIMESTAMP, strftime('%Y'), date('2024-02-28', '+2 days')"
    for writable in (True, False):
        shown = run(f"{query} AS x", writable=writable)["shown"]
        assert shown.splitlines()[1] == f"{fixed} | {fixed} | {fixed} | 2000 | 2024-03-01"
        for chance in ("random()", "hex(randomblob(4))"):
            assert "random" in run(f"SELECT {chance}", writable=writable)["problem"]
    made = run("SELECT a FROM t", "CREATE TABLE t(a DEFAULT CURRENT_TIMESTAMP); INSERT INTO t DEFAULT VALUES")
    assert made["shown"] == f"a\n{fixed}\n(1 row)"


def test_what_is_cut_is_told_with_a_true_number() -> None:
    shown = run("SELECT replace(hex(zeroblob(2500)), '0', 'é') AS a")["shown"]
    assert shown.splitlines()[1].endswith("é[… the first 2000 of 5000 characters]")
    many = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100) "
    shown = run(f"{many} SELECT replace(hex(zeroblob(900)), '0', '😀') FROM c", max_rows=100)["shown"]
    assert len(json.dumps(shown)) < sql_library.MAX_SHOWN_BYTES + 200
    head, _, told = shown.rpartition("\n")
    assert f"only the first {len(head)} of " in told


@pytest.mark.parametrize("way", ["ATTACH '{}' AS s; CREATE TABLE s.t(a)", "VACUUM INTO '{}'"])
def test_a_script_reaches_no_file(tmp_path: Path, way: str) -> None:
    file = tmp_path / "made.db"
    with pytest.raises(InputError, match=r"not authorized|authorization denied"):
        run("SELECT 1", way.format(file))
    assert not file.exists()


def test_a_script_is_bounded() -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    with pytest.raises(InputError, match="too many steps"):
        run("SELECT 1", endless)
    with pytest.raises(InputError, match="not authorized"):
        run("SELECT 1", "PRAGMA writable_schema = ON")


def test_whatever_ends_a_query_is_told() -> None:
    connection = sqlite3.connect(":memory:")
    assert sql_library.StepBound(connection).explain(MemoryError()) == "it takes too much memory"
