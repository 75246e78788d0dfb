"""Runs on own data: what is chosen, the environment that comes of it, and mistakes before anything starts."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

import volley
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.findings import findings
from shared.process.ports import hold_free
from volley.__main__ import parse_arguments
from volley.layout import PROJECT, python_of
from volley.printing import json_output
from volley.runs.record import claimed, stored
from volley_data import configure as configuring
from volley_data import sources
from volley_data.configure import configure, with_environment
from volley_data.data_files import rows
from volley_environments.gsm8k.data import read_problems

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

def misses(completion, row):
    return row["bb"]

def sleeps(completion, row):
    import time
    time.sleep(100 * (row["a"] == "dog"))
    return 1.0

def hangs_at_42(completions, **columns):
    import time
    if "42" in completions[0]:
        time.sleep(100)
    return [1.0 for _ in completions]

async def waits_long(prompts, completions, **columns):
    import asyncio
    await asyncio.sleep(100)

def exits(completion, row):
    raise SystemExit(3)

def huge(completion, row):
    return 10**400

def neither(x, y, z):
    return 1.0

def shortest(prompts, completions, **columns):
    return [float(len(one) == min(map(len, completions))) for one in completions]

def random_one(completions, **columns):
    import random
    return [random.random() for _ in completions]

def tokens(completions, completion_ids, **columns):
    return [1.0 for _ in completions]

def only_tokens(completion_ids):
    return [1.0 for _ in completion_ids]

def responds(prompts, responses):
    return [1.0 for _ in responses]

def misnames(completions, aa):
    return [1.0 for _ in completions]

def lacks(completions, answer):
    return [1.0 for _ in completions]

def no_tokens(completions, completion_ids=None, **columns):
    return [1.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where environments lie that have passed: each is tried once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configuring, "_FOLDER", cache)
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    with (tmp_path / "words.csv").open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(["prompt", "a"])
        out.writerows([f"Say {word}, {i}.", word] for i in range(2) for word in WORDS)
    return tmp_path


def made(reward: str | Sequence[str] = "rewards.py:plain", data: str = "words.csv", **given: Any) -> LoadedConfig:
    return configure(str(PROJECT / "configs/models/quickstart"), data, reward, **given)


def test_a_run_needs_a_model_data_and_a_reward(here: Path) -> None:
    loaded = made()
    config = loaded.config
    (source,) = config.data.sources.values()
    packed = zipfile.ZipFile(source.path)
    spec = orjson.loads(packed.read("volley_rows.json"))
    assert spec["splits"] == {"train": 18, "eval": 2}
    held_out = {orjson.loads(line)["columns"]["prompt"] for line in packed.read("rows_eval.jsonl").splitlines()}
    learnt = {orjson.loads(line)["columns"]["prompt"] for line in packed.read("rows_train.jsonl").splitlines()}
    assert not held_out & learnt
    assert (config.run.name, config.orchestrator.max_turns, config.data.n_eval_tasks) == ("words", 1, 2)
    assert "rollout.engine.context_length" in loaded.choices
    assert made().config.data.env == config.data.env
    assert made(overrides=["trainer.max_steps=3"]).config.trainer.max_steps == 3


def test_rewards_of_every_kind_are_accepted(here: Path) -> None:
    """Together: what one does to the row, or prints, is nothing to the others."""
    kinds = ("mutates", "prints", "plain", "trl", "waits", "random_one", "no_tokens")
    assert made([f"rewards.py:{name}" for name in kinds]).config.data.env.startswith("words-")


def test_a_changed_reward_is_another_environment(here: Path) -> None:
    before = made().config.data.env
    (here / "rewards.py").write_text(REWARDS.replace("float(row", "0.5 + float(row"), encoding="utf-8")
    assert made().config.data.env != before


def test_a_file_without_a_reward_is_named_with_its_functions(here: Path) -> None:
    (here / "lengths.py").write_text("def length(text):\n    return len(text)\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lengths\.py: length: no signature of a reward.*def length\(prompts"):
        made("lengths.py")


def test_verls_signature_takes_its_columns(here: Path) -> None:
    assert made("rewards.py:compute_score", columns={"ground_truth": "a"}).config.data.env.startswith("words-")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("rewards.py:raises", r"raises of rewards\.py raised ValueError: seven \(line \d+\), on words\.csv, line 8 "),
        ("rewards.py:nan", "returned nan; it must return a finite number, on words.csv, line "),
        ("rewards.py:text", "returned the text '1'; it must return a number"),
        ("rewards.py:misses", r"misses of rewards\.py raised KeyError: 'bb' \(line \d+\); the row has prompt, a"),
        ("rewards.py:few", "returned 0 values for 1 answer"),
        (
            "rewards.py:sleeps",
            r"sleeps of rewards\.py took longer than 4 s, on words\.csv, line \d+ with the made-up answer",
        ),
        (
            "rewards.py:waits_long",
            r"waits_long of rewards\.py took longer than 4 s, on words\.csv, line \d+ with the made-up answer",
        ),
        (
            "rewards.py:hangs_at_42",
            r"took longer than 4 s, on words\.csv, line \d+ with the made-up answer '<answer>42",
        ),
        ("rewards.py:exits", r"exits of rewards\.py raised SystemExit: 3 \(line \d+\), on words\.csv, line \d+ with"),
        (
            "rewards.py:huge",
            r"huge of rewards\.py returned inf; it must return a finite number, on words\.csv, line \d+ with",
        ),
        ("rewards.py:compute_score", "takes ground_truth, which is no column of the data; they have prompt, a"),
        ("rewards.py:neither", r"neither\(x, y, z\) of .*rewards\.py has no signature of a reward"),
        (
            "rewards.py:shortest",
            r"shortest of rewards\.py compares answers: it returned \[1\.0, 1\.0, 1\.0, 1\.0\] for",
        ),
        ("rewards.py:tokens", "needs completion_ids, which only TRL's trainer has"),
        ("rewards.py:only_tokens", "needs completion_ids, which only TRL's trainer has"),
        ("rewards.py:responds", r"takes responses, .* \(the model's answers are called completions; other arguments"),
        ("rewards.py:misnames", r"takes aa, .* \(name the column that holds it: --columns aa=a\)$"),
        ("rewards.py:lacks", r"takes answer, .* \(name the column that holds it: --columns answer=COLUMN\)$"),
        ("rewards.py:plane", "rewards.py has no function plane"),
        ("missing.py", "missing.py does not exist"),
        ("rewards.py:plain=much", "much is no weight"),
    ],
)
def test_a_wrong_reward_is_named(here: Path, reward: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(reward)


def test_a_reward_that_calls_a_server_is_told_that_there_is_no_network(here: Path) -> None:
    text = "import urllib.request\ndef f(completion, row):\n    urllib.request.urlopen('http://127.0.0.1:9/')\n"
    (here / "calls.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"raised URLError: .*\(rewards have no network: "):
        made("calls.py")


@pytest.mark.parametrize(
    "text",
    [
        "import absent.part\ndef f(completion, row):\n    return 1.0\n",
        "def f(completion, row):\n    import absent\n    return 1.0\n",
    ],
)
def test_a_package_that_a_reward_does_not_declare_is_named_as_it_is_declared(here: Path, text: str) -> None:
    (here / "needs.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="No module named 'absent'") as raised:
        made("needs.py")
    assert '`# /// script`, `# dependencies = ["absent"]`, `# ///`' in raised.value.hint


@pytest.mark.parametrize(
    ("rows", "given", "said"),
    [
        ([{"prompt": "p"}], {}, r"^data has 1 different prompt: .*hold out none: eval_share=0\)"),
        ([{"a": "p"}], {}, r'^row 0 of data has none of the columns .*columns=\{"prompt": "a"\}'),
        ([{"prompt": "p"}], {"eval_data": [{"prompt": "q"}, {"a": "r"}]}, "^row 1 of eval_data has none"),
        ([{"prompt": "p"}], {"eval_share": 3}, "^eval_share=3 is not a share"),
    ],
)
def test_mistakes_in_python_data_are_named_as_the_program_does(
    here: Path, rows: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        volley.train(PROJECT / "configs/models/quickstart", rows, "rewards.py:prints", **given)


def test_without_held_out_tasks_none_are_chosen(here: Path) -> None:
    assert "data.n_eval_tasks" not in made(eval_share=0).choices


@pytest.mark.parametrize(("steps", "every"), [(3, 3), (100, 10)])
def test_the_period_of_evaluations_is_not_longer_than_the_run(here: Path, steps: int, every: int) -> None:
    config = made(overrides=[f"trainer.max_steps={steps}"]).config
    assert config.orchestrator.eval_every_n_steps == every
    assert not [one for one in findings(config) if "eval_every" in one]


def test_a_table_without_rows_is_not_called_empty(here: Path) -> None:
    (here / "data.csv").write_text("prompt,answer\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.csv has no rows below its first line"):
        made(data="data.csv")


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


def test_a_column_that_a_row_lacks_is_none(here: Path) -> None:
    lines = [{"prompt": f"p{n}", **({"a": "x"} if n % 2 else {})} for n in range(4)]
    (here / "data.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    reward = "def some(completions, a, **columns):\n    return [float(a[0] in (None, 'x')) for _ in completions]\n"
    (here / "some.py").write_text(reward, encoding="utf-8")
    assert made("some.py", "data.jsonl").config.data.env.startswith("data-")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_tables_of_other_programs_are_read(here: Path, separator: str, encoding: str, end: str) -> None:
    text = end.join(separator.join(row) for row in (("prompt", "n"), ("Größe", "1"), ('"a, b; c"', "2")))
    for name in ("t.csv", *(["t.tsv"] if separator == "\t" else [])):
        (here / name).write_bytes(text.encode(encoding))
        assert [row for _, row in rows(here / name)] == [{"prompt": "Größe", "n": 1}, {"prompt": "a, b; c", "n": 2}]


def test_a_run_whose_data_has_changed_is_refused_by_its_files(here: Path) -> None:
    loaded = made(overrides=["model.initial_weights=random"])
    with claimed(loaded) as claim:
        claim.folder.ledger.write_text("{}\n", encoding="utf-8")
    with claimed(made(overrides=["model.initial_weights=random"])):
        pass
    (here / "words.csv").write_text("prompt,a\nSay apple.,apple\nSay dog.,dog\n", encoding="utf-8")
    (claim.folder.path.parent / "words-2").mkdir()
    expected = r"words\.csv, rewards\.py: the run began with other files.*add run\.name=words-3; `volley up .*/words`"
    with (
        pytest.raises(ConfigError, match=expected),
        claimed(made(overrides=["model.initial_weights=random"])),
    ):
        pass
    with claimed(stored(claim.folder.path)[0]) as claim:
        assert claim.record.config["data.env"] == loaded.config.data.env


def test_a_prompt_in_both_splits_is_trained_in_neither(here: Path) -> None:
    (here / "both").mkdir()
    for split, prompts in (("train", "aabc"), ("test", "aad")):
        (here / "both" / f"{split}.csv").write_text("\n".join(["prompt", *prompts]), encoding="utf-8")
    loaded = made("rewards.py:prints", "both")
    (source,) = loaded.config.data.sources.values()
    spec = orjson.loads(zipfile.ZipFile(source.path).read("volley_rows.json"))
    assert spec["splits"] == {"train": 2, "eval": 3}
    assert "2 rows of both are left out, because their prompts are held out" in loaded.notes


def test_data_that_are_not_there_are_named(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.csv: there is no such file or folder"):
        made(data="nothing.csv")
    with pytest.raises(ConfigError, match="both choose the held-out tasks"):
        made(eval_data="words.csv", eval_share=0.1)


def test_a_hub_that_does_not_answer_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_free("127.0.0.1") as held:
        port = held.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=rf"the hub does not give it: 127\.0\.0\.1:{port} does not answer"):
            made(data="openai/gsm8k:main")


def test_held_out_data_of_a_file_are_left_out_of_training(here: Path) -> None:
    lines = [{"prompt": "Say apple, 0.", "a": "apple"}, {"prompt": "other", "a": "x"}]
    (here / "eval.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    loaded = made(eval_data="eval.jsonl")
    assert loaded.config.data.n_eval_tasks == 2
    assert any("left out, because their prompts are held out" in note for note in loaded.notes)


def test_parquet_arrow_and_saved_folders_are_read(here: Path) -> None:
    program = (
        "import pyarrow as pa, pyarrow.parquet as pq, datasets, sys\n"
        "q = ['1 + 1?', '2 + 2?', '3 + 3?']; a = ['#### 2', '#### 4', '#### 6']\n"
        "t = pa.table({'question': q, 'answer': a, 'l': [[1], [], None]})\n"
        "pq.write_table(t, 't.parquet')\n"
        "with pa.OSFile('t.arrow', 'wb') as f, pa.ipc.new_file(f, t.schema) as w: w.write_table(t)\n"
        "d = datasets.Dataset(t); d.save_to_disk('one')\n"
        "datasets.DatasetDict({'train': d.select([0, 1]), 'test': d.select([2])}).save_to_disk('split')\n"
    )
    subprocess.run([str(python_of("trainer")), "-c", program], check=True, cwd=here)
    wanted = [
        {"question": f"{n} + {n}?", "answer": f"#### {2 * n}", "l": value} for n, value in enumerate(([1], [], None), 1)
    ]
    for name in ("t.parquet", "t.arrow"):
        assert [row for _, row in rows(here / name)] == wanted
    assert [one.answer for one in read_problems(here / "t.parquet")] == ["2", "4", "6"]
    whole, split = sources.find("one"), sources.find("split")
    assert [row for _, row in whole.of(whole.train)] == wanted
    assert (split.train, split.held_out) == ("train", "test")
    assert [row for _, row in split.of("test")] == wanted[2:]


TOOLS = """
class Book:
    def reset(self, a):
        self.n = 0
        return f"The book is of {a}."

    def look_up(self, name: str) -> int:
        \"\"\"Look up a number.

        Args:
            name: Whose
        \"\"\"
        self.n += 1
        return {"anna": 17}[name]

def counted(completions, environments, **columns):
    return [float(one.n == 1 and said[-1]["content"] == "17") for one, said in zip(environments, completions)]
"""


def _played(content: Path, *said: str) -> list[Any]:
    """Import the packed environment, and play its first task."""
    with zipfile.ZipFile(content) as archive:
        archive.extractall(content.parent / "unpacked")
    program = (
        "import asyncio, json, sys\nfrom volley_rows import OwnRows\n"
        "async def play():\n    one = OwnRows()\n    told = [await one.reset('train', 0, 0)]\n"
        "    for text in sys.argv[1:]:\n        told.append(await one.step(text))\n    print(json.dumps(told))\n"
        "asyncio.run(play())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *said], cwd=content.parent / "unpacked", check=True, capture_output=True
    )
    return orjson.loads(done.stdout)


def test_a_reward_that_fails_in_an_episode_names_the_row(here: Path) -> None:
    (here / "some.py").write_text(
        "def some(completion, row):\n    return 1 / (completion != 'bad')\n", encoding="utf-8"
    )
    (source,) = made("some.py").config.data.sources.values()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        _played(source.path, "bad")
    told = b"some of some.py raised ZeroDivisionError: division by zero (line 2), on words.csv, line "
    assert told in failed.value.stderr


def test_the_tools_of_a_class_are_called_over_several_turns(here: Path) -> None:
    (here / "tools.py").write_text(TOOLS, encoding="utf-8")
    loaded = made("tools.py:counted", tools="tools.py:Book", overrides=["orchestrator.max_turns=3"])
    content = Path(next(iter(loaded.config.data.sources.values())).path)
    call = '<tool_call>{"name": "look_up", "arguments": {"name": "anna"}}</tool_call>'
    opening, answered, last = _played(content, call, "17")
    assert [one["role"] for one in opening] == ["system", "user"]
    assert "- look_up(name): Look up a number." in opening[0]["content"]
    assert re.fullmatch(r"Say \w+, 0\.The book is of \w+\.", opening[1]["content"])
    assert answered[:2] == [[{"role": "tool", "name": "look_up", "content": "17"}], 0.0]
    assert last[1:4] == [1.0, True, False]
    wrong = [call.replace("anna", "ben"), call.replace("}}", "")]
    _, unknown, unreadable, cut = _played(content, *wrong, call)
    assert unknown[0][0]["content"] == "error: KeyError: 'ben'"
    assert unreadable[0][0]["content"] == "error: a tool call must be one JSON object with name and arguments"
    assert unreadable[4] == {"reward_components": {}, "error": "tool"}
    assert cut[1:4] == [0.0, False, True]


def test_a_model_that_writes_calls_otherwise_is_refused(here: Path) -> None:
    (here / "tools.py").write_text(TOOLS, encoding="utf-8")
    model = here / "model"
    shutil.copytree(PROJECT / "configs/models/agent", model)
    settings = model / "tokenizer_config.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("tool_call>", "call>"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"writes tool calls as '<call>.*; --tools reads <tool_call>"):
        configure(str(model), "words.csv", "tools.py:counted", tools="tools.py:Book")


def test_a_tool_without_a_description_is_named(here: Path) -> None:
    (here / "tools.py").write_text(TOOLS.replace("name: Whose", ""), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^tools\.py: the docstring of the tool look_up does not describe name"):
        made("tools.py:counted", tools="tools.py:Book")
    with pytest.raises(ConfigError, match=r"^tools\.py: the docstring of the tool look_up does not describe name"):
        made(tools="tools.py:Book")
    (here / "tools.py").write_text("import no_such_module\n" + TOOLS, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^tools\.py: ModuleNotFoundError.*line 1"):
        made(tools="tools.py:Book")


@pytest.mark.parametrize("command", [["plan"], ["config", "show"]])
def test_other_commands_take_the_same_options(
    here: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    model = str(PROJECT / "configs/models/quickstart")
    options = ["--data", "words.csv", "--reward", "rewards.py:plain", "trainer.max_steps=3"]
    parsed = parse_arguments([*command, "--json", model, *options])
    with json_output():
        parsed.command(parsed)
    found = orjson.loads(capsys.readouterr().out)
    if command == ["plan"]:
        assert "rollout.engine.context_length" in found["chosen"]
        return
    assert found["trainer.max_steps"] == {"value": 3, "source": "command line"}
    assert found["data.n_eval_tasks"] == {"value": 2, "source": "chosen: 2 tasks are held out"}
    assert found["model.path"]["source"] == found["data.env"]["source"] == "command line"


ENVIRONMENT = """
class Sums:
    splits = {"train": 40, "eval": 10}

    def reset(self, split, index, seed):
        return f"{index} + 1 ="

    def step(self, text):
        return 0.0
"""


@pytest.mark.parametrize("given", [["--env", "sums.py"], ["data.env=sums.py"]])
def test_a_model_and_an_environment_suffice(
    here: Path, capsys: pytest.CaptureFixture[str], given: Sequence[str]
) -> None:
    (here / "sums.py").write_text(ENVIRONMENT, encoding="utf-8")
    model = str(PROJECT / "configs/models/quickstart")
    parsed = parse_arguments(["config", "show", "--json", model, *given, "trainer.max_steps=3"])
    with json_output():
        parsed.command(parsed)
    found = orjson.loads(capsys.readouterr().out)
    assert found["run.name"] == {"value": "sums", "source": "chosen: the name of the environment"}
    assert found["data.env"]["value"].startswith("sums-")
    assert found["trainer.max_steps"]["source"] == found["data.env"]["source"] == "command line"
    context = found["rollout.engine.context_length"]["value"]
    assert found["grpo_config.max_response_length"]["value"] <= context // 2
    assert found["trainer.length_buckets"]["value"][-1] >= context


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "sums.py"], "no model is named"),
        (["m", "--env", "sums.py", "--data", "words.csv"], "--data and --env both"),
        (["m", "--env", "sums.py", "--reward", "r.py"], r"--reward goes with --data \(leave it out"),
        (["m", "n", "--env", "sums.py"], "2 models are named"),
        (["m", "--env", "absent.py"], "absent.py does not exist"),
        (["m", "--env", "sums.py", "data.env=x.py"], "--env and data.env both"),
        (["m", "model.path=n", "--env", "sums.py"], "2 models are named: m, n"),
        (["m", "--env", ""], "--env is empty"),
    ],
)
def test_mistakes_beside_an_environment_are_named(here: Path, arguments: Sequence[str], message: str) -> None:
    parsed = parse_arguments(["train", *arguments])
    with pytest.raises(ConfigError, match=message):
        parsed.command(parsed)


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ([], (2048, 256)),
        (["rollout.engine.context_length=64"], (64, 32)),
        (["grpo_config.max_response_length=100"], (2048, 100)),
        (["grpo_config.max_response_length=8"], (2048, 8)),
    ],
)
def test_chosen_lengths_fit_given_ones(here: Path, overrides: Sequence[str], lengths: tuple[int, int]) -> None:
    config = with_environment(str(PROJECT / "configs/models/quickstart"), "frozen_lake", overrides=overrides).config
    assert (config.rollout.engine.context_length, config.grpo_config.max_response_length) == lengths


def test_few_programs_of_agents_run_at_a_time(here: Path) -> None:
    model, agent = str(PROJECT / "configs/models/agent"), str(PROJECT / "examples/agents/openai_sdk.py")
    config = with_environment(model, agent).config
    n_programs = max(4 * (os.cpu_count() or 1), config.grpo_config.num_generations)
    assert config.orchestrator.max_concurrent_episodes == n_programs
    given = with_environment(model, agent, overrides=["orchestrator.max_concurrent_episodes=3"]).config
    assert given.orchestrator.max_concurrent_episodes == 3


def test_a_path_is_no_yaml_and_a_file_may_name_the_model(here: Path) -> None:
    folder = here / "one #2: x"
    folder.mkdir()
    (folder / "sums.py").write_text(ENVIRONMENT, encoding="utf-8")
    loaded = with_environment(None, f"{folder}/sums.py", config=[PROJECT / "configs/quickstart.yaml"])
    assert loaded.config.model.path.endswith("configs/models/quickstart")
    assert loaded.config.data.env.startswith("sums-")
