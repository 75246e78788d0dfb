"""Terminal output of all commands. Control characters in text from outside are made visible (shared.visible).

Only the live display (the part `live_display`) writes by itself; it makes its text visible too.

With `--json`, standard output holds the command's result as JSON, or its error, and nothing else: `print_result` writes
there, and all other functions write to standard error.

Output may end before its command: a pipe's reader leaves (`| head`), a terminal closes, a disk is full. A command that
reads and prints then ends. A command that trains or serves goes on (`outlive_output`): it says so once on
standard error, and appends the lines that it cannot print to the run's log (`keep_lost_in`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import orjson

from shared.errors import StorageUnavailable
from shared.visible import visible, visible_json


@dataclass(slots=True)
class _Mode:
    """State of the command's output.

    `has_result`: a result has been written since the mode was set. `has_status`: a status stands on the terminal.
    `outlives`: the command goes on without its output; `lost`: why lines are lost, once it has said so; `log` gets
    these lines.
    """

    as_json: bool = False
    has_result: bool = False
    has_status: bool = False
    outlives: bool = False
    lost: OSError | None = None
    log: Path | None = None


_mode = _Mode()
_writing = threading.RLock()
"""Held while a line or the status is written: another thread may draw the status."""


def use_json(wanted: bool) -> None:
    """Set the form of results from now on: JSON, or text."""
    _mode.as_json, _mode.has_result = wanted, False


def is_json() -> bool:
    return _mode.as_json


def lacks_result() -> bool:
    """Return True if --json was given but nothing was printed."""
    return _mode.as_json and not _mode.has_result


@contextmanager
def json_output(wanted: bool = True) -> Iterator[None]:
    """Use JSON, or text, inside the context, and restore the command's mode at its end."""
    before = _mode.as_json, _mode.has_result, _mode.outlives, _mode.lost
    use_json(wanted)
    try:
        yield
    finally:
        _mode.as_json, _mode.has_result, _mode.outlives, _mode.lost = before


def outlive_output(wanted: bool) -> None:
    """Set whether the command goes on when its output can no longer be written."""
    _mode.outlives, _mode.lost, _mode.log = wanted, None, None


def keep_lost_in(log: Path) -> None:
    """Append lines that cannot be printed to `log` from now on."""
    _mode.log = log


def lacks_lines() -> bool:
    """Return True if lines are lost that somebody may still read: a full disk, say, and not a pipe without reader."""
    return _mode.lost is not None and _mode.lost.errno not in (errno.EPIPE, errno.EIO, errno.EBADF)


def keep_lost(error: OSError, *lines: object) -> None:
    """Keep lines that could not be printed, and say once that output is lost, if the command goes on without it.

    Raises BrokenPipeError or StorageUnavailable for any other command.
    """
    if not _mode.outlives:
        if isinstance(error, BrokenPipeError):
            raise error
        raise StorageUnavailable(f"standard output: {error.strerror}", "the output is not complete") from error
    if _mode.lost is None:
        _mode.lost = error
        where = f", and lines that cannot be printed are added to {_mode.log}" if _mode.log else ""
        complain(f"volley: standard output: {error.strerror}; the command goes on{where}")
    keep_lines(*lines)


def keep_lines(*lines: object) -> None:
    """Append lines that cannot be printed to the log of the run, if there is one."""
    if _mode.log is not None:
        with suppress(OSError), _mode.log.open("a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{visible(line)}\n" for line in lines)


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
    """Raises as `keep_lost` if the text cannot be written."""
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        keep_lost(error, *text.split("\n"))


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
        with suppress(OSError):  # what is printed next raises
            print("\x1b[H\x1b[2J", end="", flush=True)


def has_status() -> bool:
    """Return True if standard error is a terminal that can rewrite a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def show_status(line: str) -> None:
    """Rewrite the line of a terminal's standard error, cut to its width; an empty one removes it."""
    with _writing:
        width, _mode.has_status = shutil.get_terminal_size().columns, bool(line)
        print(f"\r\x1b[2K{visible(line)[: width - 1]}", end="", file=sys.stderr, flush=True)


def _clear_status() -> None:
    if _mode.has_status:
        with suppress(OSError):  # the terminal may be gone
            show_status("")


def complain(line: object) -> None:
    """Write one line to standard error, or to the log of lost lines; whoever closes both gets none."""
    try:
        with _writing:
            _clear_status()
            print(visible(line), file=sys.stderr, flush=True)
    except OSError:
        keep_lines(line)


def show_error(detail: str, hint: str = "") -> None:
    """Write an error as one line to standard error, and what to do about it as a second one."""
    complain(f"volley: {one_line(detail)}")
    if hint:
        complain(f"  {one_line(hint)}")


def one_line(text: str) -> str:
    """Return the text with its line breaks, and the spaces around them, as single spaces."""
    return re.sub(r"\s*[\r\n]+\s*", " ", text).strip()


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
