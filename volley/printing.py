"""The only place where commands write to the terminal: what others wrote is made visible (shared.visible) on the way.

The live display (reporting/live.py) draws by itself, and makes its texts visible too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import orjson

from shared.visible import visible, visible_json


def print_lines(*lines: object) -> None:
    """Writes each as one line to standard output."""
    print("\n".join(map(visible, lines)), flush=True)


def print_block(text: str) -> None:
    """Writes text of several lines: a table, or what somebody's program has printed."""
    print_lines(*text.split("\n"))


def print_for_shell(*lines: str) -> None:
    """Writes lines that a shell evaluates: as they are into its pipe, visible to a terminal."""
    if sys.stdout.isatty():
        print_lines(*lines)
    else:
        print("\n".join(lines), flush=True)


def complain(line: object) -> None:
    """Writes one line to standard error."""
    print(visible(line), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Writes the value as indented JSON, without control characters."""
    print(format_json(value), flush=True)


def format_json(value: Any) -> str:
    try:
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    except TypeError:  # names of files may hold bytes that are no text
        text = json.dumps(value, indent=2, default=str)
    return visible_json(text)


def join_lines(lines: list[str]) -> str:
    """The lines as one text, each of them one line whatever it quotes."""
    return "\n".join(map(visible, lines))
