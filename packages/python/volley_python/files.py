"""Rows and functions of a Python program, written into files that a run reads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.config import LoadedConfig, validate
from shared.errors import ConfigError
from volley_python.source import source_of

_OPTION = re.compile(r"--(data|reward|tools|eval-data|eval-share)\b(?: ([\d.]+))?")
_COLUMNS = re.compile(r"--columns (\w+)=(\w+)(?:,(\w+)=(\w+))?|--columns")

type Files = str | Path | Sequence[str | Path]
type Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file, a folder, a hub id, or the rows themselves: mappings, or a table of pandas."""
type Reward = str | Path | Callable[..., Any]


def paths_of(files: Files) -> list[str]:
    """Return the paths of one file or several."""
    return [str(files)] if isinstance(files, str | Path) else [str(one) for one in files]


class HandedFiles:
    """Files below a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def rows(self, data: Rows | None, name: str) -> str | None:
        """Return the path or hub id of data, written as JSON lines if they are rows. Raises ConfigError."""
        if data is None or isinstance(data, str | Path):
            return None if data is None else str(data)
        path = self._folder / f"{name}.jsonl"
        try:
            lines = [json.dumps(dict(row), ensure_ascii=False) + "\n" for row in _rows(data)]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a row of the data cannot be written as JSON: {error}", "use plain values") from error
        path.write_text("".join(lines), encoding="utf-8")
        return str(path)

    def data_files(self, data: Rows | Sequence[str | Path] | None, name: str) -> list[Path]:
        """Return one file or several of supervised data, written if they are rows. Raises ConfigError."""
        if data is None:
            return []
        if isinstance(data, Sequence) and not isinstance(data, str) and all(isinstance(x, str | Path) for x in data):
            return [Path(str(one)) for one in data]
        return [Path(str(self.rows(data, name)))]  # type: ignore[arg-type]

    def rewards(self, reward: Reward | Sequence[Reward] | None) -> list[str]:
        """Return a FILE.py:NAME for each reward. Raises ConfigError."""
        if reward is None:
            return []
        many = [reward] if callable(reward) or isinstance(reward, str | Path) else list(reward)
        return [self._function(one) if callable(one) else str(one) for one in many]

    def tools(self, tools: str | Path | Sequence[Callable[..., Any]] | None) -> str | None:
        """Return the file that defines the tools. Raises ConfigError."""
        if tools is None or isinstance(tools, str | Path):
            return None if tools is None else str(tools)
        return str(self._module("tools", source_of(*tools)))

    def kept_in(self, folder: Path, loaded: LoadedConfig) -> LoadedConfig:
        """Copy the files that the configuration names into a folder, and name them there. Raises ConfigError.

        They lie below their digest, so that other files of a start that is refused replace none of a run.
        """
        text, folder = json.dumps(loaded.tree, default=str), folder / self._digest()
        here, there = (json.dumps(str(one))[1:-1] for one in (self._folder, folder))
        if here not in text:
            return loaded
        try:
            shutil.copytree(self._folder, folder, dirs_exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
        return replace(validate(json.loads(text.replace(here, there))), notes=loaded.notes, choices=loaded.choices)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(path for path in self._folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(self._folder)} {len(content)}\n".encode() + content)
        return digest.hexdigest()[:16]

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Name rows and arguments in errors as the Python program does, not as files and options of a command."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(self._in_python(error.detail), self._in_python(error.hint or "")) from error

    def _in_python(self, text: str) -> str:
        for name, argument in (("train.jsonl", "data"), ("eval.jsonl", "eval_data")):
            if (self._folder / name).exists():
                path = rf"(?:{re.escape(str(self._folder))}/)?\b{re.escape(name)}"
                text = re.sub(rf"{path}, line (\d+)", lambda row, of=argument: f"row {int(row[1]) - 1} of {of}", text)
                text = re.sub(path, argument, text)
        text = re.sub(rf"{re.escape(str(self._folder))}/\d+/", "", text)
        text = _COLUMNS.sub(_as_dict, text)
        return _OPTION.sub(lambda found: found[1].replace("-", "_") + (f"={found[2]}" if found[2] else ""), text)

    def _function(self, function: Callable[..., Any]) -> str:
        return f"{self._module(function.__name__, source_of(function))}:{function.__name__}"

    def _module(self, name: str, text: str) -> Path:
        path = self._folder / str(len(list(self._folder.iterdir()))) / f"{name}.py"
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        return path


def _as_dict(option: re.Match[str]) -> str:
    names = [name for name in option.groups() if name is not None]
    pairs = ", ".join(f'"{new}": "{column}"' for new, column in zip(names[::2], names[1::2], strict=True))
    return f"columns={{{pairs}}}" if pairs else "columns"


def _rows(data: Any) -> Iterable[Mapping[str, Any]]:
    """Yield the rows of a table or an iterable. Raises ConfigError."""
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a DataFrame
        data = data.to_dict("records")
    for i, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {i} of the data is a {type(row).__name__}", "give each row as a dict")
        yield row
