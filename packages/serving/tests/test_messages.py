"""Messages as files and OpenAI's clients write them become what chat templates expect."""

import pytest

from shared.errors import InputError
from shared.models.messages import arguments_of
from volley_serving.templates.messages import read_messages, read_tools


def call(**function):
    return {"id": "1", "type": "function", "function": {"name": "add", **function}}


def assistant(**keys):
    return read_messages([{"role": "assistant", **keys}])[0]


@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}])
def test_arguments_of_a_call_stay_as_they_are_given(arguments):
    found = assistant(content=None, tool_calls=[call(arguments=arguments)])
    assert found == {"role": "assistant", "content": "", "tool_calls": [call(arguments=arguments)]}
    assert arguments_of(found["tool_calls"][0]) == {"a": 2}


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_missing_arguments_are_an_empty_object(arguments):
    assert assistant(tool_calls=[call(arguments=arguments)])["tool_calls"] == [call(arguments={})]


def test_a_call_may_hold_its_function_itself():
    assert assistant(tool_calls=[{"name": "add", "arguments": "{}"}])["tool_calls"] == [
        {"name": "add", "arguments": {}}
    ]


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]


def test_null_keys_are_left_out_and_others_kept():
    given = {"role": "assistant", "content": "a", "tool_calls": None, "reasoning_content": None, "name": "x"}
    assert read_messages([given]) == [{"role": "assistant", "content": "a", "name": "x"}]
    assert "tool_calls" not in assistant(content="a", tool_calls=[])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "function_call"])
def test_content_may_be_missing_beside_another_key(key):
    assert assistant(**{key: "x"}) == {"role": "assistant", key: "x", "content": ""}


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": None}, "its content is null"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "no text"),
        ({"content": [{"type": "thinking", "thinking": "x"}]}, "a part of type thinking"),
        ({"content": [{"type": "reasoning", "text": "x"}]}, "a part of type reasoning"),
        ({"content": "", "reasoning_content": 3}, "its reasoning_content is a number"),
        ({"tool_calls": {}, "content": None}, "its content is null"),
        ({"tool_calls": "add"}, "tool_calls is text, not a list"),
        ({"tool_calls": [3]}, r"tool_calls\[0\] is a number, not an object"),
        ({"tool_calls": [{"function": "add"}]}, "its function is text"),
        ({"tool_calls": [call(), {"function": {"arguments": {}}}]}, r"tool_calls\[1\] has no name"),
        ({"tool_calls": [{"name": 3}]}, "its name is a number"),
        ({"tool_calls": [call(arguments=[1])]}, "its arguments are a list"),
        ({"tool_calls": [call(arguments="{'a': 2}")]}, "text that is not a JSON object"),
    ],
)
def test_what_no_template_can_write_is_named(message, named):
    with pytest.raises(InputError, match=named):
        assistant(**message)


def test_tools_may_be_json_text():
    assert read_tools('[{"name": "add"}]') == read_tools([{"name": "add"}])
    assert read_tools(None) == read_tools([]) == read_tools("") == []
    with pytest.raises(InputError, match="not a list of JSON schemas"):
        read_tools("add")
