"""Reward functions and tools in a user's files, found without importing them.

The signature decides how a function is called: TRL's (prompts, completions, **columns), verl's (data_source,
solution_str, ground_truth, extra_info), or plain (completion, row).
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from shared.errors import ConfigError
from volley_python.submissions.imports import files_with_imports, metadata_of, text_of, tree_of

type Style = Literal["trl", "verl", "plain"]
_GIVEN = re.compile(r"(?P<file>.+?\.py)(?::(?P<name>[A-Za-z_]\w*))?(?:=(?P<weight>[^=]+))?")
_ROW = frozenset({"row", "example", "sample", "item", "record", "task", "columns", "data"})
_USUAL = ("reward", "compute_score", "reward_func", "reward_function", "reward_fn", "score")
_OF_TRL = ("completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric")
_SIGNATURES = (
    "write def NAME(prompts, completions, **columns) -> list[float], def NAME(completion, row) -> float, or verl's"
    " def compute_score(data_source, solution_str, ground_truth, extra_info)"
)
_OURS = ("volley_rows", "volley_tools", "volley_tool_text")


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One reward function. `takes` are the names of its arguments, None for any."""

    file: Path
    name: str
    style: Style
    weight: float
    takes: tuple[str, ...] | None
    needs: tuple[str, ...]

    @property
    def shown(self) -> str:
        return f"{self.name} of {self.file.name}"

    def check(self, columns: Sequence[str], *, with_object: bool) -> None:
        """Raise ConfigError if it needs a column that the data lack.

        Args:
            with_object: the tools are methods of a class, whose object rewards get as `environments`.
        """
        have, told = {*columns}, ", ".join(columns)
        if self.style == "trl":
            have |= {"prompts", "completions", *(("environments",) if with_object else ())}
            if lacking := [name for name in self.needs if name in _OF_TRL and name not in have]:
                raise ConfigError(
                    f"{self.shown} needs {lacking[0]}, which only TRL's trainer has: rewards get texts, without tokens",
                    f"take completions, or give it a default: {lacking[0]}=None",
                )
        if self.style == "verl":
            have |= {"data_source", "solution_str", "extra_info"} | ({"ground_truth"} & have)
            have |= {"ground_truth"} if "reward_model" in columns else set()
        if missing := [name for name in self.needs if name not in have]:
            near = get_close_matches(missing[0], columns, n=1)
            hint = f"name the column that holds it: --columns {missing[0]}={near[0] if near else 'COLUMN'}"
            if self.style == "trl" and not near and "completions" not in (self.takes or self.needs):
                hint = "the model's answers are called completions; other arguments are columns"
            raise ConfigError(
                f"{self.shown} takes {missing[0]}, which is no column of the data; they have {told}", hint
            )

    def spec(self, module: str, label: str) -> dict[str, Any]:
        """Its part of volley_rows.json."""
        takes = None if self.takes is None else list(self.takes)
        found = {"module": module, "name": self.name, "style": self.style, "weight": self.weight, "takes": takes}
        return {**found, "needs": list(self.needs), "label": label, "shown": self.shown}


def reward_of(given: str) -> RewardFunction:
    """Read `FILE.py[:NAME][=WEIGHT]` and find its function. Raises ConfigError."""
    file, name, weight = _parsed("--reward", given)
    functions = _functions(tree_of(file))
    if name is None:
        name = _only(file, functions)
    if name not in functions:
        near = get_close_matches(name, functions, n=1)
        known = ", ".join(functions) or "no functions"
        raise ConfigError(f"{file} has no function {name}", f"did you mean {near[0]}?" if near else f"it has: {known}")
    style = style_of(functions[name])
    if style is None:
        names = ", ".join(_names(functions[name]))
        raise ConfigError(f"{name}({names}) of {file} has no signature of a reward", _SIGNATURES.replace("NAME", name))
    takes = None if functions[name].args.kwarg else tuple(_names(functions[name]))
    needs = () if style == "plain" else tuple(_required(functions[name]))
    return RewardFunction(file, name, style, weight, takes, needs)


@dataclass(frozen=True, slots=True)
class ToolFile:
    """Tools in a file: all its functions, or the function or class `name`.

    `turns` is the number of the model's messages in an episode; `described` says that a message describes the tools,
    because the model's chat template leaves them out.
    """

    file: Path
    name: str | None
    is_class: bool
    turns: int = 1
    described: bool = False

    def spec(self) -> dict[str, Any]:
        """Its part of volley_rows.json."""
        found = {"module": module_of(self.file), "name": self.name, "shown": self.file.name}
        return {**found, "turns": self.turns, "described": self.described}


def tools_of(given: str) -> ToolFile:
    """Read `FILE.py[:NAME]`. Raises ConfigError."""
    file, name, _ = _parsed("--tools", given)
    tree = tree_of(file)
    known = [one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    if name is not None and name not in known:
        raise ConfigError(f"{file} has no function or class {name}", f"it has: {', '.join(known) or 'none'}")
    classes = [one.name for one in tree.body if isinstance(one, ast.ClassDef)]
    if name is None and classes and len(classes) == len(known):
        if len(classes) > 1:
            raise ConfigError(
                f"{file} has the classes {', '.join(classes)}", f"name one: --tools {file.name}:{classes[0]}"
            )
        name = classes[0]
    return ToolFile(file, name, name in classes)


def _parsed(option: str, given: str) -> tuple[Path, str | None, float]:
    match = _GIVEN.fullmatch(given)
    if match is None:
        raise ConfigError(f"{option} {given} names no Python file", f"write {option} FILE.py or {option} FILE.py:NAME")
    file = Path(match["file"]).expanduser()
    if not file.is_file():
        raise ConfigError(f"{option} {given}: {file} does not exist", "name an existing Python file")
    try:
        weight = float(match["weight"] or 1)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ConfigError(f"{option} {given}: {match['weight']} is no weight", "write a number: FILE.py:NAME=0.5")
    return file.absolute(), match["name"], weight


def _only(file: Path, functions: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]) -> str:
    """The only function with the signature of a reward. Raises ConfigError."""
    found = [name for name, one in functions.items() if name[0] != "_" and style_of(one) is not None]
    usual = [name for name in _USUAL if name in found]
    if len(found) == 1 or usual:
        return found[0] if len(found) == 1 else usual[0]
    if found:
        raise ConfigError(
            f"{file} has {len(found)} reward functions: {', '.join(found)}",
            f"name one: --reward {file.name}:{found[0]}; give --reward several times to add them up",
        )
    known = [name for name in functions if name[0] != "_"]
    told = f"{', '.join(known)}: no signature of a reward" if known else "it has no functions"
    raise ConfigError(f"{file}: {told}", _SIGNATURES.replace("NAME", known[0] if known else "reward"))


def style_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Style | None:
    """How a function is called, by the names of its arguments; None if they do not tell."""
    names = _names(function)
    if {"prompts", "completions", "environments", *_OF_TRL} & {*names}:
        return "trl"
    if "solution_str" in names:
        return "verl"
    required = _required(function)
    positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if len(required) == 2 and positional[:2] == required and (positional[1] in _ROW or _is_dict(function)):
        return "plain"
    return None


def _is_dict(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if the second argument is annotated as a mapping."""
    second = (*function.args.posonlyargs, *function.args.args)[1].annotation
    return second is not None and bool(re.match(r"(typing\.)?(dict|Dict|Mapping)\b", ast.unparse(second)))


def _names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _required(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    plain = positional[: len(positional) - len(given.defaults)]
    keyword = [one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return [one.arg for one in (*plain, *keyword)]


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


def module_of(file: Path) -> str:
    """Name under which a file is imported. Raises ConfigError for a name that is taken."""
    name = re.sub(r"\W", "_", file.stem)
    if name in sys.stdlib_module_names or name in _OURS or not name.isidentifier():
        raise ConfigError(f"{file} cannot be imported as {name}, a name that is taken", "rename the file")
    return name


def files_of(file: Path) -> dict[str, bytes]:
    """A file and the modules beside it that it imports, by their names in the archive. Raises ConfigError."""
    found = files_with_imports(file, f"{module_of(file)}.py")
    return {name: text_of(path).encode() for name, path in found.items()}


def dependencies_of(files: Mapping[str, bytes]) -> list[str]:
    """Dependencies that files declare in their PEP 723 blocks. Raises ConfigError."""
    declared = (metadata_of(name, content.decode()).get("dependencies", ()) for name, content in files.items())
    return list(dict.fromkeys(one for some in declared for one in some))
