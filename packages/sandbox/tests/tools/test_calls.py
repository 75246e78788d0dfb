"""Tool calls in the formats of chat templates: read as they are taught, and told apart from answers."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.env.episode_types import Message, assistant
from shared.bounds import MAX_CALLS
from shared.models.templates import compile_template
from tests.support.templates import published
from volley_serving.dialects.calls import CallFormat, ToolCall, tool_calls, with_calls_written, write_call

PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs code.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string"},
                "n": {"type": "integer"},
                "fast": {"type": "boolean"},
                "rows": {"type": "array"},
            },
        },
    },
}
ARGUMENTS = {"code": 'print("<b>", 1)\nx = {"a": [1]}', "n": 3, "fast": True, "rows": [1, {"a": "é"}]}
WRITTEN: list[CallFormat] = ["hermes", "qwen3_coder", "llama3_json", "mistral"]


def read(text: str, form: CallFormat = "auto") -> list[ToolCall]:
    return tool_calls(assistant(text), form, [PYTHON])


@pytest.mark.parametrize("form", WRITTEN)
def test_what_is_written_is_read_back_also_when_the_format_is_not_named(form: CallFormat) -> None:
    text = write_call("python", ARGUMENTS, form)
    assert read(text, form) == read(text) == [ToolCall("python", ARGUMENTS)]


A, B = ToolCall("python", {"code": "1"}), ToolCall("python", {"code": "2"})
J1, J2 = '{"name": "python", "arguments": {"code": "1"}}', '{"name": "python", "arguments": {"code": "2"}}'
TAG = ToolCall("python", {"code": "<think>x"})
P1 = J1.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 4.", []),
        ('{"answer": 4}', []),
        ('{"name": "Ann", "age": 4}', []),
        (f"{P1}\n{J2}", [A, B]),
        (f"I try\n<tool_call>\n{J1}\n</tool_call>\n<tool_call>\n{J2}\n</tool_call>", [A, B]),
        (f"<tool_call>{J1}", [A]),  # the end of the turn closes it
        (f"<think>\n<tool_call>{J2}</tool_call>\n</think>\n<tool_call>{J1}</tool_call>", [A]),
        (f"<tool_call>{J2}</tool_call> no</think><tool_call>{J1}</tool_call>", [A]),  # the template opened <think>
        (f"<think><tool_call>{J1}</tool_call>", []),  # it has not stopped thinking
        (f"<tool_call>{J1.replace('1', '</tool_call>')}</tool_call>", [ToolCall("python", {"code": "</tool_call>"})]),
        (f"<tool_call>{J1.replace('1', '</think>')}</tool_call>", [ToolCall("python", {"code": "</think>"})]),
        (f"<think>a</think>{J1.replace('1', '<think>x')}".replace("arguments", "parameters"), [TAG]),
        (f"<tool_call>{J1.replace('1', '<think>x')}</tool_call>", [TAG]),
        (f"[TOOL_CALLS][{J1.replace('1', '<think>x')}]", [TAG]),
        (P1, [A]),
        (f"<|python_tag|>{P1}; {J2}<|eom_id|>", [A, B]),
        ("<|python_tag|>python.call(code='1')<|eom_id|>", [A]),
        ('<|python_tag|>find.call(query="a b", n=-3, of=[1.5, None])', [
            ToolCall("find", {"query": "a b", "n": -3, "of": [1.5, None]})]),
        (f"[TOOL_CALLS][{J1}, {J2}]</s>", [A, B]),
        ('[TOOL_CALLS]python[ARGS]{"code": "1"}[TOOL_CALLS]python[CALL_ID]abc123xyz[ARGS]{"code": "2"}', [A, B]),
        ("<tool_call>\n<function=python>\n<parameter=code>\n1\n</parameter>\n</function>\n</tool_call>", [A]),
        (
            "<tool_call>\n<function=python>\n<parameter=fast>\nTrue\n</parameter>\n</function>\n</tool_call>",
            [ToolCall("python", {"fast": True})],
        ),
        ("<tool_call>\n<function=python>\n</function>\n</tool_call>", [ToolCall("python", {})]),
    ],
)  # fmt: skip
def test_texts_of_every_format(text: str, calls: list[ToolCall]) -> None:
    assert read(text) == calls


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>python(1)</tool_call>", "Expecting value at its character 1"),
        (f"<tool_call>{J1} and more</tool_call>", "</tool_call> after it"),
        ('<tool_call>{"name": "python"}</tool_call>', "has no arguments"),
        ('<tool_call>{"name": "python", "arguments": {"n": NaN}}</tool_call>', "not a finite number"),
        ('<tool_call>{"name": "python", "arguments": {"n": 1e999}}</tool_call>', "not a finite number"),
        ("<tool_call>" + "[" * 100_000, "nested too deeply"),
        ('<tool_call>{"a":' * 1 + "[" * 80 + "]" * 80 + "}</tool_call>", "nested more than"),
        ('<tool_call>{"a":[' + "1," * 20_000 + "1]}</tool_call>", "more than 10000 values"),
        ('<tool_call>{"a":"' + "x" * 300_000 + '"}</tool_call>', "more than 262144 characters"),
        (
            "<tool_call><function=python><parameter=n>three</parameter></function></tool_call>",
            "'three' is not of type integer",
        ),
        ("<tool_call><function=python></tool_call>", "must be <function=NAME>"),
        ("<tool_call><function=python>1</function></tool_call>", "<parameter=KEY>"),
        ("<|python_tag|>print(1)", "Expecting value"),
        ("<|python_tag|>python.call(1)", "its arguments need names"),
        ("<|python_tag|>python.call(code=open('x'))", "with literals as values"),
        ("<|python_tag|>python.call(code=1e999)", "with literals as values"),
        ("<|python_tag|>python.call(code=" + "-" * 19_000, "with literals as values"),
        ("<|python_tag|>python.call(code=" + "[" * 19_000, "with literals as values"),
        ("<|python_tag|>python.call(code=" + "x" * 30_000 + ")", "at most 20000 characters"),
        ("[TOOL_CALLS]nothing", "JSON list of calls"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_says_why(text: str, told: str) -> None:
    (call,) = read(text)
    assert told in call.problem
    assert not call.name


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('["python"]', "must be one JSON object, not a list"),
        ('{"arguments":{}}', "has no name"),
        ('{"name":3,"arguments":{}}', "the name of a tool call must be text, not a number"),
        ('{"name":"python"}', "the tool call of python has no arguments"),
        ('{"name":"python","arguments":"code"}', "the arguments of python must be one JSON object, not text"),
    ],
)
def test_each_mistake_in_a_call_has_a_message_of_its_own(call: str, told: str) -> None:
    (found,) = read(f"<tool_call>{call}</tool_call>")
    assert told in found.problem


def test_structured_calls_are_written_as_text_that_reads_back() -> None:
    calls = [{"function": {"name": "add", "arguments": '{"a": 1}'}}, {"function": {"name": "stop", "arguments": ""}}]
    text = with_calls_written({"role": "assistant", "content": "So:", "tool_calls": calls})
    assert text.startswith("So:\n<tool_call>")
    assert [(c.name, c.arguments) for c in read(text)] == [("add", {"a": 1}), ("stop", {})]
    (torn,) = read(with_calls_written({"role": "assistant", "content": "", "tool_calls": [{"function": 3}]}))
    assert torn.problem


def test_a_message_of_calls_and_bombs_is_read_in_time() -> None:
    """Close to linear: a quadratic reader would need hours for these."""
    began = time.process_time()
    for text in (
        "<tool_call>" * 90_000,
        "<tool_call>x</tool_call>" * 40_000,
        '<tool_call>["' * 80_000,
        '<tool_call>{"a":1,' * 60_000,
        "<tool_call><function=python><parameter=a>" * 25_000,
        "<think>" * 140_000,
        "[TOOL_CALLS]" * 80_000,
        "<tool_call>" + " " * 1_000_000,
        ("<tool_call>x</tool_call>" + " " * 976) * 1000,
    ):
        assert len(read(text)) <= MAX_CALLS
    assert time.process_time() - began < 60


def test_an_error_of_a_long_message_says_where_it_is_in_its_call() -> None:
    bad = f'<tool_call>{J1} <tool_call>{{"name": x}}</tool_call>'.replace(
        f"{J1} ", "x" * 10 + "</tool_call>" + "y" * 300_000
    )
    assert [call.problem.rpartition(" ")[2] for call in read(bad)] == ["1", "10"]


def test_alternatives_of_types_and_empty_arguments_are_read() -> None:
    wanted = {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
    schema = {"type": "function", "function": {"name": "f", "parameters": {"properties": wanted}}}
    text = write_call("f", {"n": 3}, "qwen3_coder")
    assert tool_calls(assistant(text), "auto", [schema]) == [ToolCall("f", {"n": 3})]
    for arguments in ("", None, "{}"):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert tool_calls({**assistant(""), "tool_calls": [call]}) == [ToolCall("f", {})]


@given(st.text(max_size=60), st.sampled_from(["auto", *WRITTEN]))
def test_reading_is_total(text: str, form: CallFormat) -> None:
    for said in (text, f"<tool_call>{text}", f"[TOOL_CALLS]{text}", f"<|python_tag|>{text}", f"<think>{text}"):
        for call in read(said, form):
            assert bool(call.problem) != (call.arguments is not None)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_instruct_2507", "hermes"),
        ("qwen3_6", "qwen3_coder"),
        ("llama3_1", "llama3_json"),
        ("llama3_2", "llama3_json"),
    ],
)
def test_what_a_models_own_template_writes_is_read(template: str, form: CallFormat) -> None:
    """The templates of the models, as the package trl carries them."""
    compiled = compile_template(published()[template])
    call = {"type": "function", "function": {"name": "python", "arguments": ARGUMENTS}}
    before: list[Message] = [{"role": "user", "content": "go"}]
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    common: dict[str, Any] = {"tools": [PYTHON], "bos_token": "", "eos_token": "", "enable_thinking": False}
    prompt = compiled.render(messages=before, add_generation_prompt=True, **common)
    whole = compiled.render(messages=[*before, said], add_generation_prompt=False, **common)
    common_part = len(prompt) if whole.startswith(prompt) else whole.rindex("assistant") + len("assistant")
    text = whole[common_part:].replace("<|end_header_id|>", "")
    for end in ("<|im_end|>", "<|eot_id|>"):
        text = text.partition(end)[0]
    assert read(text) == read(text, form) == [ToolCall("python", ARGUMENTS)], text
    assert json.dumps(PYTHON["function"]["name"]) in prompt, "the template tells the tools"  # type: ignore[index]
