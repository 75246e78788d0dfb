"""`make sizes`: lines of the core and of each package, and lines that each process of a quickstart imports.

Imports are read from the sources, also those inside functions. What a package adds by its entry points is counted where
its commands and services run, not in the core.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import grimp

from volley.layout import PROJECT

CORE = ("services", "shared", "volley")
PROCESSES: Mapping[str, Sequence[str]] = {
    "volley quickstart": ("volley.__main__", "volley.commands.quickstart"),
    "env": ("services.env.__main__", "services.env.app"),
    "orchestrator": ("services.orchestrator.__main__", "services.orchestrator.app"),
    "rollout": ("services.rollout.__main__", "services.rollout.app", "services.rollout.engines.sglang_jax.worker"),
    "trainer": ("services.trainer.__main__", "services.trainer.app"),
}
"""The modules that each process starts with; a service's `__main__` imports its `app` once the command line is read."""


def main() -> None:
    graph = grimp.build_graph(*CORE, cache_dir=None)
    found = {
        "folders": {name: _lines(PROJECT.joinpath(name).rglob("*.py")) for name in (*CORE, *_packages())},
        "processes": {name: _closure(graph, roots) for name, roots in PROCESSES.items()},
        "one quickstart": _closure(graph, [root for roots in PROCESSES.values() for root in roots]),
    }
    if "--json" in sys.argv:
        print(json.dumps(found, indent=2))
        return
    for name, lines in found["folders"].items():
        print(f"{lines:8,}  {name}")
    print(f"{sum(found['folders'][name] for name in CORE):8,}  core: {', '.join(CORE)}")
    for name, (modules, lines) in {**found["processes"], "one quickstart": found["one quickstart"]}.items():
        print(f"{lines:8,}  imported by {name} ({modules} modules)")


def _packages() -> list[str]:
    return [str(path.relative_to(PROJECT)) for path in sorted(PROJECT.glob("packages/*/volley_*"))]


def _lines(files: Iterable[Path]) -> int:
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files)


def _closure(graph: grimp.ImportGraph, roots: Sequence[str]) -> tuple[int, int]:
    """Return the number of modules that are imported, directly or not, and their lines."""
    modules = {module for root in roots for module in (root, *graph.find_upstream_modules(root))}
    modules |= {module.rsplit(".", n)[0] for module in modules for n in range(1, module.count(".") + 1)}
    return len(modules), sum(map(_lines_of, modules))


@cache
def _lines_of(module: str) -> int:
    spec = find_spec(module)
    return 0 if spec is None or spec.origin is None else _lines([Path(spec.origin)])


if __name__ == "__main__":
    main()
