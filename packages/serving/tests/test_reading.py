"""The text of an answer becomes reasoning, content and calls, however it is cut while it arrives."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volley_serving.dialects.reading import AnswerReader
from volley_serving.dialects.records import AnswerContent, Call, Reasoning

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TRICKY = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call> <think>"}}</tool_call>'
ADD = ("add", {"a": 1})


def read(text, cuts=(), tools=TOOLS, opened="", **more):
    reader = AnswerReader(tools, opened, **more)
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [piece for a, b in pairwise(places) for piece in reader.add(text[a:b])]
    pieces += reader.end()
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        "".join(piece.text for piece in pieces if isinstance(piece, AnswerContent)),
        [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, Call)],
    )


CASES = [
    ("", ("", "", [])),
    ("Hello", ("", "Hello", [])),
    ("  a < b <tool", ("", "  a < b <tool", [])),
    ("<think>\nOne.\n</think>\n\nTwo.", ("One.", "Two.", [])),
    ("\n<think>Never closed", ("Never closed", "", [])),
    (CALL, ("", "", [ADD])),
    (f"I add.\n{CALL}\n{CALL}\n", ("", "I add.", [ADD, ADD])),
    (f"<think>{CALL}</think>{CALL}", (CALL, "", [ADD])),
    (f"{CALL}Done", ("", "Done", [ADD])),
    (f"{CALL}\n\nDone ", ("", "Done ", [ADD])),
    (TRICKY, ("", "", [("add", {"a": "</tool_call> <think>"})])),
    ("<tool_call>nonsense</tool_call> or", ("", "<tool_call>nonsense</tool_call> or", [])),
    ('{"name": "add", "parameters": {"a": 1}}', ("", "", [ADD])),
    ('{"a": 1}', ("", '{"a": 1}', [])),
    ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', ("", "", [ADD])),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", "", [ADD])),
    ('<tool_call>{"name": "add", "argu', ("", '<tool_call>{"name": "add", "argu', [])),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
@given(cuts=st.lists(st.integers(0, 80), max_size=6))
def test_an_answer_is_read_alike_however_it_is_cut(text, expected, cuts):
    assert read(text, cuts) == expected
    assert read(text, range(len(text))) == expected


def test_calls_are_text_where_the_request_has_no_tools():
    assert read(CALL, tools=()) == ("", CALL, [])
    assert read("<think>a</think>b", reasoning=False) == ("", "<think>a</think>b", [])


def test_what_the_prompt_has_opened_belongs_to_the_answer():
    assert read("One.</think>Two.", opened="<think>") == ("One.", "Two.", [])
    assert read(' {"a": 1}}</tool_call>', opened='<tool_call>{"name": "add", "arguments":') == ("", "", [ADD])
