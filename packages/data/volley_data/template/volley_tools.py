"""Functions as tools: OpenAI's schemas from their annotations and docstrings, and calls of them.

The schemas are those of transformers' `get_json_schema`. Imports nothing of Volley; runs in the sandbox.
"""

import copy
import importlib
import inspect
import json
import re
import types
import typing

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", typing.Any: None}


class NoTool(Exception):
    """A function that cannot be a tool, and why."""


class OwnTools:
    """Tools of one episode. Args: spec: `module`, and `name` of a class or function, or None for all functions."""

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

    def schemas(self):
        return [schema(one) for one in self.functions.values()]

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
        """Call a tool. Returns its message; a mistake of the model is told in it."""
        name, arguments = call["name"], call["arguments"]
        try:
            if name not in self.functions:
                raise NoTool(f"there is no tool {name}; there are: {', '.join(self.functions)}")
            value = self.functions[name](**copy.deepcopy(arguments))
            if inspect.isawaitable(value):
                value = await value
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:  # an answer to the model
            text = f"error: {error if isinstance(error, NoTool) else f'{type(error).__name__}: {error}'}"
        return {"role": "tool", "name": str(name), "content": text}


def split_calls(text):
    """Split an answer into its text and its well-formed calls, as OpenAI writes them."""
    calls = []
    for found in _CALL.findall(text):
        try:
            one = json.loads(found)
        except ValueError:
            continue
        if isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("arguments"), dict):
            function = {"name": one["name"], "arguments": one["arguments"]}
            calls.append({"type": "function", "id": f"call_{len(calls)}", "function": function})
    return (_CALL.sub("", text).strip() if calls else text), calls


def schema(function):
    """OpenAI's schema of a function. Raises NoTool naming what it lacks."""
    name, doc = function.__name__, inspect.getdoc(function)
    if not doc:
        raise NoTool(f"the tool {name} has no docstring: describe it, and its arguments below Args:")
    about, arguments, returned = _parts(doc)
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for one in inspect.signature(function).parameters.values():
        if one.name not in hints:
            raise NoTool(f"the argument {one.name} of the tool {name} has no annotation: write {one.name}: str")
        if one.name not in arguments:
            raise NoTool(f"the docstring of the tool {name} does not describe {one.name}: add it below Args:")
        described = _type(hints[one.name], name)
        text = arguments[one.name]
        if choices := re.search(r"\(choices:\s*(.*?)\)\s*$", text, re.DOTALL | re.IGNORECASE):
            described["enum"] = [value.strip() for value in json.loads(choices[1])]
            text = text[: choices.start()].strip()
        properties[one.name] = {**described, "description": text}
        if one.default is one.empty:
            required.append(one.name)
    parameters = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    found = {"name": name, "description": about, "parameters": parameters}
    if "return" in hints and hints["return"] is not type(None) and returned is not None:
        found["return"] = {**_type(hints["return"], name), "description": returned}
    return {"type": "function", "function": found}


def _methods(owner):
    found = inspect.getmembers(owner, inspect.ismethod)
    return [one for name, one in found if name[0] != "_" and name != "reset"]


def _parts(doc):
    """Description, arguments and returned value of a docstring in Google's style."""
    about = re.split(r"\n\s*(?:Args|Returns|Raises):\s*\n", doc)[0].strip()
    below = re.search(r"\n\s*Args:\n\s*(.*?)[\n\s]*(?=\n\s*(?:Returns|Raises):|\Z)", "\n" + doc, re.DOTALL)
    given = re.search(r"\n\s*Returns:\n\s*(?:[^)\n]*?:\s*)?(.*?)[\n\s]*(?=\n\s*Raises:|\Z)", "\n" + doc, re.DOTALL)
    arguments = {}
    if below:
        for line in re.finditer(r"^\s*(\w+)[^:\n]*:\s*(.*?)(?=^\s*\w+[^:\n]*:|\Z)", below[1], re.DOTALL | re.MULTILINE):
            arguments[line[1]] = re.sub(r"\s*\n+\s*", " ", line[2].strip())
    return about, arguments, given[1].strip() if given else None


def _type(hint, tool):
    """JSON schema of an annotation, as transformers writes it. Raises NoTool."""
    if hint in _TYPES:
        return {"type": _TYPES[hint]} if _TYPES[hint] else {}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is list or origin is list:
        return {"type": "array", **({"items": _type(inner[0], tool)} if inner else {})}
    if hint is dict or origin is dict:
        return {"type": "object", **({"additionalProperties": _type(inner[1], tool)} if inner else {})}
    if origin is typing.Literal:
        kinds = {_TYPES[type(value)] for value in inner}
        return {"type": kinds.pop() if len(kinds) == 1 else sorted(kinds), "enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return _union(inner, tool)
    raise NoTool(f"the tool {tool} has the annotation {hint}: use str, int, float, bool, list, dict, Literal or None")


def _union(inner, tool):
    kinds = [_type(one, tool) for one in inner if one is not type(None)]
    if len(kinds) == 1:
        found = dict(kinds[0])
    elif all(isinstance(kind.get("type"), str) and len(kind) == 1 for kind in kinds):
        found = {"type": sorted(kind["type"] for kind in kinds)}
    else:
        found = {"anyOf": kinds}
    return {**found, "nullable": True} if type(None) in inner else found
