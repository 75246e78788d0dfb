"""Run a command-line program: encodings, errors as one line and one hint on standard error or as JSON, exit codes.

Exit codes: 0 done, 1 failed, 2 wrong configuration or usage, 130 stopped by Ctrl-C, 141 nobody reads its output (as
after SIGPIPE), 143 stopped by SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TextIO

from shared.errors import ConfigError, StorageUnavailable, VolleyError, problem
from shared.process.utf8 import print_what_can_be_printed, restart_in_utf8
from volley.printing import json_output, keep_lost, lacks_lines, lacks_result, print_result, show_error

_UNREAD = 141


def run_program(command: Callable[[], int]) -> NoReturn:
    """Run a command, which parses its own arguments and calls `use_json`, and exit with its code.

    If JSON is wanted, standard output gets a value in every case: the command's result, `{"error", "exit_code"}`, or
    `{"exit_code"}` of a command that has neither.
    """
    _open_standard_streams()
    restart_in_utf8()
    print_what_can_be_printed()  # not every encoding has the characters of curves, bars and tables
    with json_output(False):
        try:
            code = _flushed(_run(command))
        except BrokenPipeError:
            code = _UNREAD
            _discard(sys.stdout)
        try:
            sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)
    raise SystemExit(code)


def _run(command: Callable[[], int]) -> int:
    """Run the command and report its error. Returns the exit code."""
    try:
        code = command()
    except VolleyError as error:
        return _failed(error, 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        return _failed(VolleyError(f"{os.fsdecode(error.filename)}: {error.strerror}"), 1)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except Exception as error:  # a defect: Python prints where
        if lacks_result():
            print_result({"error": problem(VolleyError(f"{type(error).__name__}: {error}")), "exit_code": 1})
        raise
    if lacks_result():
        print_result({"exit_code": code})
    return code


def _failed(error: VolleyError, code: int) -> int:
    show_error(error.detail, error.hint)
    with suppress(StorageUnavailable):
        if lacks_result():
            print_result({"error": problem(error), "exit_code": code})
    return code


def _flushed(code: int) -> int:
    """Flush standard output; a command whose output cannot be written does not exit with 0.

    One that outlives its output does, unless somebody may still read the output and lacks lines.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        try:
            if not code:  # else the error is reported already
                keep_lost(error)
        except StorageUnavailable as lost:
            return _failed(lost, 1)
    return code or int(lacks_lines())


def _discard(stream: TextIO) -> None:
    """Discard what a stream still holds; Python would change the exit code because it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_standard_streams() -> None:
    """Open the standard streams that the parent has closed, so that no other file gets their numbers.

    Writing to them fails, as on a closed one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDONLY)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
