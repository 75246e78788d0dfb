"""Run a command-line program: encodings, errors as one line on standard error, exit codes.

Exit codes: 0 done, 1 failed, 2 wrong configuration or usage, 130 stopped by Ctrl-C, 143 stopped by SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from shared.errors import ConfigError, VolleyError
from shared.process.utf8 import print_what_can_be_printed, restart_in_utf8
from volley.printing import complain


def run_program(command: Callable[[], int]) -> NoReturn:
    """Run a command, which parses its own arguments, and exit with its code."""
    restart_in_utf8()
    print_what_can_be_printed()  # not every encoding has the characters of curves, bars and tables
    try:
        code = _flushed(command())
    except VolleyError as error:
        complain(f"volley: {error}")
        code = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        if error.filename is None:
            raise
        complain(f"volley: {error.filename}: {error.strerror}")
        code = 1
    raise SystemExit(code)


def _flushed(code: int) -> int:
    """Flush standard output; a command whose output cannot be written does not exit with 0."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError):
                complain(f"volley: standard output: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code
