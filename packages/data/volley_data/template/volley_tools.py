"""Functions as tools: OpenAI's schemas from their annotations and docstrings, and calls of them.

The schemas are those of transformers' `get_json_schema`, but that a bare `list` is an array, `name (type): text`
describes an argument too, and an annotation that JSON has no type for is refused. Imports nothing of Volley; runs in
the sandbox.
"""

import copy
import importlib
import inspect
import json
import re
import types
import typing

import volley_tool_text

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_ABOUT = re.compile(r"^(.*?)[\n\s]*(Args:|Returns:|Raises:|\Z)", re.DOTALL)
_ARGUMENTS = re.compile(r"\n\s*Args:\n\s*(.*?)[\n\s]*(Returns:|Raises:|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"(?:^|\n)\s*(\w+)(?: \([^)\n]*\))?:\s*(.*?)\s*(?=\n\s*\w+(?: \([^)\n]*\))?:|\Z)", re.DOTALL)
_RETURNED = re.compile(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(Raises:|\Z)", re.DOTALL)


class NoTool(Exception):
    """A function that cannot be a tool, and why."""


class OwnTools:
    """Tools of one episode.

    Args:
        spec: `module`, and `name` of a class or function, or None for all functions; `described` if a message has to
        describe them; `turns`, the number of messages of an episode.
    """

    def __init__(self, spec):
        module = importlib.import_module(spec["module"])
        given = getattr(module, spec["name"]) if spec["name"] else None
        if given is None:
            found = [one for name, one in vars(module).items() if name[0] != "_" and inspect.isfunction(one)]
            functions = [one for one in found if one.__module__ == module.__name__]
        else:
            self.owner = given() if isinstance(given, type) else None
            functions = [given] if self.owner is None else _methods(self.owner)
        self.owner = getattr(self, "owner", None)
        if not functions:
            raise NoTool(f"{spec['shown']} has no functions: each tool is one, with annotations and a docstring")
        self.functions = {one.__name__: one for one in functions}
        self.turns, self.described = spec["turns"], spec["described"]

    def schemas(self):
        return [schema(one) for one in self.functions.values()]

    def opening(self, messages):
        """Messages with a description of the tools in the first, if the model's chat template leaves them out."""
        if not self.described:
            return messages
        return volley_tool_text.add_to_system(messages, volley_tool_text.describe_tools(self.schemas()))

    def start(self, columns):
        """Reset the tools' object, if it has a method reset. Returns its text, which the prompt goes on with."""
        reset = getattr(self.owner, "reset", None)
        if reset is None:
            return ""
        takes = inspect.signature(reset).parameters.values()
        whole = any(one.kind is one.VAR_KEYWORD for one in takes)
        names = columns if whole else [one.name for one in takes if one.name in columns]
        return reset(**{name: columns[name] for name in names}) or ""

    async def call(self, call):
        """Call a tool. Returns its message, and whether it succeeded; a mistake of the model is told in the message."""
        name, ok = call.get("name", ""), True
        try:
            if "problem" in call:
                raise NoTool(call["problem"])
            if name not in self.functions:
                raise NoTool(f"there is no tool {name}; there are: {', '.join(self.functions)}")
            value = self.functions[name](**copy.deepcopy(call["arguments"]))
            if inspect.isawaitable(value):
                value = await value
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:  # an answer to the model
            text, ok = f"error: {error if isinstance(error, NoTool) else f'{type(error).__name__}: {error}'}", False
        return {"role": "tool", "name": str(name), "content": text}, ok


def split_calls(text):
    """Split an answer into its text and its calls, as OpenAI writes them; an unreadable one has a `problem` instead."""
    calls = []
    for found in _CALL.findall(text):
        try:
            one = json.loads(found)
        except ValueError:
            one = None
        if isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("arguments"), dict):
            function = {"name": one["name"], "arguments": one["arguments"]}
        else:
            function = {"problem": "a tool call must be one JSON object with name and arguments"}
        calls.append({"type": "function", "id": f"call_{len(calls)}", "function": function})
    return (_CALL.sub("", text).strip() if calls else text), calls


def schema(function):
    """OpenAI's schema of a function. Raises NoTool naming what it lacks."""
    name, doc = function.__name__, (inspect.getdoc(function) or "").strip()
    if not doc:
        raise NoTool(f"the tool {name} has no docstring: describe it, and its arguments below Args:")
    about, arguments, returned = _parts(doc)
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for one in inspect.signature(function).parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise NoTool(f"the tool {name} takes *{one.name}: name each argument")
        if one.name not in hints:
            raise NoTool(f"the argument {one.name} of the tool {name} has no annotation: write {one.name}: str")
        if one.name not in arguments:
            raise NoTool(f"the docstring of the tool {name} does not describe {one.name}: add it below Args:")
        described = _type(hints[one.name], name)
        text = arguments[one.name]
        if choices := re.search(r"\(choices:\s*(.*?)\)\s*$", text, re.IGNORECASE):
            described["enum"] = _choices(choices[1], name, one.name)
            text = text[: choices.start()].strip()
        properties[one.name] = {**described, "description": text}
        if one.default is one.empty:
            required.append(one.name)
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    found = {"name": name, "description": about, "parameters": parameters}
    if "return" in hints:
        found["return"] = {
            **_type(hints["return"], name),
            **({"description": returned} if returned is not None else {}),
        }
    return {"type": "function", "function": found}


def _choices(text, tool, argument):
    try:
        return [value.strip() for value in json.loads(text)]
    except (ValueError, AttributeError):
        raise NoTool(f"the choices of {argument} of the tool {tool} are no JSON list of texts: {text[:60]}") from None


def _methods(owner):
    found = inspect.getmembers(owner, inspect.ismethod)
    return [one for name, one in found if name[0] != "_" and name != "reset"]


def _parts(doc):
    """Description, arguments and returned value of a docstring in Google's style, as transformers reads it."""
    below, given = _ARGUMENTS.search(doc), _RETURNED.search(doc)
    lines = [line for line in below[1].strip().split("\n") if line.strip()] if below else []
    arguments = {one[1]: re.sub(r"\s*\n+\s*", " ", one[2].strip()) for one in _ARGUMENT.finditer("\n".join(lines))}
    return _ABOUT.search(doc)[1].strip(), arguments, given[1].strip() if given else None


def _type(hint, tool):
    """JSON schema of an annotation, as transformers writes it. Raises NoTool."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return {}
    if origin is None and isinstance(hint, type) and hint in _TYPES:
        return {"type": _TYPES[hint]}
    if hint is tuple or origin is list:
        return {"type": "array", **({"items": _type(inner[0], tool)} if inner else {})}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_type(one, tool) for one in inner]}
    if origin is dict:
        return {"type": "object", **({"additionalProperties": _type(inner[1], tool)} if inner else {})}
    if origin is typing.Literal and {*map(type, inner)} <= {*_TYPES}:
        kinds = list(dict.fromkeys(_TYPES[type(value)] for value in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return _union(inner, tool)
    raise NoTool(f"the tool {tool} has the annotation {hint}: use str, int, float, bool, list, dict, Literal or None")


def _union(inner, tool):
    kinds = [_type(one, tool) for one in inner if one is not type(None)]
    if len(kinds) == 1:
        found = dict(kinds[0])
    elif all(isinstance(kind.get("type"), str) for kind in kinds):
        found = {"type": sorted(kind["type"] for kind in kinds)}
    else:
        found = {"anyOf": kinds}
    return {**found, "nullable": True} if type(None) in inner else found
