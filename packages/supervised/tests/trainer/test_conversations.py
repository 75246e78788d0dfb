"""Data files: which formats are read, what becomes of them as tokens, and what a bad one is told."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.errors import ConfigError, InputError
from shared.models.chat import ChatTokenizer
from shared.run import checkpoint_files
from volley_data.data_files import MAX_LINE_BYTES
from volley_supervised.conversations.data import DataSettings, load
from volley_supervised.conversations.dataset import batches, digest, n_steps, split, tokenized
from volley_supervised.conversations.files import files_of, records
from volley_supervised.conversations.formats import conversation, preference_pair

TINY = Path(__file__).parents[4] / "configs/models/tiny"
TOKENIZER = ChatTokenizer(TINY)
USER, SAID = {"role": "user", "content": "go"}, {"role": "assistant", "content": "Right"}
TALK = [USER, SAID, {"role": "user", "content": "ok"}, {"role": "assistant", "content": "Up"}]
CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}, "id": "1", "type": "function"}
HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first else '' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def written(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def learned(record: Any, tokenizer: ChatTokenizer = TOKENIZER, kind: Any = "conversations") -> list[str]:
    """The text that each of its sequences learns."""
    (example,) = tokenized(tokenizer, [("here", record)], kind, 400, "error").examples
    return [tokenizer.decode([int(t) for t, m in zip(one.ids, one.mask, strict=True) if m]) for one in example]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": TALK, "source": "somewhere"}, "Right<|im_end|>Up<|im_end|>"),
        ({"messages": [*TALK, USER]}, "Right<|im_end|>Up<|im_end|>"),
        ({"messages": [USER, SAID | {"train": False}, *TALK[2:]]}, "Up<|im_end|>"),
        ({"messages": [USER, SAID | {"weight": 0}, *TALK[2:]]}, "Up<|im_end|>"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}]}, "Yes<|im_end|>"),
        ({"prompt": "go", "completion": "Right"}, "Right<|im_end|>"),
        ({"prompt": TALK[:3], "completion": TALK[3:], "messages": None}, "Up<|im_end|>"),
    ],
)
def test_what_the_assistant_says_is_learned_and_nothing_else(record: Any, text: str):
    assert learned(record) == [text]


def test_a_prompt_and_its_completion_are_the_tokens_of_their_messages():
    """And of a rollout: the prompt is rendered, what the assistant says is appended."""
    one = tokenized(TOKENIZER, [("here", {"prompt": "go", "completion": "Right"})], "conversations", 64, "error")
    other = tokenized(TOKENIZER, [("here", {"messages": TALK[:2]})], "conversations", 64, "error")
    prompt = TOKENIZER.render_prompt(TALK[:1])
    assert one.examples[0][0].ids.tolist() == [*prompt, *TOKENIZER.encode("Right"), TOKENIZER.eos_id]
    assert digest([one.examples]) == digest([other.examples])


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("hermes") / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": HERMES}), encoding="utf-8")
    return ChatTokenizer(folder)


def test_calls_are_learned_as_the_chat_template_writes_them(hermes: ChatTokenizer):
    tokenizer = hermes
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    answer = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, answer, SAID]
    assert learned({"messages": talk}, tokenizer) == [f"{call}<|im_end|>Right<|im_end|>"]
    said = {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL]}
    assert learned({"messages": [USER, said]}, tokenizer) == [f"so\n{call}\n{call}<|im_end|>"]
    whole = tokenizer.render_prompt(conversation({"messages": talk}).messages[:3])
    (example,) = tokenized(tokenizer, [("here", {"messages": talk})], "conversations", 400, "error").examples
    assert example[0].ids[: len(whole)].tolist() == whole


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "go", "chosen": "Right", "rejected": "Up"},
        {"prompt": [USER], "chosen": [SAID], "rejected": [SAID | {"content": "Up"}]},
        {"chosen": TALK[:2], "rejected": [USER, SAID | {"content": "Up"}]},
    ],
)
def test_pairs_share_a_prompt_that_is_not_learned(record: Any):
    assert learned(record, kind="pairs") == ["Right<|im_end|>", "Up<|im_end|>"]


FLAGGED = ("train", "training", "trainable", "train_on_turn", "loss", "loss_mask", "loss_weight", "weight")


@pytest.mark.parametrize("flag", FLAGGED)
@pytest.mark.parametrize("value", [False, 0, 0.0, "false", "False", "0", Decimal(0), True, 1, 1.0, "true", "1", None])
def test_a_flag_of_another_program_means_what_train_means(flag: str, value: Any):
    is_learned = value in (True, "true", "1", None)
    texts = learned({"messages": [USER, SAID | {flag: value}, *TALK[2:]]})
    assert texts == ["Right<|im_end|>Up<|im_end|>" if is_learned else "Up<|im_end|>"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (SAID | {"weight": 0.5}, "message 1: weight is 0.5"),
        (SAID | {"train": "no"}, "message 1: train is 'no'"),
        (SAID | {"loss_mask": [0, 1]}, r"loss_mask is \[0, 1\]"),
        (SAID | {"train": 2}, "train is 2"),
        (SAID | {"weight": float("nan")}, "weight is nan"),
        (SAID | {"train": True, "weight": 0}, "contradict each other: train: True, weight: 0"),
        (SAID | {"loss": 0, "trainable": True}, "contradict"),
        (SAID | {"mask": 1}, "flag mask, whose meaning differs"),
        (SAID | {"content": [{"type": "text", "text": "a", "train": False}]}, "a part with train"),
    ],
)
def test_a_flag_that_is_unclear_or_contradicts_another_is_refused(message: Any, why: str):
    with pytest.raises(InputError, match=why):
        conversation({"messages": [USER, message, *TALK[2:]]})
    with pytest.raises(InputError, match="message 0 is the user's and has train: True"):
        conversation({"messages": [USER | {"train": True}, SAID]})


SYSTEM, ASKED = {"role": "system", "content": "s"}, "Which way is it?"
UP = {"role": "assistant", "content": "Up"}


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("go", [USER]),
        ([USER], [USER]),
        (" go\n", [USER]),
        ([SYSTEM, USER], [SYSTEM, USER]),
        ([SYSTEM, USER], [USER]),
        ("go", [SYSTEM, USER]),
        (TALK[:3], TALK[:3]),
        ("ok", TALK[:3]),
        (None, [USER]),
    ],
)
def test_a_prompt_that_the_answers_repeat_is_rendered_once(prompt: Any, before: list[Any]):
    """Whichever of the two holds it; as TRL's `maybe_extract_prompt` reads a text prompt beside whole conversations."""
    pair = preference_pair({"prompt": prompt, "chosen": [*before, SAID], "rejected": [*before, UP]})
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    wanted = max(given, before, key=len)
    for side, said in ((pair.chosen, SAID), (pair.rejected, UP)):
        assert [one["content"].strip() for one in side.messages] == [one["content"].strip() for one in [*wanted, said]]
        assert side.learned == [False] * len(wanted) + [True]
    assert pair.chosen.repeats_prompt is (prompt is not None)
    if prompt is not None:
        alone = conversation({"prompt": prompt, "completion": [*before, SAID]})
        assert (alone.messages, alone.learned) == (pair.chosen.messages, pair.chosen.learned)


@pytest.mark.parametrize(
    ("prompt", "completion", "said"),
    [
        (ASKED, f"{ASKED} Up", "Up"),
        (ASKED, f"\n{ASKED}\nUp ", "Up "),
        ("Q: which way?\nA:", "Q: which way?\nA: Up", "Up"),
        ([SYSTEM, {"role": "user", "content": ASKED}], f"{ASKED} Up", "Up"),
        ("which way is it", "which way is it: Up", ": Up"),
        ("天空是什么颜色？", "天空是什么颜色？蓝色", "蓝色"),
        ("go", "going", None),  # by chance
        ("Hi", "Hi there", None),
        ("which way is it", "which way is italics", None),
    ],
)
def test_text_that_begins_with_the_prompt_stays_unless_both_answers_of_a_pair_do(
    prompt: Any, completion: str, said: str | None
):
    """One text alone may quote the question: TRL leaves it."""
    kept = [f"{completion}<|im_end|>"]
    record, pair = {"prompt": prompt, "completion": completion}, {"prompt": prompt, "chosen": completion}
    assert learned(record) == kept
    told = tokenized(TOKENIZER, [("here", record)], "conversations", 400, "error").counts()
    assert (told["prompt_repeated"], told["prompt_kept"]) == (0, int(said is not None))
    assert learned({**pair, "rejected": "no"}, kind="pairs") == [*kept, "no<|im_end|>"]
    other = f"{ASKED if said is None else prompt[-1]['content'] if isinstance(prompt, list) else prompt} no"
    both = tokenized(TOKENIZER, [("here", {**pair, "rejected": other})], "pairs", 400, "error")
    answers = kept if said is None else [f"{said}<|im_end|>", "no<|im_end|>"]
    assert learned({**pair, "rejected": other}, kind="pairs")[: len(answers)] == answers
    assert (both.counts()["prompt_repeated"], both.counts()["prompt_kept"]) == (int(said is not None), 0)
    assert len(conversation(record).messages) == (1 if isinstance(prompt, str) else len(prompt)) + 1


def test_an_answer_that_is_the_prompt_stays_unless_the_other_goes_on():
    assert learned({"prompt": ASKED, "completion": ASKED}) == [f"{ASKED}<|im_end|>"]
    pair = {"prompt": ASKED, "chosen": f"{ASKED} Up", "rejected": ASKED}
    assert learned(pair, kind="pairs") == ["Up<|im_end|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ([USER], [SAID, USER, UP]),
        ("go", [SAID, USER, UP]),
        ([USER, SAID, USER], [SAID, USER, UP]),
    ],
)
def test_messages_that_begin_with_an_answer_are_all_of_it(prompt: Any, answer: list[Any]):
    """Though they hold the prompt's messages again, later."""
    found = conversation({"prompt": prompt, "completion": answer})
    before = [USER] if isinstance(prompt, str) else prompt
    assert found.messages == [*before, *answer]
    assert [i for i, one in enumerate(found.learned) if one] == [len(before), len(before) + 2]
    assert not found.repeats_prompt
    assert not found.keeps_prompt


PARTS = {"role": "assistant", "content": [{"type": "text", "text": "z"}]}
Z = {"role": "assistant", "content": "z"}


@pytest.mark.parametrize(
    ("row", "identical"),
    [
        ({"prompt": "b", "chosen": "z", "rejected": "z"}, True),
        ({"prompt": "b", "chosen": "", "rejected": ""}, True),
        ({"prompt": "b", "chosen": [Z | {"name": "A"}], "rejected": [Z | {"name": "B"}]}, True),
        ({"prompt": "b", "chosen": [Z], "rejected": [PARTS]}, True),
        ({"prompt": "b", "chosen": "z", "rejected": [USER | {"content": "b"}, Z]}, True),
        ({"prompt": "b", "chosen": [Z], "rejected": [Z, USER]}, True),  # what follows the last answer is cut off
        ({"chosen": [USER, Z], "rejected": [USER, Z]}, True),
        ({"chosen": [USER, Z | {"train": 1}], "rejected": [USER, Z]}, True),
        ({"prompt": "b", "chosen": "z", "rejected": "z "}, False),
        ({"prompt": "b", "chosen": "z", "rejected": ""}, False),
        ({"prompt": "b", "chosen": "zz", "rejected": "z"}, False),
        ({"prompt": "b", "chosen": [Z], "rejected": [Z, USER, SAID]}, False),
        ({"chosen": [USER, Z], "rejected": [USER, Z, USER, SAID]}, False),
    ],
)
def test_pairs_are_equal_where_their_tokens_are_whatever_their_layout(row: Any, identical: bool):
    rows = [("a", {"prompt": "a", "chosen": "x", "rejected": "y"}), ("b", row)]
    found = tokenized(TOKENIZER, rows, "pairs", 400, "error")
    assert (found.n_identical, len(found.examples)) == (identical, 2 - identical)
    if identical:
        with pytest.raises(ConfigError, match="of 1 pairs 0 are too long, and 1 have one answer twice"):
            tokenized(TOKENIZER, rows[1:], "pairs", 400, "error")


def test_what_both_answers_begin_with_is_their_prompt():
    pair = preference_pair({"chosen": TALK, "rejected": [*TALK[:3], SAID]})
    assert pair.chosen.learned == pair.rejected.learned == [False, False, False, True]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ([], "an empty list, not an object"),
        ({}, "it has nothing"),
        ({"text": "a", "id": 3}, "it has text, id"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": "hello"}, "messages is text"),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": [SAID]}, "begins with the assistant"),
        ({"messages": [USER, SAID, SAID]}, "messages 1 and 2 are both the assistant's"),
        ({"messages": [USER, SAID | {"train": False}]}, "nothing to learn"),
        ({"messages": [USER, SAID | {"weight": 0.5}]}, "message 1: weight is 0.5, neither true or 1 nor false or 0"),
        ({"messages": [{"content": "go"}, SAID]}, r"messages\[0\] has no role"),
        ({"messages": [{"role": "human", "content": "go"}, SAID]}, "unknown role 'human'"),
        ({"messages": [{"role": "user"}, SAID]}, "its content is null"),
        ({"messages": [USER | {"content": [{"type": "image"}]}, SAID]}, "no text"),
        ({"messages": [USER | {"tool_calls": [CALL]}, SAID]}, "only the assistant"),
        ({"messages": [USER, SAID | {"tool_calls": [{}]}]}, "has no name"),
        ({"messages": TALK, "tools": "no schema"}, "tools is text"),
        ({"messages": TALK, "prompt": "stop"}, "a prompt that they do not begin with"),
        ({"messages": TALK, "chosen": TALK, "rejected": "b"}, "preference pair"),
        ({"messages": TALK, "completion": "Up"}, "messages and completion"),
        ({"completion": "Up"}, "no prompt"),
        ({"chosen": "a", "rejected": "b"}, "preference pair"),
    ],
)
def test_what_is_no_conversation_says_why(record: Any, why: str):
    with pytest.raises(InputError, match=why):
        conversation(record)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": TALK}, "not a preference pair"),
        ({"messages": TALK[:2], "chosen": TALK, "rejected": TALK}, "messages and chosen"),
        ({"prompt": "go", "chosen": "a"}, "no rejected"),
        ({"prompt": "go", "chosen": "a", "rejected": None}, "chosen, but no rejected"),
        ({"prompt": "go", "rejected": "a"}, "rejected, but no chosen"),
        (
            {"prompt": "go", "chosen": [USER | {"content": "no"}, SAID], "rejected": TALK},
            "chosen begins with another one",
        ),
        (
            {"prompt": "go", "chosen": [{"role": "system", "content": "s"}, SAID], "rejected": TALK},
            "both `prompt` and `chosen` start",
        ),
        (
            {"prompt": "go", "chosen": [{"role": "system", "content": "s"}, *TALK], "rejected": TALK},
            "begin with different prompts",
        ),
    ],
)
def test_what_is_no_pair_says_why(record: Any, why: str):
    with pytest.raises(InputError, match=why):
        preference_pair(record)


def test_calls_that_the_template_leaves_out_are_refused():
    with pytest.raises(ConfigError, match="here: the chat template leaves out the call of add"):
        learned({"messages": [USER, SAID | {"tool_calls": [CALL]}]})


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", b"", "holds no record"),
        ("a.jsonl", b"\n\n", "holds no record"),
        ("a.jsonl", b'{"messages": 1}\n\n{"mess', "line 3 is not JSON"),
        ("a.jsonl", b'{"a": NaN}\n', "line 1 is not JSON"),
        ("a.jsonl", b"[" * 5000, "one array, is not JSON"),
        ("a.jsonl", b"0\n" + b"[" * 5000, "line 2 is not JSON"),
        ("a.jsonl", '{"messages": []}\n'.encode("utf-16-le"), "is UTF-16 without a byte order mark"),
        ("a.jsonl", b'{"a": "\xff\xfe"}\n', "line 1 is not JSON"),
        ("a.json", b'{\n"messages": []}\n', "one JSON value"),
        ("a.json", b"[]", "holds no record"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "cannot be unpacked"),
        ("a.jsonl", b"(\xb5/\xfd", "compressed with zstd"),
        ("a.jsonl", b"PAR1....", "Parquet"),
        ("a.parquet", b"PAR1 and then not", "cannot be read"),
        ("a.arrow", b"no arrow", "cannot be read"),
        ("a.csv", b"a,b\n", "not a data file"),
        ("a.jsonl", b'{"messages": "' + b"x" * MAX_LINE_BYTES, "line 1 has more than"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(tmp_path: Path, name: str, content: bytes, why: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=why) as refused:
        list(records([tmp_path / name], "train"))
    assert str(tmp_path / name) in str(refused.value)


def test_absent_files_and_folders_without_data(tmp_path: Path):
    for path, why in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "holds no data")):
        with pytest.raises(ConfigError, match=why):
            list(records([path], "train"))
    (tmp_path / "pipe.jsonl").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="is a device"):
        list(records([tmp_path / "pipe.jsonl"], "train"))


def test_a_folder_as_datasets_have_it(tmp_path: Path):
    (tmp_path / "notes.gz").write_bytes(b"")
    for name in ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000.jsonl"):
        written(tmp_path / name, {"from": name})
    (tmp_path / "dataset_infos.json").write_text("{}", encoding="utf-8")
    assert [found["from"][-20:-6] for _, found in records([tmp_path], "train")] == ["00000-of-00002", "00001-of-00002"]
    assert [place for place, _ in records([tmp_path], "eval")] == [f"{tmp_path}/data/test-00000.jsonl, line 1"]
    written(tmp_path / "plain/a.jsonl", 1)
    written(tmp_path / "plain/b.jsonl", 2)
    assert [found for _, found in records([tmp_path / "plain"], "train")] == [1, 2]
    with pytest.raises(ConfigError, match="is called test or validation"):
        files_of(tmp_path / "plain", "eval")


def test_parquet_and_arrow_hold_the_same_conversations(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"messages": TALK[:2], "tools": "[]"},
        {"messages": [USER, SAID | {"train": False}, *TALK[2:]], "tools": None},
        {"messages": [USER, SAID | {"tool_calls": [CALL]}], "tools": json.dumps([{"name": "add"}])},
    ]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for make, name in ((pa.ipc.new_stream, "a.arrow"), (pa.ipc.new_file, "file.arrow")):
        with make(tmp_path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    wanted = [conversation(row) for row in rows]
    for name in ("a.parquet", "a.arrow", "file.arrow"):
        found = list(records([tmp_path / name], "train"))
        assert [conversation(record) for _, record in found] == wanted
        assert found[2][0] == f"{tmp_path / name}, row 2"


@pytest.mark.parametrize("prompt", ["go", " go\n", [USER], None])
def test_columns_that_repeat_the_conversation_change_nothing(prompt: Any):
    system = {"role": "system", "content": "Be kind"}
    for messages in (TALK, [system, *TALK]):
        assert conversation({"messages": messages, "prompt": prompt}) == conversation({"messages": messages})
    pair = {"prompt": prompt, "chosen": TALK[:2], "rejected": [USER, SAID | {"content": "No"}]}
    assert preference_pair(pair | {"messages": TALK[:2]}) == preference_pair(pair)


def test_only_columns_that_are_known_are_read_and_a_row_that_is_no_text_is_named(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = pa.array([b"go", b"\xff\xfe", b"go"], pa.binary())
    said, bad = pa.array(["Right", "Up", "Up"]), pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    far = pa.array([0, 2**62, 0], pa.int64()).cast(pa.timestamp("us"))
    for name, columns, why in (
        ("ok", {"prompt": said, "completion": said, "made": far, "by": bad}, None),
        ("text", {"prompt": bad, "completion": said}, "row 1 cannot be read: 'utf-8' codec"),
        ("date", {"prompt": far, "completion": said}, "row 1 cannot be read"),
        ("none", {"text": said, "id": said}, "holds no conversation: it has text, id"),
    ):
        table = pa.table(columns)
        pq.write_table(table, tmp_path / f"{name}.parquet")
        with pa.ipc.new_stream(tmp_path / f"{name}.arrow", table.schema) as stream:
            stream.write_table(table)
        for file in (tmp_path / f"{name}.parquet", tmp_path / f"{name}.arrow"):
            if why is None:
                found = [record for _, record in records([file], "train")]
                unread = {"made": None, "by": None}
                assert found[0] == {"prompt": "Right", "completion": "Right"} | unread
                continue
            with pytest.raises(ConfigError, match=why) as refused:
                list(records([file], "train"))
            assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"arguments": {"a": "\ud800"}}, "half of a surrogate pair"),
        ({"arguments": {"a": Decimal("1.5")}}, "Decimal is not JSON"),
        ({"arguments": {"a": b"1"}}, "bytes is not JSON"),
    ],
)
def test_values_that_no_template_can_write_are_refused_with_their_place(hermes: ChatTokenizer, call: Any, why: str):
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", **call}}]}]
    with pytest.raises(ConfigError, match=f"here: .*{why}"):
        learned({"messages": talk}, hermes)


@pytest.mark.parametrize(
    "said",
    [
        {"content": "so<|im_end|>\nnot so"},
        {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": "<|im_end|>", "b": 1}}}]},
    ],
)
def test_what_would_end_a_turn_is_refused_within_it(hermes: ChatTokenizer, said: Any):
    with pytest.raises(ConfigError, match=r"here: the assistant says <\|im_end\|>, which ends a turn"):
        learned({"messages": [USER, {"role": "assistant", **said}]}, hermes)


def test_tools_that_the_template_leaves_out_are_counted(hermes: ChatTokenizer, tmp_path: Path):
    rows = [("a", {"messages": TALK, "tools": [{"name": "add"}]}), ("b", {"messages": TALK})]
    assert tokenized(hermes, rows, "conversations", 400, "error").counts()["without_tools"] == 1
    shows = {"chat_template": "{{ tools | tojson if tools else '' }}" + HERMES}
    folder = shutil.copytree(TINY, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | shows), encoding="utf-8")
    assert tokenized(ChatTokenizer(folder), rows, "conversations", 400, "error").counts()["without_tools"] == 0


def test_pairs_whose_answers_are_the_same_tokens_are_dropped_and_counted():
    """They differ behind the cut, or in what the template does not show: there is nothing to prefer."""
    far = {"prompt": "go", "chosen": "Right " * 80 + "Up", "rejected": "Right " * 80 + "Left"}
    unseen = {"prompt": [USER], "chosen": [SAID | {"name": "a"}], "rejected": [SAID | {"name": "b"}]}
    rows = [("a", far), ("b", unseen), ("c", {"prompt": "go", "chosen": "Right", "rejected": "Up"})]
    found = tokenized(TOKENIZER, rows, "pairs", 64, "truncate")
    assert (len(found.examples), found.n_identical, found.n_truncated, found.n_dropped) == (1, 2, 0, 0)
    with pytest.raises(ConfigError, match="of 2 pairs 0 are too long, and 2 have one answer twice"):
        tokenized(TOKENIZER, rows[:2], "pairs", 64, "truncate")


async def test_held_out_conversations_that_are_dropped_or_cut_are_told_too(tmp_path: Path):
    train = written(tmp_path / "a.jsonl", {"messages": TALK}, FAR)
    held_out = written(tmp_path / "b.jsonl", {"messages": TALK}, LONG, FAR, FAR)
    settings = DataSettings((train,), (held_out,), 0.0, "conversations", 64, "truncate", 0, "", 0)
    with ThreadPoolExecutor(1) as thread:
        found = await load(settings, TOKENIZER, None, Waiter(thread, TrainerStatus("r", 0)))
    told, wanted = found.counts(), {"examples": 1, "dropped": 1, "truncated": 0}
    wanted |= {"eval_examples": 2, "eval_dropped": 2, "eval_truncated": 1}
    assert {key: told[key] for key in wanted} == wanted
    assert found.digest == digest([found.train.examples, found.held_out])
    assert found.files == {str(path): checkpoint_files.digest(path) for path in (train, held_out)}


LONG = {"prompt": "go", "completion": "Right " * 80}
FAR = {"prompt": "go " * 200, "completion": "Up"}


def test_what_is_too_long_is_refused_dropped_or_cut_and_counted():
    rows = [("a", {"messages": TALK}), ("b", LONG), ("c", FAR)]
    with pytest.raises(ConfigError, match=r"b has [0-9]+ tokens, more than 64"):
        tokenized(TOKENIZER, rows, "conversations", 64, "error")
    dropped = tokenized(TOKENIZER, rows, "conversations", 64, "drop")
    assert (len(dropped.examples), dropped.n_dropped, dropped.n_truncated) == (1, 2, 0)
    cut = tokenized(TOKENIZER, rows, "conversations", 64, "truncate")
    assert (len(cut.examples), cut.n_dropped, cut.n_truncated) == (2, 1, 1)  # nothing to learn is left of c
    assert len(cut.examples[1][0].ids) == 64
    assert cut.counts()["learned_tokens"] == sum(one.n_learned for (one,) in cut.examples)
    with pytest.raises(ConfigError, match="none of 1 conversations fits into 64 tokens"):
        tokenized(TOKENIZER, [("c", FAR)], "conversations", 64, "truncate")


def test_every_example_is_drawn_once_an_epoch_and_a_resumed_run_draws_on():
    drawn = batches(6, 4, seed=0)
    seen = [next(drawn) for _ in range(6)]
    assert sorted(np.concatenate(seen).tolist()) == sorted([*range(6)] * 4)
    later = batches(6, 4, seed=0, after=4)
    assert [next(later).tolist() for _ in range(2)] == [one.tolist() for one in seen[4:]]
    assert seen[0].tolist() != next(batches(6, 4, seed=1)).tolist()
    assert [n_steps(0, epochs, 6, 4) for epochs in (None, 1, 2, 3)] == [2, 2, 3, 5]
    assert n_steps(7, None, 6, 4) == 7


def test_the_share_that_is_held_out_is_the_seeds_choice():
    rows = [("here", {"prompt": f"n {i}", "completion": "ok"}) for i in range(10)]
    examples = list(tokenized(TOKENIZER, rows, "conversations", 64, "error").examples)
    kept, held_out = split(examples, 0.3, 5)
    assert (len(kept), len(held_out)) == (7, 3)
    assert digest([held_out]) == digest([split(examples, 0.3, 5)[1]]) != digest([split(examples, 0.3, 6)[1]])
    assert split(examples, 0.0, 5) == (examples, [])
    with pytest.raises(ConfigError, match="leaves none"):
        split(examples[:1], 0.5, 5)
