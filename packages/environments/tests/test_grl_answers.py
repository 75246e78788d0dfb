"""GSM8K and text-to-SQL with GRL's settings grade as GRL's environments did (tests/fixtures/grl/make_answers.py)."""

import json
import sqlite3
from pathlib import Path

import pytest

from services.env.episode_types import assistant
from tests.fixtures.grl import make_answers as grl
from volley_environments.gsm8k.environment import Gsm8k, Gsm8kConfig
from volley_environments.text_to_sql.environment import TextToSql, TextToSqlConfig

ANSWERS = json.loads((Path(grl.__file__).parent / "answers.json").read_text(encoding="utf-8"))


def graded(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "It is. #### 18"}), encoding="utf-8")
    config = Gsm8kConfig(train=path, extraction="flexible", correct_reward=10.0, wrong_reward=-0.1, attempts=5)
    result = Gsm8k(config).reset("train", 0, 0).step(assistant(text))
    return result.reward, result.info.success


def test_numbers_are_graded_as_by_grl(tmp_path):
    for text, reward, is_right in ANSWERS["numbers"]:
        assert graded(tmp_path, text) == (reward, is_right), text


def test_numbers_with_points_and_commas_are_read_whole_unlike_in_grl(tmp_path):
    assert {text: is_right for text, _, is_right in ANSWERS["other_numbers"]} == {
        "18.0": False,
        "1,018": True,
        "18, or 18,000": False,
    }
    assert [graded(tmp_path, text)[1] for text in ("18.0", "1,018", "18, or 18,000")] == [True, False, False]


def played(tmp_path, queries):
    (tmp_path / "shop").mkdir()
    with sqlite3.connect(tmp_path / "shop" / "shop.sqlite") as connection:
        connection.executescript(grl.SCHEMA + grl.ROWS)
    path = tmp_path / "rows.jsonl"
    row = {"question": "Who?", "SQL": grl.GOLD, "db_id": "shop", "schema": grl.SCHEMA}
    path.write_text(json.dumps(row), encoding="utf-8")
    config = TextToSqlConfig(train=path, databases=tmp_path, max_turns=5, retry_factor=0.5, format_penalty=-0.1)
    episode = TextToSql(config).reset("train", 0, 0)
    results = [episode.step(assistant(f"```sql\n{query}\n```")) for query in queries]
    return [[query, result.reward, result.over] for query, result in zip(queries, results, strict=True)]


@pytest.mark.parametrize("steps", ANSWERS["queries"][:-1])
def test_queries_are_rewarded_as_by_grl(tmp_path, steps):
    assert played(tmp_path, [query for query, *_ in steps]) == steps


def test_rows_are_compared_as_sets_unlike_in_grl(tmp_path):
    assert ANSWERS["queries"][-1] == [[grl.REPEATED, 0.0, False]]
    assert played(tmp_path, [grl.REPEATED]) == [[grl.REPEATED, 1.0, True]]
