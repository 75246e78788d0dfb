"""Columns of a row beside its conversation: honoured, refused by name, or named as not used."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers

from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.errors import ConfigError, InputError
from shared.models.chat import ChatTokenizer
from tests.support.templates import model_folder, published
from tests.support.tokenizer import FOLDER
from volley_supervised.conversations.data import DataSettings, load
from volley_supervised.conversations.dataset import tokenized
from volley_supervised.conversations.flags import may_say
from volley_supervised.conversations.formats import conversation, preference_pair

TOKENIZER = ChatTokenizer(FOLDER)
USER, SAID = {"role": "user", "content": "go"}, {"role": "assistant", "content": "Right"}
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [USER, SAID, {"role": "user", "content": "ok"}, {"role": "assistant", "content": "Up"}]
ROW = {"messages": TALK}
PAIR = {"prompt": "go", "chosen": "Right", "rejected": "Up"}
ADD = {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {}}}


def told(*rows, kind="conversations"):
    return tokenized(TOKENIZER, [(f"row {i}", row) for i, row in enumerate(rows)], kind, 400, "error").counts()


@pytest.mark.parametrize(
    "flag",
    [
        *({"train": False}, {"loss": 0}, {"weight": 0.0}, {"loss_mask": "0"}, {"loss_scale": 0}, {"learnable": False}),
        *({"compute_loss": False}, {"no_loss": True}, {"skip": 1}, {"skip": True, "train": False}),
    ],
)
def test_a_row_that_is_not_to_be_learned_is_left_out_and_counted(flag):
    found = told(ROW, ROW | flag)
    assert (found["examples"], found["not_learned"]) == (1, 1)
    assert told(PAIR, PAIR | flag, kind="pairs")["not_learned"] == 1
    with pytest.raises(ConfigError, match="every row has a flag"):
        told(ROW | flag)


@pytest.mark.parametrize("flag", [{"train": 1}, {"weight": 1.0}, {"skip": False}, {"no_loss": 0}, {"loss_mask": None}])
def test_a_row_that_is_to_be_learned_is(flag):
    assert told(ROW | flag) == told(ROW)


UNCLEAR = [
    *("assistant_masks", "completion_mask", "lossMask", "labels", "mask", "MASK", "sample_weight", "ignore", "ignored"),
    *("train_detail", "learn_from", "skip_turns", "unmasked", "no_grad", "supervised", "exclude", "train-on", "noloss"),
]


@pytest.mark.parametrize("key", UNCLEAR)
@pytest.mark.parametrize("value", [False, 1, [0, 1], "x"])
def test_a_key_that_may_say_what_is_learned_is_refused_by_name(key, value):
    for record in (
        ROW | {key: value},
        {"messages": [USER | {key: value}, SAID]},
        {"messages": [USER, SAID | {key: value}]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a", key: value}]}]},
        {"prompt": [USER], "completion": [SAID | {key: value}]},
    ):
        with pytest.raises(ConfigError, match=f"here: .*flag {key}, whose meaning"):
            tokenized(TOKENIZER, [("here", record)], "conversations", 400, "error")


@pytest.mark.parametrize("flag", ["loss_scale", "learnable", "compute_loss", "no_loss"])
def test_flags_of_messages_are_honoured_or_refused(flag):
    off, on = (1, 0) if flag == "no_loss" else (0, 1)
    assert conversation({"messages": [USER, SAID | {flag: off}, *TALK[2:]]}).learned == [False, False, False, True]
    assert conversation({"messages": [USER, SAID | {flag: on}, *TALK[2:]]}) == conversation(ROW)
    with pytest.raises(InputError, match=f"{flag} is 0.5, neither true"):
        conversation({"messages": [USER, SAID | {flag: 0.5}]})
    with pytest.raises(InputError, match="contradict"):
        conversation({"messages": [USER, SAID | {flag: off, "train": True}]})


@pytest.mark.parametrize("row", [{"loss": 2.3}, {"weight": 0.5}, {"train": "yes"}, {"loss_mask": [0, 1]}])
def test_a_value_of_a_row_that_is_no_yes_or_no_is_refused(row):
    with pytest.raises(ConfigError, match=f"row 0: the row: {next(iter(row))} is "):
        told(ROW | row)


def test_words_that_only_look_like_flags_are_harmless():
    for key in ("source", "id", "timestamp", "glossary", "constraint", "transcript", "label_source", "score", "name"):
        assert not may_say(key)
        assert told(ROW | {key: 1})["examples"] == 1


def test_columns_of_a_table_that_may_say_what_is_learned_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from volley_supervised.conversations.files import records

    rows = [{"prompt": "go", "completion": "Right", "train": i != 1, "mask_kind": None, "by": "x"} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = tokenized(TOKENIZER, records([tmp_path / "a.parquet"], "train"), "conversations", 400, "error")
    assert (len(found.examples), found.n_not_learned, found.unused) == (2, 1, ["by"])


async def test_columns_that_nothing_reads_are_named_at_the_start(tmp_path, caplog):
    lines = [ROW | {"source": "a", "id": 1}, {"prompt": "go which way?", "completion": "go which way? Up", "score": 3}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    settings = DataSettings((tmp_path / "a.jsonl",), (), 0.0, "conversations", 64, "error", 0, "", 0)
    with ThreadPoolExecutor(1) as thread, caplog.at_level(logging.INFO):
        found = await load(settings, TOKENIZER, None, Waiter(thread, TrainerStatus("r", 0)))
    assert found.train.unused == ["source", "id", "score"]
    fields = {record.message: record.fields for record in caplog.records}
    assert fields["columns not used"]["columns"] == "source, id, score"
    assert fields["answers begin with the text of their prompt, and keep it"]["rows"] == 1


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_a_system_prompt_beside_the_messages_comes_first(system):
    wanted = conversation({"messages": [SYSTEM, *TALK]})
    assert conversation(ROW | {"system": system}) == wanted
    assert conversation({"messages": [SYSTEM, *TALK], "system": system}) == wanted
    for empty in (None, "", []):
        assert conversation(ROW | {"system": empty}) == conversation(ROW)
    found = conversation({"prompt": "go", "completion": "Right", "system": system})
    assert (found.messages, found.learned) == ([SYSTEM, USER, SAID], [False, False, True])
    for row in (PAIR, {"chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "Up"}]}):
        pair = preference_pair(row | {"system": system})
        assert [one.messages[:2] for one in (pair.chosen, pair.rejected)] == [[SYSTEM, USER]] * 2
        assert pair.rejected.learned == [False, False, True]
    with pytest.raises(InputError, match="another system prompt"):
        conversation({"messages": [SYSTEM, *TALK], "system": "no"})


@pytest.mark.parametrize("functions", [[ADD], json.dumps([ADD]), [{"type": "function", "function": ADD}]])
def test_functions_are_tools(functions):
    tools = [{"type": "function", "function": ADD}]
    assert conversation(ROW | {"functions": functions}) == conversation(ROW | {"tools": tools})
    assert conversation(ROW | {"functions": functions, "tools": []}).tools == tools
    with pytest.raises(InputError, match="tools and functions"):
        conversation(ROW | {"functions": functions, "tools": tools})
    with pytest.raises(InputError, match="functions is text, not a list"):
        conversation(ROW | {"functions": "add"})


@pytest.mark.parametrize("key", ["image", "images", "audio", "audios", "video", "videos"])
def test_columns_with_images_or_sounds_are_refused_by_name(key):
    assert conversation(ROW | {key: []}) == conversation(ROW)
    for row, read in ((ROW, conversation), (PAIR, preference_pair)):
        with pytest.raises(InputError, match=f"it has {key}: "):
            read(row | {key: ["a.png"]})


def test_an_unpaired_preference_is_not_learned_as_a_demonstration():
    row = {"prompt": "go", "completion": "Right", "label": False}
    with pytest.raises(InputError, match="unpaired preference"):
        conversation(row)
    assert conversation(row | {"label": 3})


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3", "glm4moe"])
@pytest.mark.parametrize("variables", [{"enable_thinking": False}, {"enable_thinking": True}, {"date": "today"}, {}])
def test_a_chat_template_gets_the_variables_of_its_row(name, variables, tmp_path):
    folder = model_folder(tmp_path / "model", published()[name])
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), ChatTokenizer(folder)
    for given in (variables, json.dumps(variables)):
        row = {"prompt": [SYSTEM, USER], "completion": [SAID], "chat_template_kwargs": given}
        ((example,),) = tokenized(tokenizer, [("here", row)], "conversations", 400, "error").examples
        options = {"return_dict": False, **variables}
        prompt = reference.apply_chat_template([SYSTEM, USER], add_generation_prompt=True, **options)
        whole = reference.apply_chat_template([SYSTEM, USER, SAID], **options)
        ids = example.ids.tolist()
        assert ids[: len(whole)] == whole[: len(ids)]
        if whole[: len(prompt)] == prompt:
            assert example.mask.tolist() == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


@pytest.mark.parametrize("given", [{"tools": []}, {"add_generation_prompt": True}, {"chat_template": "x"}, [1], "x"])
def test_variables_that_are_none_of_a_template_are_refused(given):
    with pytest.raises(InputError, match="chat_template_kwargs"):
        conversation(ROW | {"chat_template_kwargs": given})
