"""`python -m tools.docs.reference FILE`: write the references of the documentation site, made from the code.

The file is a JSON object, {name: Markdown}. A page names the place of a reference as `<!-- reference: NAME -->`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared import errors
from shared.services import SERVICES
from tools.docs.keys import chapters
from volley.__main__ import all_commands, parser
from volley_commands.configuration import schema

_ERROR = re.compile(r"^ *[│├└─ ]*(\w+)  +(.+?)(?:  +\d{3})?$", re.MULTILINE)


def main(path: Path) -> None:
    services = {name: _described(name) for name in SERVICES}
    references = {
        "configuration": configuration(),
        "commands": commands(),
        "errors": error_classes(),
        "metrics": metrics({name: found["metrics"] for name, found in services.items()}),
        **{f"routes-{name}": routes(found["openapi"]) for name, found in services.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(references), encoding="utf-8")


def _described(service: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.docs.service", service]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True).stdout)


def configuration() -> str:
    """Return a chapter for each section of the configuration: its description, and its keys."""
    parts = []
    for chapter in chapters(schema()):
        of = any(row[3] != "all" for row in chapter.rows)
        head = ("key", "type", "default", "only for")[: 4 if of else 3]
        rows = [
            (f"`{key}`", kind, f"`{default}`" if default else "", "" if names == "all" else names)[: len(head)]
            for key, kind, default, names in chapter.rows
        ]
        parts += [f"### `{chapter.path}`" if chapter.path else "### Sections", chapter.description, table(head, rows)]
    return "\n\n".join(parts)


def commands() -> str:
    """Return the help of each command."""
    os.environ["COLUMNS"] = "100"
    return "\n\n".join(
        f"### `{part.prog}`\n\n```text\n{part.format_help().strip()}\n```"
        for name in all_commands()
        for part in _parsers(_choices(parser(name))[name])
    )


def _parsers(part: Any) -> Iterator[Any]:
    inner = dict.fromkeys(_choices(part).values())
    yield from [part] if not inner else ()
    for below in inner:
        yield from _parsers(below)


def _choices(part: Any) -> Mapping[str, Any]:
    return next((dict(action.choices) for action in part._actions if action.nargs == "A..."), {})


def error_classes() -> str:
    """Return a table of the error classes, in the order of their tree."""
    meanings = dict(_ERROR.findall(errors.__doc__ or ""))
    found = [(name, getattr(errors, name)) for name in meanings if hasattr(errors, name)]
    rows = [(f"`{name}`", str(c.status), c.title, c.cause, c.action, meanings[name]) for name, c in found]
    return table(("class", "HTTP status", "title", "cause", "action", "meaning"), rows)


def metrics(of: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return tables of the metrics, one for each set of services that serve the same."""
    servers: dict[str, list[str]] = {}
    found = {metric["name"]: metric for name in of for metric in of[name]}
    for service, served in of.items():
        for metric in served:
            servers.setdefault(metric["name"], []).append(service)
    parts = []
    for group in sorted({*map(tuple, servers.values())}, key=lambda group: (-len(group), [*of].index(group[0]))):
        rows = [
            (f"`{name}`", metric["type"], ", ".join(metric["labels"]), metric["meaning"])
            for name, metric in sorted(found.items())
            if tuple(servers[name]) == group
        ]
        title = "Every service" if len(group) == len(of) else " and ".join(group)
        parts += [f"### {title}", table(("metric", "type", "labels", "meaning"), rows)]
    return "\n\n".join(parts)


def routes(document: Mapping[str, Any]) -> str:
    """Return a table of the routes in an OpenAPI document."""
    rows = [
        (f"`{method.upper()} {path}`", operation["x-role"], _first_paragraph(operation))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return table(("route", "role", "what it does"), rows)


def _first_paragraph(operation: Mapping[str, Any]) -> str:
    text = operation["description"].partition("\n\n")[0].replace("\n", " ")
    return f"{operation['summary']}." if text.startswith("Role:") else text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
