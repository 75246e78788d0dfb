"""Terminal output of all commands. Control characters in text from outside are made visible (shared.visible).

Only the live display (reporting/live.py) writes by itself; it makes its text visible too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import orjson

from shared.visible import visible, visible_json


def print_lines(*lines: object) -> None:
    """Write each value as one line to standard output."""
    print("\n".join(map(visible, lines)), flush=True)


def print_block(text: str) -> None:
    """Write text of several lines, such as a table or a program's output."""
    print_lines(*text.split("\n"))


def print_for_shell(*lines: str) -> None:
    """Write lines for a shell to evaluate: unchanged into a pipe, made visible on a terminal."""
    if sys.stdout.isatty():
        print_lines(*lines)
    else:
        print("\n".join(lines), flush=True)


def clear_screen() -> None:
    """Begin a terminal's screen anew; elsewhere do nothing."""
    if sys.stdout.isatty():
        print("\x1b[H\x1b[2J", end="", flush=True)


def complain(line: object) -> None:
    """Write one line to standard error."""
    print(visible(line), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Write the value as indented JSON, without control characters."""
    print(format_json(value), flush=True)


def format_json(value: Any) -> str:
    try:
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    except TypeError:  # file names may hold bytes that are not UTF-8
        text = json.dumps(value, indent=2, default=str)
    return visible_json(text)


def join_lines(lines: list[str]) -> str:
    """Join lines; a line break inside one of them is made visible."""
    return "\n".join(map(visible, lines))
