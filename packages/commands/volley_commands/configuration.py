"""`volley config`: show a run's configuration with the source of each value, or its JSON schema."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.config import LoadedConfig
from shared.config_files import read_tree
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.run.folder import RunFolder
from shared.run_config import run_model
from volley import choices, own_data
from volley.printing import format_json, join_lines, print_result

_DEFAULT, _LINE = "default", "command line"
_OF_OPTIONS = ("model.path", "data.env", "data.sources")
"""Keys that a model, --data and --reward set."""


def add(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="config_command")
    show = commands.add_parser(
        "show",
        help="print every key, its value, and the file or default it comes from",
        epilog="example: volley config show --config configs/quickstart.yaml --set",
    )
    show.add_argument("--config", action="append", metavar="FILE.yaml | RUN_DIR", help="repeatable; later files win")
    show.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override the files")
    own_data.add(show)
    show.add_argument("--set", action="store_true", dest="only_set", help="leave out defaults")
    commands.add_parser(
        "schema",
        help="print the JSON schema of configuration files, for editors",
        epilog="example: volley config schema > volley.schema.json",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError."""
    if arguments.config_command == "schema":
        found = schema()
        print_result(found, format_json(found))
        return 0
    of_options = any(getattr(arguments, name, None) for name in ("data", "env"))
    options = _OF_OPTIONS if of_options else ()
    rows = sources(own_data.load(arguments), arguments.config or (), arguments.overrides, options)
    if arguments.only_set:
        rows = {key: row for key, row in rows.items() if row["source"] != _DEFAULT}
    print_result(rows, lambda: _table(rows))
    return 0


def _table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    width = max((len(key) for key in rows), default=0)
    shown = [(key, _text(row["value"]), row["source"]) for key, row in rows.items()]
    values = min(40, max((len(value) for _, value, _ in shown), default=0))
    return join_lines([f"{key:{width}}  {value:{values}}  {source}" for key, value, source in shown])


def schema() -> dict[str, Any]:
    found = run_model().model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Volley run", **found}


def sources(
    loaded: LoadedConfig, paths: Sequence[str], overrides: Sequence[str], options: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return `{"value", "source"}` of each key of a configuration made of these. Raises ConfigError.

    Args:
        options: keys whose values come from other options.
    """
    runs = [RunFolder(Path(path)) for path in paths if Path(path).is_dir()]
    loaded = _fitted(loaded)
    named: dict[str, str] = {}
    for path in own_data.files_of(paths):
        named |= {key: str(path) for key, _ in _leaves(read_tree(path, "config file"))}
    named |= dict.fromkeys(options, _LINE)
    for override in overrides:
        named[override.partition("=")[0]] = _LINE
    chosen = {key: why for run in runs for key, why in choices.reasons(run).items()} | dict(loaded.choices)
    named |= {key: f"chosen: {why}" for key, why in chosen.items() if named.get(key) != _LINE}
    values = dict(_leaves(loaded.config.model_dump(mode="json")))
    return {key: {"value": value, "source": _source(key, named)} for key, value in values.items()}


def _fitted(loaded: LoadedConfig) -> LoadedConfig:
    """Choose values that are left out, if the model is here."""
    folder = Path(loaded.config.model.path)
    with suppress(ConfigError):
        return choices.fit(loaded, ModelConfig.read(folder)) if folder.is_dir() else loaded
    return loaded


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _source(key: str, named: Mapping[str, str]) -> str:
    """Source of a key, or of the mapping that holds it."""
    while key:
        if key in named:
            return named[key]
        key = key.rpartition(".")[0]
    return _DEFAULT


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "null" if value is None else str(value)
