"""Text-to-SQL: who is right is who BIRD says is right, and a query can only read."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from services.env.episode_types import StepResult, assistant
from shared.errors import ConfigError, InputError
from volley_environments.text_to_sql.environment import TextToSql, TextToSqlConfig, read_query
from volley_environments.text_to_sql.samples import sample
from volley_sandbox.grading import sql_library

SCHEMA = """
CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT, n INTEGER);
INSERT INTO t VALUES (1, 'a', 3), (2, 'b', 5), (3, 'a', NULL), (4, 'c', 5);
"""
QUERIES = [
    "SELECT name FROM t",
    "SELECT DISTINCT name FROM t",
    "SELECT name FROM t ORDER BY id DESC",
    "SELECT name, n FROM t",
    "SELECT n, name FROM t",
    "SELECT n FROM t WHERE n = 5",
    "SELECT 5",
    "SELECT 5.0",
    "SELECT '5'",
    "SELECT n FROM t WHERE n > 5",
    "SELECT NULL WHERE 1 = 0",
    "SELECT NULL",
    "SELECT COUNT(*) FROM t",
    "SELECT COUNT(n) + 1 FROM t",
]


def source(schema: str = SCHEMA) -> str:
    return json.dumps({"schema": schema})


def bird(predicted: str, gold: str) -> bool:
    """BIRD's evaluation.py, execute_sql: two queries on one connection, and the sets of their rows."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    cursor = connection.cursor()
    predicted_res = cursor.execute(predicted).fetchall()
    ground_truth_res = cursor.execute(gold).fetchall()
    connection.close()
    return set(predicted_res) == set(ground_truth_res)


@pytest.mark.parametrize("gold", QUERIES)
def test_queries_agree_as_in_bird(gold: str) -> None:
    for query in QUERIES:
        assert sql_library.grade(source(), gold, query)["match"] == bird(query, gold), query


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def env(tmp_path: Path) -> TextToSql:
    rows = [{"question": "Which names?", "sql": "SELECT name FROM t", "schema": SCHEMA}]
    return TextToSql(TextToSqlConfig(train=write(tmp_path / "train.jsonl", rows), max_turns=3))


def answered(env: TextToSql, query: str) -> StepResult:
    return env.reset("train", 0, 0).step(assistant(f"```sql\n{query}\n```"))


HOSTILE = [
    "DELETE FROM t",
    "INSERT INTO t VALUES (9, 'x', 1)",
    "DROP TABLE t",
    "CREATE TABLE x (a)",
    "CREATE TEMP TABLE x (a)",
    "ATTACH DATABASE '{path}' AS x",
    "VACUUM INTO '{path}'",
    "PRAGMA query_only = OFF",
    "PRAGMA writable_schema = ON",
    "SELECT load_extension('{path}')",
    "SELECT writefile('{path}', 'x')",
    "SELECT readfile('/etc/passwd')",
    "SELECT * FROM pragma_database_list",
    "SELECT name FROM t; DROP TABLE t",
    "BEGIN",
    "EXPLAIN DELETE FROM t",
    "SELECT " + "(" * 500 + "1" + ")" * 500,
    "SELECT zeroblob(2000000000)",
    "SELECT hex(zeroblob(400000)) || a.id FROM t a, t b, t c, t d, t e, t f, t g, t h ORDER BY 1",
    "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT MAX(x) FROM r",
    "SELECT COUNT(*) FROM t a, t b, t c, t d, t e, t f, t g, t h, t i, t j, t k, t l, t m, t n, t o",
    "SELECT a.id FROM t a, t b, t c, t d, t e, t f, t g, t h",
    "SELECT '" + "x" * 19_990,
    "\0",
    "nonsense",
    "",
]


@pytest.mark.parametrize("query", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_query_costs_its_own_turn(env: TextToSql, tmp_path: Path, query: str) -> None:
    path = tmp_path / "pwned"
    result = answered(env, query.replace("{path}", str(path)))
    assert (result.reward, result.info.success, result.terminated) == (0.0, False, False)
    assert len(result.messages[0]["content"]) < 1000
    assert not path.exists()
    assert answered(env, "SELECT name FROM t").info.success


def test_a_turn_shows_what_the_query_gave_and_the_next_is_worth_less(env: TextToSql) -> None:
    episode = env.reset("train", 0, 0)
    results = [
        episode.step(assistant(text))
        for text in ("?", "```sql\nSELECT id FROM t;\n```", "<answer>SELECT DISTINCT name FROM t</answer>")
    ]
    assert [result.info.error for result in results] == ["format", None, None]
    assert results[1].messages[0]["content"] == ("The query gives 4 rows, which are not those asked for:\n1\n2\n3\n4")
    assert (results[2].reward, results[2].terminated, results[2].messages) == (0.25, True, ())


def test_turns_run_out(env: TextToSql) -> None:
    episode = env.reset("train", 0, 0)
    results = [episode.step(assistant("```\nSELECT 1\n```")) for _ in range(3)]
    assert [(r.terminated, r.truncated) for r in results] == [(False, False), (False, False), (False, True)]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        ("```sql\nSELECT 1\n```\nno:\n```sql\nSELECT 2\n```", "SELECT 2"),
        ("```sql\nSELECT 1\n``` <answer>```sql\nSELECT 3\n```</answer>", "SELECT 3"),
        ("<answer> SELECT 4; </answer>", "SELECT 4"),
        ("```\nSELECT 5\n```", "SELECT 5"),
        ("SELECT 6", None),
        ("```sql\n```", None),
        ("<answer></answer>", None),
    ],
)
def test_where_the_query_stands(text: str, query: str | None) -> None:
    assert read_query(text) == query


def test_databases_as_bird_and_spider_keep_them(tmp_path: Path) -> None:
    folder = tmp_path / "databases" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as connection:
        connection.executescript(SCHEMA)
    connection.close()
    before = (folder / "shop.sqlite").read_bytes()
    rows = [
        {"question": "Names?", "SQL": "SELECT name FROM t", "db_id": "shop", "evidence": "a name is a letter"},
        {"question": "Names?", "query": "SELECT name FROM t", "db_id": "shop"},
    ]
    env = TextToSql(TextToSqlConfig(eval=write(tmp_path / "dev.jsonl", rows), databases=tmp_path / "databases"))
    for index in range(2):
        episode = env.reset("eval", index, 0)
        assert "CREATE TABLE t (id INTEGER PRIMARY KEY" in episode.opening[0]["content"]
        assert ("a name is a letter" in episode.opening[0]["content"]) == (index == 0)
        assert episode.step(env.demonstration("eval", index).messages[-1]).info.success
    assert not env.reset("eval", 0, 0).step(assistant("```sql\nDELETE FROM t\n```")).info.success
    assert (folder / "shop.sqlite").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["shop.sqlite"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, r"bad\.jsonl, line 1 is not a text-to-SQL task"),
        ({"question": "?", "sql": "SELECT 1", "db_id": "x"}, "set databases"),
        ([1], "not a text-to-SQL task"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextToSql(TextToSqlConfig(train=write(tmp_path / "bad.jsonl", [row]))).num_tasks("train")


def test_a_database_is_looked_for_in_its_folder_alone(tmp_path: Path) -> None:
    row = {"question": "?", "sql": "SELECT 1", "db_id": "../../etc"}
    with pytest.raises(ConfigError, match="there is no database"):
        TextToSql(TextToSqlConfig(train=write(tmp_path / "a.jsonl", [row]), databases=tmp_path)).num_tasks("train")


def test_a_gold_query_that_fails_is_not_graded_against(tmp_path: Path) -> None:
    row = {"question": "?", "sql": "SELECT missing", "schema": SCHEMA}
    env = TextToSql(TextToSqlConfig(train=write(tmp_path / "a.jsonl", [row])))
    with pytest.raises(InputError, match="gold query of a task fails: no such column"):
        answered(env, "SELECT 1")


def test_made_tasks_need_their_query() -> None:
    """The gold query of one task rarely answers another one; a constant never does."""
    tasks = [task for seed in range(300) if (task := sample(seed)) is not None]
    assert len(tasks) > 200
    assert len({task.question for task in tasks}) > 0.95 * len(tasks)
    dice, passed = random.Random(0), 0
    for task in tasks[:100]:
        database = task.database
        assert sql_library.grade(database, task.sql, task.sql)["match"]
        assert not sql_library.grade(database, task.sql, "SELECT 'x'")["match"]
        passed += sql_library.grade(database, task.sql, dice.choice(tasks).sql)["match"]
    assert passed < 10


def test_a_row_with_schema_and_database_is_played_in_the_database(tmp_path: Path) -> None:
    """As in the file that GRL reads: the schema is shown, and the rows are in the database."""
    folder = tmp_path / "shop"
    folder.mkdir()
    with sqlite3.connect(folder / "shop.sqlite") as connection:
        connection.executescript(SCHEMA)
    row = {"question": "How many?", "SQL": "SELECT COUNT(*) FROM t", "db_id": "shop", "schema": "CREATE TABLE t (id)"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    config = TextToSqlConfig(train=path, databases=tmp_path, system_prompt="S", prompt="P", max_turns=2)
    episode = TextToSql(config).reset("train", 0, 0)
    assert [message["content"] for message in episode.opening] == ["S", "P\nCREATE TABLE t (id)\n\nHow many?"]
    rewards = [episode.step(assistant(f"```sql\n{query}\n```")).reward for query in ("SELECT 0", "SELECT 4")]
    assert rewards == [0.0, 0.5]
