"""A terminal for tests: a program under a pty of a given size, and what its screen shows in the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_TOKEN = re.compile(r"\x1b\[(?P<private>\??)(?P<numbers>[\d;]*)(?P<code>[A-Za-z])|(?P<char>[\s\S])")


class Screen:
    """Lines as a terminal without a bottom shows them: text, line feeds, carriage returns, and the few codes that move
    the cursor up, erase a line, or hide the cursor. Any other code is an error.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.cursor_hidden = columns, [""], False
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for token in _TOKEN.finditer(text):
            if token["char"] is not None:
                self._put(token["char"])
            else:
                self._obey(token["private"], token["numbers"], token["code"])

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._feed_line()
        elif char.isprintable():
            if self._column == self.columns:
                self._column = 0
                self._feed_line()
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + char + line[self._column + 1 :]
            self._column += 1
        else:
            raise AssertionError(f"the program wrote {char!r}")

    def _feed_line(self) -> None:
        self._row += 1
        if self._row == len(self.lines):
            self.lines.append("")

    def _obey(self, private: str, numbers: str, code: str) -> None:
        if private and code in "lh" and numbers == "25":
            self.cursor_hidden = code == "l"
        elif code == "A":
            self._row = max(0, self._row - int(numbers or 1))
        elif code == "K":
            self.lines[self._row] = "" if numbers == "2" else self.lines[self._row][: self._column]
        elif code != "m":
            raise AssertionError(f"the program wrote an unknown code: {private}{numbers}{code}")


@dataclass
class TerminalProgram:
    """A running program, and all that it has written."""

    process: subprocess.Popen[bytes]
    columns: int
    written: list[bytes] = field(default_factory=list)

    def text(self) -> str:
        return b"".join(self.written).decode()

    def screen(self) -> Screen:
        screen = Screen(self.columns)
        screen.feed(self.text())
        return screen


@contextmanager
def in_terminal(
    command: Sequence[str], columns: int, environment: Mapping[str, str], ended: Callable[[], object] = lambda: None
) -> Iterator[TerminalProgram]:
    """The program's standard output and error are the terminal's, whose end is read until the program closes it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(environment), start_new_session=True
    )
    os.close(theirs)
    program = TerminalProgram(process, columns)

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(ours, 65536):
                program.written.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield program
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(20)
        os.close(ours)
        ended()
