"""Run a command-line program: encodings, errors as one line on standard error or as JSON, exit codes.

Exit codes: 0 done, 1 failed, 2 wrong configuration or usage, 130 stopped by Ctrl-C, 143 stopped by SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from shared.errors import ConfigError, VolleyError, problem
from shared.process.utf8 import print_what_can_be_printed, restart_in_utf8
from volley.printing import complain, json_output, lacks_result, print_result


def run_program(command: Callable[[], int]) -> NoReturn:
    """Run a command, which parses its own arguments and calls `use_json`, and exit with its code.

    If JSON is wanted, standard output gets a value in every case: the command's result, `{"error", "exit_code"}`, or
    `{"exit_code"}` of a command that has neither.
    """
    restart_in_utf8()
    print_what_can_be_printed()  # not every encoding has the characters of curves, bars and tables
    with json_output(False):
        try:
            code = _flushed(_run(command))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
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
    complain(f"volley: {error}")
    if lacks_result():
        print_result({"error": problem(error), "exit_code": code})
    return code


def _flushed(code: int) -> int:
    """Flush standard output; a command whose output cannot be written does not exit with 0."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and not code:  # else the error is reported already
            with contextlib.suppress(OSError):
                complain(f"volley: standard output: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code
