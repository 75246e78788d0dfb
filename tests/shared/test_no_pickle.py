"""Nothing is unpickled and no text is run as code: every call and import that could is found in the syntax trees of all
sources.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("services", "shared", "volley", "packages", "docker", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MODULES = {
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
    "multiprocessing",
    "pandas",
}
CALLS = {
    "eval",
    "exec",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "numpy.load",
    "np.load",
    "recv_pyobj",
}
EXCEPTIONS = {
    "packages/sandbox/tests/tools/test_arithmetic.py: eval": "the reference for the calculator's arithmetic",
    "packages/sandbox/volley_sandbox/sandbox/inside/host.py: exec": "runs submitted code, in a sandbox",
    "packages/environments/volley_environments/code/inside.py: exec": "runs a data set's tests, in a sandbox",
    "packages/dashboard/volley_dashboard/tracking/tracker_program.py: pandas": "makes trackio's tables, and reads none",
    "shared/rule_code.py: exec": "the user's own rule, which they named in the run",
    "packages/python/tests/test_source.py: exec": "runs the source that was taken out of a made-up program",
    "tests/support/hostile.py: pickle": "makes the payloads that must not be unpickled",
    "tests/support/hostile.py: allow_pickle=True": "the same, as a numpy file",
}


def found(tree: ast.AST) -> Iterator[str]:
    """Names of what is dangerous in a source."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Call(
                func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield from [name] * (name.partition(".")[0] in MODULES)
            case ast.Call(func=func, keywords=keywords) if (name := dotted(func)) in CALLS or name.rpartition(".")[
                2
            ] == "recv_pyobj":
                if not (name.endswith((".load",)) and is_safe(name, node.args, keywords)):
                    yield name
            case ast.keyword(arg="allow_pickle" | "trust_remote_code" | "weights_only", value=value) as keyword:
                if ast.unparse(value) != str(keyword.arg == "weights_only"):
                    yield f"{keyword.arg}={ast.unparse(value)}"


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or an attribute; what is neither is left out."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
    return ""


def is_safe(name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    """numpy loads no objects unless `allow_pickle` (judged by itself) says so; yaml is safe with the safe
    loader alone.
    """
    if name in ("np.load", "numpy.load"):
        return True
    loaders = [ast.unparse(value) for value in [*args[1:], *(k.value for k in keywords if k.arg == "Loader")]]
    return name == "yaml.load" and loaders != [] and all("Safe" in loader for loader in loaders)


def test_no_source_unpickles_or_evaluates():
    assert len(SOURCES) > 150
    dangerous = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in found(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert dangerous == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import concurrent.futures, multiprocessing.pool",
        "importlib.import_module('dill')",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=trusted)",
        "torch.load(path)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.UnsafeLoader)",
        "yaml.unsafe_load(text)",
        "eval('1')",
        "socket.recv_pyobj()",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_search_finds(source: str):
    assert list(found(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "np.load(path)",
        "np.load(path, allow_pickle=False)",
        "yaml.load(t, Loader=yaml.SafeLoader)",
        "yaml.safe_load(t)",
        "re.compile(x)",
    ],
)
def test_the_search_leaves_alone(source: str):
    assert not list(found(ast.parse(source)))
