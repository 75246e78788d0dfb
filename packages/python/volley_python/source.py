"""Source of a function that a Python program hands over, such as a reward: it runs elsewhere, from a file."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import symtable
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

_HINT = 'write it with `def` into a file, and give "FILE.py:NAME" instead'


def source_of(*functions: Callable[..., Any]) -> str:
    """Return Python source that defines the functions, by their names, at the top level of a module.

    Functions of an imported module come with their whole module. Those of the running script or notebook come with the
    imports, functions and values of that script or notebook that they use, so that none of its other statements run
    again. Raises ConfigError if there is no source, if it uses a name that is not defined there, or if the functions
    are of several modules.
    """
    names = [_name_of(one) for one in functions]
    modules = {one.__module__ for one in functions}
    if len(modules) > 1:
        raise ConfigError(f"{', '.join(names)} are of several modules: {', '.join(sorted(modules))}", _HINT)
    module = sys.modules.get(modules.pop())
    if module is not None and module.__name__ != "__main__":
        try:
            return inspect.getsource(module)
        except (OSError, TypeError) as error:
            raise _without_source(names[0]) from error
    return definitions(_of_main(names[0]), names)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function of a module's top level. Raises ConfigError."""
    if isinstance(function, functools.partial) or not inspect.isfunction(inspect.unwrap(function)):
        kind = type(function).__name__
        raise ConfigError(f"{function!r} is a {kind}, not a function with source", _HINT)
    name, qualified = function.__name__, function.__qualname__
    if name == "<lambda>":
        raise ConfigError("a lambda has no name under which it can be found", _HINT)
    if qualified != name:
        raise ConfigError(f"{qualified} is defined inside another function or class", "define it at the top level")
    return name


def _of_main(name: str) -> Sequence[str]:
    """Return the cells of the running notebook, or the text of the running script. Raises ConfigError."""
    main = sys.modules["__main__"]
    cells: list[str] | None = getattr(main, "_ih", None)  # IPython's history of inputs
    if cells is not None:
        return cells
    file: str | None = getattr(main, "__file__", None)
    if file is None:
        raise _without_source(name)
    try:
        return [Path(file).read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise _without_source(name) from error


def _without_source(name: str) -> ConfigError:
    return ConfigError(f"the source of {name} cannot be read: it was typed or made at run time", _HINT)


def definitions(texts: Sequence[str], names: Sequence[str]) -> str:
    """Return the statements of the texts that define the names, and those that define what these use, in their order.

    A later definition of a name replaces an earlier one. A text that is not Python is skipped. Raises ConfigError if a
    name that is used is neither defined nor built in.
    """
    statements = [one for text in texts for one in _statements(text)]
    latest = {bound: i for i, one in enumerate(statements) for bound in _bound(one)}
    for name in names:
        if name not in latest:
            raise _without_source(name)
    wanted, open_names = set[int](), list(names)
    while open_names:
        used = open_names.pop()
        if used in latest and latest[used] not in wanted:
            wanted.add(latest[used])
            open_names += sorted(_used(statements[latest[used]]))
        elif used not in latest and not hasattr(builtins, used) and used not in ("__name__", "__file__"):
            raise ConfigError(
                f"{', '.join(names)} uses {used}, which the program does not define at its top level",
                f"define or import {used} there by name",
            )
    wanted |= {i for i, one in enumerate(statements) if one.startswith("from __future__ import ")}
    return "\n\n".join(statements[i] for i in sorted(wanted)) + "\n"


def _statements(text: str) -> Iterator[str]:
    """Yield the source of each top-level statement, with its decorators."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in tree.body:
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(one.lineno for one in decorators)])
        yield "\n".join(lines[first - 1 : node.end_lineno])


def _bound(statement: str) -> set[str]:
    """Names that a statement binds at the top level."""
    return {symbol.get_name() for symbol in _table(statement).get_symbols() if _is_bound(symbol)}


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported()


def _used(statement: str) -> set[str]:
    """Global names that a statement uses, in inner functions too."""
    found, tables = set[str](), [_table(statement)]
    while tables:
        table = tables.pop()
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or (is_module and not _is_bound(symbol))):
                found.add(symbol.get_name())
        tables += table.get_children()
    return found


def _table(statement: str) -> symtable.SymbolTable:
    return symtable.symtable(statement, "<program>", "exec")
