"""A Python interpreter that keeps its variables between texts, like a notebook.

It works in the sandbox's private folder, whose files are synchronized with each text. A text that uses up its CPU time
gets an exception and keeps its variables; if it catches the exception, or is inside an uninterruptible call, the kernel
kills the process two seconds later.
"""

from __future__ import annotations

import ast
import base64
import os
import random
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

MAX_WALKED = 10_000
FOLDER_DEPTH = 16


class CpuTimeUsedUp(BaseException):
    """The text used up its CPU time. Not an Exception, so that `except Exception` in a loop does not catch it."""


class Interpreter:
    """One interpreter.

    Args:
        execute: runs one text in a module's namespace.
    """

    def __init__(self, execute: Callable[[str, dict[str, Any]], Any]) -> None:
        self._execute = execute
        self._main = types.ModuleType("__main__")
        self._home = os.getcwd()
        self._seen: dict[str, tuple[int, ...]] = {}
        self._reported: dict[str, tuple[int, ...]] = {}

    def run(self, source: str, seed: int | None, cpu_s: float) -> None:
        """Run one text. Raises any exception of the text, and CpuTimeUsedUp.

        Args:
            seed: seeds `random`, given with the first text.
        """
        if seed is not None:
            random.seed(seed)
        sys.modules["__main__"] = self._main
        body, last = _split(source)
        kernel_limit(cpu_s + 2)
        signal.signal(signal.SIGPROF, lambda number, frame: _interrupt(cpu_s))
        signal.setitimer(signal.ITIMER_PROF, cpu_s, 0.2)
        try:
            self._execute(body, vars(self._main))
            value = self._execute(last, vars(self._main)) if last else None
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, signal.SIG_IGN)

    def put(self, files: dict[str, str], removed: list[str], received: bool) -> None:
        """Write files (base64) in the start folder, and remove others. Raises OSError.

        Args:
            received: False if the last answer was lost; its changes to files are then reported again.
        """
        if received:
            self._seen = dict(self._reported)
        for path in removed:
            self._seen.pop(path, None)
            place = os.path.join(self._home, path)
            if os.path.islink(place) or os.path.isfile(place):
                os.unlink(place)
        for path, content in files.items():
            place = os.path.join(self._home, path)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if os.path.islink(place):
                os.unlink(place)
            with open(place, "wb") as file:
                file.write(base64.b64decode(content))
            self._seen[path] = _mark(os.stat(place))

    def changed(self, max_bytes: int) -> dict[str, Any]:
        """Changes of files since the last answer.

        Returns {"files": base64 by path, "removed": paths, "left_out": paths beyond `max_bytes`}.
        """
        found, files, left_out, n = _files(self._home), dict[str, str](), list[str](), 0
        for path in sorted(path for path, mark in found.items() if self._seen.get(path) != mark):
            size = found[path][0]
            if n + size > max_bytes:
                left_out.append(path)
                continue
            try:
                with open(os.path.join(self._home, path), "rb") as file:
                    files[path] = base64.b64encode(file.read(size)).decode()
            except OSError:
                left_out.append(path)
            else:
                n += size
        removed = [path for path in self._seen if path not in found]
        self._reported = found
        return {"files": files, "removed": removed, "left_out": left_out[:20]}


def kernel_limit(more_s: float) -> None:
    """End the process after `more_s` more seconds of CPU time, or at its own limit."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime + more_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _interrupt(cpu_s: float) -> None:
    raise CpuTimeUsedUp(f"the program used its {cpu_s:g} s of CPU time; what it did until then stays")


def _split(source: str) -> tuple[Any, Any]:
    """Compile a text and its last expression, if it ends with one. Raises SyntaxError."""
    tree = ast.parse(source, "program.py")
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = compile(ast.Expression(tree.body[-1].value), "program.py", "eval", dont_inherit=True)
        del tree.body[-1]
    return compile(tree, "program.py", "exec", dont_inherit=True), last


def _files(home: str) -> dict[str, tuple[int, ...]]:
    """Plain files below `home`: size, modification time and inode of each."""
    found: dict[str, tuple[int, ...]] = {}
    folders = [("", 0)]
    walked = 0
    while folders:
        folder, depth = folders.pop()
        with os.scandir(os.path.join(home, folder)) as entries:
            for entry in entries:
                walked += 1
                if walked > MAX_WALKED:
                    return found
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if depth < FOLDER_DEPTH and entry.name != "__pycache__":
                        folders.append((path, depth + 1))
                elif entry.is_file(follow_symlinks=False) and not any(0xD800 <= ord(c) <= 0xDFFF for c in path):
                    found[path] = _mark(entry.stat(follow_symlinks=False))
    return found


def _mark(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
