"""Texts of the rules that a configuration names: files found, read and looked through, but not run."""

from __future__ import annotations

import ast
from pathlib import Path

from shared.errors import ConfigError
from shared.files.reading import read_file
from shared.own_rules import CREDIT, CREDITS, HINT, MAX_BYTES, digest
from shared.run import sources

_VARYING = {"datetime", "random", "secrets", "time", "uuid"}
"""Modules whose functions return something else at each call."""


def rule_text(key: str, value: str, base: Path) -> str:
    """Return the text of a rule below its name and digest, as a loaded configuration holds it. Raises ConfigError.

    Args:
        key: of the configuration.
        value: name of the rule, FILE.py:FUNCTION or package.module:FUNCTION.
        base: folder for relative paths and the first place to look for modules.
    """
    name, _, function = value.rpartition(":")
    where, hint = f"{key}={value[:200]}", f"choose {' or '.join(CREDITS)}, or {HINT}" if key == CREDIT else HINT
    if not name or not function.isidentifier() or not sources.is_source(value):
        raise ConfigError(f"{where} names no function", hint)
    try:
        path = _file(sources.find(value, base))
        text = read_file(path, MAX_BYTES).decode()
        tree = ast.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.detail}", hint) from error
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}", f"a rule is a file of at most {MAX_BYTES} bytes") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where} is not Python: {error}", "mend the file") from error
    if problem := _problem(tree, text, name.partition(".")[0], function):
        raise ConfigError(f"{where}: {problem}")
    return f"# {path.name if name.endswith('.py') else name}:{function} sha256={digest(text)}\n{text}"


def _file(found: sources.FoundSource) -> Path:
    """Return the file of a function. Raises ConfigError if it is no single file."""
    path, (module, colon, _) = found.path, (found.entry or "").partition(":")
    if colon and path.is_dir():
        inner = path.joinpath(*module.split(".")[1:])
        path = inner.with_suffix(".py") if inner.with_suffix(".py").is_file() else inner / "__init__.py"
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{path} is not a Python file")
    return path


def _problem(tree: ast.Module, text: str, package: str, function: str) -> str | None:
    """Explain why the file cannot be a rule; None if it can."""
    if "${" in text:
        return "a rule may not contain ${, which configurations replace: write '$' + '{'"
    defined = {name: type(node) for node in tree.body for name in _defined(node)}
    if (kind := defined.get(function)) in (ast.ClassDef, ast.AsyncFunctionDef):
        return f"{function} is {'a class' if kind is ast.ClassDef else 'async'}, not a function: define it with def"
    if kind is None:
        return f"the file defines no {function} at its top level; it defines {', '.join(defined) or 'nothing'}"
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["." if node.level else node.module or ""]
        tops, line = {name.partition(".")[0] for name in names}, getattr(node, "lineno", 1)
        if tops & {"", package}:
            return f"line {line} imports another file of its package, but a rule is one file"
        if varying := sorted(tops & _VARYING):
            return f"line {line} imports {varying[0]}, but a rule may depend on nothing but its inputs"
    return None


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
