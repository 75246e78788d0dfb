"""Terminal output of all commands. Control characters in text from outside are made visible (shared.visible).

Only the live display (reporting/live.py) writes by itself; it makes its text visible too.

With `--json`, standard output holds the command's result as JSON, or its error, and nothing else: `print_result` writes
there, and all other functions write to standard error.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import orjson

from shared.errors import StorageUnavailable
from shared.visible import visible, visible_json


@dataclass(slots=True)
class _Mode:
    """`has_result`: a result has been written since the mode was set. `has_status`: a status stands on the terminal."""

    as_json: bool = False
    has_result: bool = False
    has_status: bool = False


_mode = _Mode()
_writing = threading.RLock()
"""Held while a line or the status is written: another thread may draw the status."""


def use_json(wanted: bool) -> None:
    """Set the form of results from now on: JSON, or text."""
    _mode.as_json, _mode.has_result = wanted, False


def is_json() -> bool:
    return _mode.as_json


def lacks_result() -> bool:
    """Tell if a result in JSON is wanted and none has been written."""
    return _mode.as_json and not _mode.has_result


@contextmanager
def json_output(wanted: bool = True) -> Iterator[None]:
    """Use JSON, or text, inside the context."""
    before = _mode.as_json, _mode.has_result
    use_json(wanted)
    try:
        yield
    finally:
        _mode.as_json, _mode.has_result = before


def print_result(value: Any, text: str | Callable[[], str] = "", *, one_line: bool = False) -> None:
    """Write a command's result: `value` if JSON is wanted, else `text`, or nothing if that is empty.

    Args:
        text: may be a function, which is called only if JSON is not wanted.
        one_line: write the JSON as one line, for a command that has a sequence of results.
    """
    if _mode.as_json:
        _mode.has_result = True
        _write_line(format_json(value, indent=not one_line), sys.stdout)
    elif shown := text if isinstance(text, str) else text():
        print_block(shown)


def _write_line(text: str, file: TextIO) -> None:
    """Write text in the place of the status. Raises as `_write` does."""
    with _writing:
        _clear_status()
        _write(text, file)


def _write(text: str, file: TextIO) -> None:
    """Raises StorageUnavailable if the text cannot be written, and BrokenPipeError if nobody reads it."""
    try:
        print(text, file=file, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageUnavailable(f"standard output: {error.strerror}", "the output is not complete") from error


def _lines_file() -> TextIO:
    return sys.stderr if _mode.as_json else sys.stdout


def print_lines(*lines: object) -> None:
    """Write each value as one line to standard output, or to standard error if that is for JSON."""
    _write_line("\n".join(map(visible, lines)), _lines_file())


def print_block(text: str) -> None:
    """Write text of several lines, such as a table or a program's output."""
    print_lines(*text.split("\n"))


def print_for_shell(*lines: str) -> None:
    """Write lines for a shell to evaluate: unchanged into a pipe, made visible on a terminal."""
    if sys.stdout.isatty():
        print_lines(*lines)
    else:
        _write("\n".join(lines), sys.stdout)


def clear_screen() -> None:
    """Begin a terminal's screen anew; elsewhere do nothing."""
    if sys.stdout.isatty() and not _mode.as_json:
        print("\x1b[H\x1b[2J", end="", flush=True)


def has_status() -> bool:
    """Tell if standard error is a terminal that can rewrite a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def show_status(line: str) -> None:
    """Rewrite the line of a terminal's standard error, cut to its width; an empty one removes it."""
    with _writing:
        width, _mode.has_status = shutil.get_terminal_size().columns, bool(line)
        print(f"\r\x1b[2K{visible(line)[: width - 1]}", end="", file=sys.stderr, flush=True)


def _clear_status() -> None:
    if _mode.has_status:
        show_status("")


def complain(line: object) -> None:
    """Write one line to standard error."""
    with _writing:
        _clear_status()
        print(visible(line), file=sys.stderr, flush=True)


def format_json(value: Any, *, indent: bool = True) -> str:
    """Format the value as JSON without control characters. Numbers that JSON lacks become null."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None, default=str).decode()
    except TypeError:  # file names may hold bytes that are not UTF-8
        plain = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
        text = json.dumps(plain, indent=2 if indent else None)
    return visible_json(text)


def join_lines(lines: list[str]) -> str:
    """Join lines; a line break inside one of them is made visible."""
    return "\n".join(map(visible, lines))
