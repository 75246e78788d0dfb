"""Chat rendering: appending never changes what stands, and a demonstration equals the rollout it demonstrates."""

import datetime
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, InputError
from shared.models.chat import ChatTokenizer, tokenizer_of_run
from tests.support.templates import change_json, tiny_folder, write_json
from volley_serving.templates.messages import read_messages
from volley_supervised.conversations.rendering import render_demonstration

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
    ids += TOKENIZER.continue_after(ids, [user(second)])
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(TOKENIZER.render_prompt([user(first), said(answer), user(second)]))


def test_an_unfinished_turn_is_closed_by_the_environment():
    open_end = TOKENIZER.continue_after([], [user("x")])
    assert open_end == [TOKENIZER.eos_id, *TOKENIZER.continue_after([TOKENIZER.eos_id], [user("x")])]


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_a_demonstration_equals_the_rollout_it_demonstrates(turns):
    messages = [m for question, answer in turns for m in (user(question), said(answer))]
    ids, mask = render_demonstration(TOKENIZER, messages)
    expected = TOKENIZER.render_prompt(messages[:1])
    expected_mask = [0] * len(expected)
    for index, (_, answer) in enumerate(turns):
        sampled = [*TOKENIZER.encode(answer), TOKENIZER.eos_id]
        glue = TOKENIZER.continue_after(sampled, [user(turns[index + 1][0])]) if index + 1 < len(turns) else []
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
    ids += gemma.continue_after(ids, [user("c")])
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
        render_demonstration(TOKENIZER, [user("x")])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokenizer_config.json", {"chat_template": None}, "no chat template"),
        ("tokenizer_config.json", {"chat_template": "{% for"}, "chat template is not valid"),
        ("tokenizer_config.json", {"eos_token": "<nope>"}, "not in the vocabulary"),
        ("tokenizer_config.json", {"bos_token": "<s>"}, "bos_token '<s>' is not in the vocabulary"),
        ("tokenizer_config.json", {"eos_token": None}, "names no eos_token"),
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


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def of_template(folder, template):
    tiny_folder(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ChatTokenizer(folder)


def learned(tokenizer, *messages):
    ids, mask = render_demonstration(tokenizer, [user("2+2?"), *messages])
    return tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one])


@pytest.mark.parametrize(
    "change",
    [
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 48},
                "direction": "Right",
                "pad_to_multiple_of": 8,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<|endoftext|>",
            }
        },
        {"post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    ],
)
def test_truncation_and_padding_saved_in_a_tokenizer_are_not_applied(tmp_path, change):
    folder = tiny_folder(tmp_path / "model")
    change_json(folder / "tokenizer.json", **change)
    assert ChatTokenizer(folder).encode("a long story of the sea") == TOKENIZER.encode("a long story of the sea")


def test_flags_of_added_tokens_are_those_of_the_tokenizer_config(tmp_path):
    flags = {"content": "<|im_start|>", "lstrip": True, "rstrip": True, "single_word": False, "normalized": False}
    folder = tiny_folder(tmp_path / "model", added_tokens_decoder={"1": flags | {"special": True}})
    ids = TOKENIZER.encode("a<|im_start|>b")
    assert TOKENIZER.encode("a \n<|im_start|> b") != ids
    assert ChatTokenizer(folder).encode("a \n<|im_start|> b") == ids


def test_special_tokens_of_a_legacy_file_win(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    write_json(folder / "special_tokens_map.json", {"eos_token": {"content": "<|endoftext|>"}})
    assert TOKENIZER.token(TOKENIZER.eos_id) == "<|im_end|>"
    assert {TOKENIZER.token(i) for i in ChatTokenizer(folder).end_ids} == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_a_pad_token_may_be_missing_or_the_end_token(tmp_path, pad):
    tokenizer = ChatTokenizer(tiny_folder(tmp_path / "model", pad_token=pad))
    assert tokenizer.pad_id == tokenizer.eos_id == TOKENIZER.eos_id


def test_every_declared_end_ends_a_turn(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]})
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.end_ids == {0, 2}
    sampled = [*tokenizer.encode("Right"), 0]
    assert tokenizer.is_ended(sampled)
    assert tokenizer.message_text(sampled) == "Right"
    after = tokenizer.continue_after(sampled, [user("x")])
    assert tokenizer.decode(after) == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.continue_after([*sampled[:-1], 2], [user("x")]) == after[1:]


def test_a_header_that_ends_a_turn_is_not_repeated(tmp_path):
    """GLM's way: a turn has no end of its own."""
    template = CHATML.replace("<|im_end|>\n", "").replace("<|im_start|>", "<|endoftext|>")
    tokenizer = of_template(tmp_path / "model", template)
    write_json(tmp_path / "model" / "generation_config.json", {"eos_token_id": [0]})
    tokenizer = ChatTokenizer(tmp_path / "model")
    header = tokenizer.encode("<|endoftext|>user\nx")
    sampled = [*tokenizer.encode("Right"), 0]
    assert tokenizer.continue_after(sampled, [user("x")])[: len(header) - 1] == header[1:]
    assert tokenizer.continue_after(sampled[:-1], [user("x")])[: len(header)] == header


THINKING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}",
)
OPENED = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "4", "reasoning_content": "two and two"}, "<think>\ntwo and two\n</think>\n\n4<|im_end|>"),
        ({"content": "", "reasoning_content": "two"}, "<think>\ntwo\n</think>\n\n<|im_end|>"),
        ({"content": "", "reasoning_content": "two", "tool_calls": [CALL]}, '"arguments": {"a": 2}}<|im_end|>'),
    ],
)
def test_reasoning_is_learned_where_the_template_writes_it(tmp_path, message, text):
    tokenizer = of_template(tmp_path / "model", THINKING)
    assert learned(tokenizer, said("") | message).endswith(text)
    opened = of_template(tmp_path / "opened", OPENED)
    assert learned(opened, said("") | message).endswith(text.removeprefix("<think>\n"))
    assert "<think>" not in learned(opened, said("") | message), "the prompt ends with it"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_a_template_gets_reasoning_under_the_names_of_transformers(tmp_path, read, key):
    tokenizer = of_template(tmp_path / "model", THINKING.replace("reasoning_content", read))
    spoken = said("4") | {key: "two and two"}
    assert learned(tokenizer, spoken) == "<think>\ntwo and two\n</think>\n\n4<|im_end|>"
    prompt = tokenizer.decode(tokenizer.render_prompt([user("2+2?"), spoken, user("3+3?")]))
    assert "<think>\ntwo and two\n</think>" in prompt
    two = learned(tokenizer, said("4") | {"reasoning": "x", "thinking": "x", "reasoning_content": "x"})
    assert two == "<think>\nx\n</think>\n\n4<|im_end|>"


@pytest.mark.parametrize("header", ["### Response:\n", "### Response: ", "\n\n", "Response:"])
@pytest.mark.parametrize("question", ["2+2?", "2+2? " * 60])
def test_no_space_comes_before_an_answer_whose_tokenizer_begins_texts_with_one(tmp_path, header, question):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n" + header + "{% else %}{{ m.content }}"
        "{{ eos_token }}{% endif %}{% endfor %}"
    )
    tiny_folder(tmp_path / "model")
    change_json(tmp_path / "model" / "tokenizer.json", normalizer={"type": "Prepend", "prepend": " "})
    (tmp_path / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = ChatTokenizer(tmp_path / "model")
    ids, mask = render_demonstration(tokenizer, [user(question), said("four")])
    spoken = tokenizer.encode("\nfour" + tokenizer.token(tokenizer.eos_id))[len(tokenizer.encode("\n")) :]
    assert [i for i, one in zip(ids, mask, strict=True) if one] == spoken


@pytest.mark.parametrize("content", ["<think>\ntwo\n</think>\n\n4", "<think>two</think>4"])
def test_an_opened_thought_in_the_content_is_learned_once(tmp_path, content):
    dropping = OPENED.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")  # DeepSeek-R1's way
    tokenizer = of_template(tmp_path / "model", dropping)
    ids, mask = render_demonstration(tokenizer, [user("2+2?"), said(content)])
    prompt = tokenizer.render_prompt([user("2+2?")])
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids[len(prompt) :]) == content.removeprefix("<think>").lstrip("\n") + "<|im_end|>"
    assert sum(mask) == len(ids) - len(prompt)


@pytest.mark.parametrize(
    ("message", "left_out"),
    [
        ({"reasoning_content": "two"}, "reasoning_content"),
        ({"reasoning": "two"}, "reasoning"),
        ({"thinking": "two"}, "thinking"),
        ({"tool_calls": [CALL]}, "the call of add"),
        ({"function_call": {"name": "add", "arguments": "{}"}}, "function_call"),
    ],
)
def test_what_the_template_leaves_out_is_refused_by_name(message, left_out):
    with pytest.raises(InputError, match=f"leaves out {left_out}"):
        learned(TOKENIZER, said("") | message)


def test_what_is_left_out_is_refused_also_where_the_same_text_stands_elsewhere(tmp_path):
    with pytest.raises(InputError, match="leaves out reasoning_content"):
        learned(TOKENIZER, said("4") | {"reasoning_content": "2"})
    with pytest.raises(InputError, match="leaves out reasoning_content"):
        learned(TOKENIZER, said("4") | {"reasoning_content": "4"})
    llama = of_template(
        tmp_path / "model", CHATML.replace("{{ m.content }}", CALLS["in place of the content, as Llama 3.1"])
    )
    with pytest.raises(InputError, match="leaves out content beside tool_calls"):
        learned(llama, said("add") | {"tool_calls": [CALL]})
    both = {"reasoning_content": "two", "reasoning": "two"}
    assert learned(of_template(tmp_path / "both", THINKING), said("4") | both).startswith("<think>\ntwo\n</think>")


CLOCK = {"type": "function", "function": {"name": "time", "arguments": {}}}
SUM = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": "two"}}}


@pytest.mark.parametrize(
    ("question", "message", "left_out"),
    [
        ("What is the time?", {"tool_calls": [CLOCK]}, "the call of time"),
        ("Please add x and y", {"tool_calls": [SUM]}, "the call of add"),
        ("hi", {"content": "I add x and y", "tool_calls": [SUM]}, "the call of add"),
        ("What is the time?", {"function_call": {"name": "time", "arguments": "{}"}}, "function_call"),
        ("hi", {"content": "let me add", "function_call": {"name": "add", "arguments": '{"a": 1}'}}, "function_call"),
    ],
)
def test_a_call_that_is_left_out_is_refused_also_where_its_words_stand_elsewhere(question, message, left_out):
    with pytest.raises(InputError, match=f"leaves out {left_out}"):
        render_demonstration(TOKENIZER, [user(question), said("") | message])


@pytest.mark.parametrize(
    ("written", "left_out"),
    [
        ("{{ c.function.name }}", "the argument x of the call of add"),
        ("{{ c.function.name }} x y", "the argument x of the call of add"),
        ("{{ c.function.name }}{{ c.function.arguments.keys() | list }}", "the argument y of the call of add"),
        ("add {{ c.function.arguments | tojson }}", "the call of add"),
    ],
)
def test_a_part_of_a_call_that_is_left_out_is_refused(tmp_path, written, left_out):
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}" + written + "{% endfor %}"
    )
    with pytest.raises(InputError, match=f"leaves out {left_out}"):
        learned(of_template(tmp_path / "model", template), said("") | {"tool_calls": [SUM]})


def test_the_second_of_two_calls_is_not_left_out_in_silence(tmp_path):
    llama = CHATML.replace("{{ m.content }}", CALLS["in place of the content, as Llama 3.1"])
    with pytest.raises(InputError, match="leaves out the call of add"):
        learned(of_template(tmp_path / "model", llama), said("") | {"tool_calls": [SUM, SUM]})


CALLS = {
    "in place of the content, as Llama 3.1": "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content }}{% endif %}",
    "where content is null, as DeepSeek-R1": "{% if m.content is none %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content }}{% endif %}",
    "before the content": "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ m.content }}",
    "with arguments as text": "{% for c in m.tool_calls or [] %}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments + '}' }}{% endfor %}"
    "{{ m.content }}",
}


@pytest.mark.parametrize("way", CALLS)
def test_calls_are_learned_and_rendered_in_every_way_to_write_them(tmp_path, way):
    tokenizer = of_template(tmp_path / "model", CHATML.replace("{{ m.content }}", CALLS[way]))
    call, answer = said("") | {"tool_calls": [CALL]}, {"role": "tool", "content": "4"}
    written = '{"name": "add", "arguments": {"a": 2}}<|im_end|>'
    assert learned(tokenizer, call, answer, said("4")) == f"{written}4<|im_end|>"
    assert written in tokenizer.decode(tokenizer.render_prompt([user("2+2?"), call, answer]))


@pytest.mark.parametrize("arguments", [{"a": True, "b": None, "c": "it's"}, '{"a": true, "b": null, "c": "it\'s"}'])
def test_arguments_that_a_template_writes_as_they_are_become_json(tmp_path, arguments):
    as_they_are = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}"
    tokenizer = of_template(tmp_path / "model", CHATML.replace("{{ m.content }}", as_they_are + "{{ m.content }}"))
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = read_messages([user("?"), said("") | {"tool_calls": [call]}])
    assert learned(tokenizer, *messages[1:]) == 'add {"a": true, "b": null, "c": "it\'s"}<|im_end|>'


def test_a_function_call_beside_another_call_is_not_left_out_in_silence(tmp_path):
    tokenizer = of_template(tmp_path / "model", CHATML.replace("{{ m.content }}", CALLS["before the content"]))
    both = said("") | {"tool_calls": [CALL], "function_call": {"name": "time", "arguments": "{}"}}
    with pytest.raises(InputError, match="leaves out function_call"):
        learned(tokenizer, both)
    assert learned(tokenizer, both | {"function_call": {"name": "add", "arguments": '{"a": 2}'}})


def test_content_that_is_left_out_beside_a_call_is_refused(tmp_path):
    llama = CHATML.replace("{{ m.content }}", CALLS["in place of the content, as Llama 3.1"])
    with pytest.raises(InputError, match="leaves out content beside tool_calls"):
        learned(of_template(tmp_path / "model", llama), said("I add them") | {"tool_calls": [CALL]})


def test_generation_blocks_choose_what_is_learned(tmp_path):
    marked = CHATML.replace("{{ m.content }}<|im_end|>", "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>")
    tokenizer = of_template(tmp_path / "model", marked)
    assert learned(tokenizer, said("4"), user("?"), said("x")) == "4x"
    assert (
        render_demonstration(tokenizer, [user("a"), said("b")])[0]
        == render_demonstration(TOKENIZER, [user("a"), said("b")])[0]
    )


@pytest.mark.parametrize("place", ["tokenizer_config.json", "files"])
def test_named_templates_are_chosen_as_transformers_chooses(tmp_path, place):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "T" + CHATML}]
    folder = tiny_folder(tmp_path / "model", chat_template=named if place == "tokenizer_config.json" else None)
    if place == "files":
        (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T" + CHATML, encoding="utf-8")
    tokenizer = ChatTokenizer(folder)
    prompts = [tokenizer.decode(tokenizer.render_prompt([user("x")], tools)) for tools in ((), [CALL])]
    assert prompts[1] == "T" + prompts[0]


def test_templates_without_a_default_are_refused(tmp_path):
    folder = tiny_folder(tmp_path / "model", chat_template=[{"name": "rag", "template": CHATML}])
    with pytest.raises(ConfigError, match="chat templates 'rag', and no 'default'"):
        ChatTokenizer(folder)


def test_the_date_that_a_template_writes_is_the_given_one(tmp_path):
    dated = "Today is {{ strftime_now('%d %b %Y %H:%M') }}." + CHATML
    tokenizer = of_template(tmp_path / "model", dated)
    assert tokenizer.writes_date
    assert not TOKENIZER.writes_date
    tokenizer = tokenizer_of_run(tmp_path / "model", datetime.date(2024, 7, 26))
    with pytest.raises(ConfigError, match=r"no run\.date"):
        tokenizer_of_run(tmp_path / "model", None)
    assert tokenizer.decode(tokenizer.render_prompt([user("x")])).startswith("Today is 26 Jul 2024 00:00.")


def test_an_end_within_what_the_assistant_says_is_refused():
    with pytest.raises(InputError, match="ends a turn"):
        learned(TOKENIZER, said("a<|im_end|>b"))
    with pytest.raises(InputError, match="ends a turn"):
        learned(TOKENIZER, said("a<|im_end|>"))


def test_an_end_after_the_end_of_the_last_turn_is_no_fault(tmp_path):
    """Phi-3 ends a finished conversation with eos_token."""
    phi = of_template(tmp_path / "model", CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}")
    assert learned(phi, said("4"), user("?"), said("x")) == "4<|im_end|>x<|im_end|>"


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_role_that_the_template_leaves_out_is_refused(tmp_path, role):
    silent = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != '" + role + "' %}")
    tokenizer = of_template(tmp_path / "model", silent)
    left_out = {"role": role, "content": "5"}
    messages = [left_out, user("?")] if role == "system" else [user("?"), said("a"), left_out]
    with pytest.raises(InputError, match=f"leaves out messages of role {role}"):
        render_demonstration(tokenizer, [*messages, said("b")])
    with pytest.raises(InputError, match=f"leaves out messages of role {role}"):
        tokenizer.continue_after([], [left_out])


SYSTEM = {"role": "system", "content": "loud"}
FIRST_ONLY = CHATML.replace("messages %}", "messages %}{% if m.role != 'system' or loop.first %}").replace(
    "{% endfor %}", "{% endif %}{% endfor %}"
)
HOISTED = (  # DeepSeek's way
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    + CHATML.replace("in messages %}", "in messages if m.role != 'system' %}")
)


@pytest.mark.parametrize("template", [FIRST_ONLY, HOISTED])
@pytest.mark.parametrize("messages", [[SYSTEM], [user("q2"), SYSTEM], [SYSTEM, user("loud")]])
def test_a_later_message_that_the_template_leaves_out_is_refused(tmp_path, template, messages):
    tokenizer = of_template(tmp_path / "model", template)
    refused = "leaves out messages of role system" if template == FIRST_ONLY else "changes earlier messages"
    assert render_demonstration(tokenizer, [SYSTEM, user("q"), said("a")])
    with pytest.raises(InputError, match=refused):
        render_demonstration(tokenizer, [user("q"), said("a"), *messages, said("b")])
    with pytest.raises(InputError, match=refused):
        tokenizer.continue_after([*tokenizer.encode("a"), tokenizer.eos_id], messages)


def test_a_second_system_message_that_the_template_leaves_out_is_refused(tmp_path):
    tokenizer = of_template(tmp_path / "model", FIRST_ONLY)
    with pytest.raises(InputError, match="leaves out messages of role system"):
        render_demonstration(tokenizer, [SYSTEM, SYSTEM, user("q"), said("a")])


ANSWERS_OF_CALLS = CHATML.replace(  # Gemma 4's way: a call writes the answers that follow it
    "in messages %}", "in messages if m.role != 'tool' %}"
).replace(
    "{{ m.content }}",
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
    "{% set after = messages[messages.index(m) + 1:] %}{% for t in after if t.role == 'tool' %}[{{ t.content }}]"
    "{% endfor %}{% endif %}",
)


def test_an_answer_that_no_call_precedes_is_refused(tmp_path):
    tokenizer = of_template(tmp_path / "model", ANSWERS_OF_CALLS)
    with pytest.raises(InputError, match="leaves out messages of role tool"):
        tokenizer.continue_after([*tokenizer.encode("a"), tokenizer.eos_id], [{"role": "tool", "content": "5"}])


def test_cleaning_of_decoded_text_is_refused_where_transformers_cleans(tmp_path):
    folder = tiny_folder(tmp_path / "bpe", clean_up_tokenization_spaces=True)
    assert ChatTokenizer(folder).decode(TOKENIZER.encode("a . b")) == "a . b"
    words = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}, "unk_token": "a"}
    change_json(folder / "tokenizer.json", model=words)
    with pytest.raises(ConfigError, match="clean_up_tokenization_spaces"):
        ChatTokenizer(folder)
