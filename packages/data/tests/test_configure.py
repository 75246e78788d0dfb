"""Runs on own data: what is chosen, the environment that comes of it, and mistakes before anything starts."""

from __future__ import annotations

import csv
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.files.rows import rows
from volley.layout import PROJECT, python_of
from volley_data import configure as configuring
from volley_data.configure import configure

WORDS = ["apple", "bread", "bridge", "candle", "chair", "cloud", "doctor", "dog", "engine", "farmer"]
REWARDS = """
def plain(completion, row):
    return float(row["a"] in completion)

def raises(completion, row):
    if row["a"] == "doctor":
        raise ValueError("seven")
    return 1.0

def nan(completion, row):
    return float("nan")

def text(completion, row):
    return "1"

def few(prompts, completions, **columns):
    return []

def trl(prompts, completions, a, **columns):
    return [float(a[0] in one) for one in completions]

async def waits(prompts, completions, **columns):
    return [1.0 for _ in completions]

def mutates(completion, row):
    row.clear()
    return 1.0

def prints(completion, row):
    print("hello")
    return {"short": 0.5, "right": 0.25}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)

def neither(x, y, z):
    return 1.0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configuring, "_FOLDER", tmp_path / "cache")
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    with (tmp_path / "words.csv").open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(["prompt", "a"])
        out.writerows([f"Say {word}, {i}.", word] for i in range(4) for word in WORDS)
    return tmp_path


def made(reward: str = "rewards.py:plain", data: str = "words.csv", **given: Any) -> LoadedConfig:
    return configure(str(PROJECT / "configs/models/quickstart"), data, reward, **given)


def test_a_run_needs_a_model_data_and_a_reward(here: Path) -> None:
    loaded = made()
    config = loaded.config
    (source,) = config.data.sources.values()
    packed = zipfile.ZipFile(source.path)
    spec = orjson.loads(packed.read("volley_rows.json"))
    assert spec["splits"] == {"train": 36, "eval": 4}
    held_out = {orjson.loads(line)["columns"]["prompt"] for line in packed.read("rows_eval.jsonl").splitlines()}
    learnt = {orjson.loads(line)["columns"]["prompt"] for line in packed.read("rows_train.jsonl").splitlines()}
    assert not held_out & learnt
    assert (config.run.name, config.orchestrator.max_turns, config.data.n_eval_tasks) == ("words", 1, 4)
    assert "rollout.engine.context_length" in loaded.choices
    assert made().config.data.env == config.data.env
    assert made(overrides=["trainer.max_steps=3"]).config.trainer.max_steps == 3


@pytest.mark.parametrize("name", ["plain", "trl", "waits", "mutates", "prints"])
def test_rewards_of_every_kind_are_accepted(here: Path, name: str) -> None:
    assert made(f"rewards.py:{name}").config.data.env.startswith("words-")


def test_a_changed_reward_is_another_environment(here: Path) -> None:
    before = made().config.data.env
    (here / "rewards.py").write_text(REWARDS.replace("float(row", "0.5 + float(row"), encoding="utf-8")
    assert made().config.data.env != before


def test_verls_signature_takes_its_columns(here: Path) -> None:
    assert made("rewards.py:compute_score", columns={"ground_truth": "a"}).config.data.env.startswith("words-")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("rewards.py:raises", r"raises of rewards\.py raised ValueError: seven \(line \d+\), on words\.csv, line 8 "),
        ("rewards.py:nan", "returned nan; it must return a finite number, on words.csv, line "),
        ("rewards.py:text", "returned the text '1'; it must return a number"),
        ("rewards.py:few", "returned 0 values for 1 answer"),
        ("rewards.py:compute_score", "takes ground_truth, which is no column of the data; they have prompt, a"),
        ("rewards.py:neither", r"neither\(x, y, z\) of .*rewards\.py has no signature of a reward"),
        ("rewards.py:plane", "rewards.py has no function plane"),
        ("missing.py", "missing.py does not exist"),
        ("rewards.py:plain=much", "much is no weight"),
    ],
)
def test_a_wrong_reward_is_named(here: Path, reward: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(reward)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "data.jsonl is empty"),
        ('{"x": 1}\n', "line 1 has none of the columns prompt, messages, question; it has x"),
        ('{"prompt": "p"}\n', "data.jsonl has 1 different prompt: a share of 0.1 leaves none to train on"),
        (
            '{"prompt": "p", "n": 1}\n{"prompt": "q", "n": "x"}\n',
            "column n is a number on data.jsonl, line 1, and text",
        ),
        ('["p"]\n', "record 1 is text, not an object"),
        ('{"prompt": ""}\n', "prompt is empty"),
        ('{"messages": [{"role": "usr", "content": "x"}]}\n', "has the message"),
    ],
)
def test_wrong_data_are_named(here: Path, content: str, said: str) -> None:
    (here / "data.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        made(data="data.jsonl")


def test_data_that_are_not_there_are_named(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.csv: there is no such file or folder"):
        made(data="nothing.csv")
    with pytest.raises(ConfigError, match="both choose the held-out tasks"):
        made(eval_data="words.csv", eval_share=0.1)


def test_held_out_data_of_a_file_are_left_out_of_training(here: Path) -> None:
    lines = [{"prompt": "Say apple, 0.", "a": "apple"}, {"prompt": "other", "a": "x"}]
    (here / "eval.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    loaded = made(eval_data="eval.jsonl")
    assert loaded.config.data.n_eval_tasks == 2
    assert any("left out, because their prompts are held out" in note for note in loaded.notes)


def test_parquet_and_arrow_are_read_as_pyarrow_wrote_them(tmp_path: Path) -> None:
    program = (
        "import pyarrow as pa, pyarrow.parquet as pq, sys\n"
        "t = pa.table({'prompt': ['p', 'q'], 'n': [1, 2], 'l': [[1], []]})\n"
        "pq.write_table(t, sys.argv[1] + '/t.parquet')\n"
        "with pa.OSFile(sys.argv[1] + '/t.arrow', 'wb') as f, pa.ipc.new_file(f, t.schema) as w: w.write_table(t)\n"
    )
    subprocess.run([str(python_of("trainer")), "-c", program, str(tmp_path)], check=True)
    wanted = [{"prompt": "p", "n": 1, "l": [1]}, {"prompt": "q", "n": 2, "l": []}]
    for name in ("t.parquet", "t.arrow"):
        assert [row for _, row in rows(tmp_path / name)] == wanted
