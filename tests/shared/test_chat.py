"""Chat rendering: appending never changes what stands, and a demonstration equals the rollout it demonstrates."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, InputError
from shared.models.chat import ChatTokenizer

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny"
TOKENIZER = ChatTokenizer(TINY)
TEXT = st.text(max_size=30).filter(lambda t: "<|" not in t and "\u0001" not in t)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


@given(TEXT)
def test_any_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(TEXT, TEXT, TEXT)
def test_a_continuation_is_what_the_template_would_have_written(first, answer, second):
    ids = TOKENIZER.render_prompt([user(first)])
    ids += [*TOKENIZER.encode(answer), TOKENIZER.eos_id]
    ids += TOKENIZER.render_continuation([user(second)], ended=True)
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(TOKENIZER.render_prompt([user(first), said(answer), user(second)]))


def test_an_unfinished_turn_is_closed_by_the_environment():
    open_end = TOKENIZER.render_continuation([user("x")], ended=False)
    assert open_end == [TOKENIZER.eos_id, *TOKENIZER.render_continuation([user("x")], ended=True)]


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_a_demonstration_equals_the_rollout_it_demonstrates(turns):
    messages = [m for question, answer in turns for m in (user(question), said(answer))]
    ids, mask = TOKENIZER.render_demonstration(messages)
    expected = TOKENIZER.render_prompt(messages[:1])
    expected_mask = [0] * len(expected)
    for index, (_, answer) in enumerate(turns):
        sampled = [*TOKENIZER.encode(answer), TOKENIZER.eos_id]
        glue = TOKENIZER.render_continuation([user(turns[index + 1][0])], ended=True) if index + 1 < len(turns) else []
        expected += sampled + glue
        expected_mask += [1] * len(sampled) + [0] * len(glue)
    assert (ids, mask) == (expected, expected_mask)


GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<|start|>' + role + '\n' + message['content'] | trim + '<|stop|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)


def test_a_template_may_close_turns_with_another_special_token_than_eos(tmp_path):
    """Gemma's, as it is published, but for the names of its tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    added = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    first = 1 + max(added["model"]["vocab"].values())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added["added_tokens"] += [
        {"id": first + i, "content": text, **plain} for i, text in enumerate(("<|start|>", "<|stop|>"))
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(added), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(GEMMA, encoding="utf-8")
    gemma = ChatTokenizer(tmp_path)
    assert gemma.token(gemma.eos_id) == "<|stop|>"
    ids = [*gemma.render_prompt([user("a")]), *gemma.encode("b"), gemma.eos_id]
    ids += gemma.render_continuation([user("c")], ended=True)
    assert ids == gemma.render_prompt([user("a"), said("b"), user("c")])
    with pytest.raises(InputError, match="System role not supported"):
        gemma.render_prompt([{"role": "system", "content": "x"}, user("a")])


def test_what_the_assistant_said_has_no_end_token():
    assert TOKENIZER.message_text([*TOKENIZER.encode("Right"), TOKENIZER.eos_id]) == "Right"
    assert TOKENIZER.message_text(TOKENIZER.encode("Right")) == "Right"
    assert TOKENIZER.message_text([]) == ""


def test_the_signs_of_the_games_are_single_tokens():
    for sign in (
        "<answer>",
        "</answer>",
        " || ",
        "Right",
        "Left",
        "Up",
        "Down",
        "√",
        "####",
        "#",
        "_",
        "O",
        "X",
        "P",
        "S",
        "G",
    ):
        assert len(TOKENIZER.encode(sign)) == 1, sign


def test_a_demonstration_must_end_with_the_assistant():
    with pytest.raises(InputError):
        TOKENIZER.render_demonstration([user("x")])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokenizer_config.json", {"chat_template": None}, "no chat template"),
        ("tokenizer_config.json", {"chat_template": "{% for"}, "chat template is not valid"),
        ("tokenizer_config.json", {"eos_token": "<nope>"}, "not in the vocabulary"),
        ("tokenizer_config.json", {"pad_token": "<|im_end|>"}, "pad token of its own"),
        ("tokenizer_config.json", {"pad_token": None}, "names no pad_token"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path, name, change, message):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(
            json.dumps(json.loads((folder / name).read_text(encoding="utf-8")) | change), encoding="utf-8"
        )
    with pytest.raises(ConfigError, match=message):
        ChatTokenizer(folder)


def test_a_template_cannot_reach_python(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    hostile = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (folder / "chat_template.jinja").write_text(hostile, encoding="utf-8")
    with pytest.raises(InputError, match="refuses"):
        ChatTokenizer(folder).render_prompt([user("x")])
