"""The env service reads tool calls as SGLang's own parsers do, for the formats that this engine knows."""

import json

import pytest
from sgl_jax.srt.entrypoints.openai.protocol import Function, Tool
from sgl_jax.srt.function_call.function_call_parser import FunctionCallParser

from services.env.episode_types import assistant
from volley_serving.dialects.calls import tool_calls, write_call

SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "n": {"type": "integer"}, "rows": {"type": "array"}},
        },
    },
}
FIRST = {"code": 'print("<b>")\nx = {"a": [1]}', "n": 3, "rows": [1, {"a": "é"}]}
SECOND = {"code": "import os"}


@pytest.mark.parametrize(("theirs", "ours"), [("qwen25", "hermes"), ("qwen3_coder", "qwen3_coder")])
def test_calls_are_those_that_sglang_reads(theirs, ours):
    calls = [write_call("python", arguments, ours) for arguments in (FIRST, SECOND)]
    if ours == "hermes":  # SGLang wants the line breaks that the template writes
        calls = [call.replace("<tool_call>", "<tool_call>\n") for call in calls]
        calls = [call.replace("</tool_call>", "\n</tool_call>") for call in calls]
    text = "I look.\n" + "\n".join(calls)
    parser = FunctionCallParser([Tool(type="function", function=Function(**SCHEMA["function"]))], theirs)
    found = [(call.name, json.loads(call.parameters)) for call in parser.parse_non_stream(text)[1]]
    read = [(call.name, call.arguments) for call in tool_calls(assistant(text), ours, [SCHEMA])]
    assert read == found == [("python", FIRST), ("python", SECOND)]
