"""UTF-8 for names of files, arguments and standard streams, whatever the locale."""

from __future__ import annotations

import io
import os
import sys


def restart_in_utf8() -> None:
    """Run this program again in Python's UTF-8 mode if the locale's encoding is another one.

    File names in a configuration then have the same bytes in every locale. Child processes inherit the mode. Standard
    output and error keep the terminal's encoding; child processes write UTF-8.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8":
        os.environ.pop("PYTHONIOENCODING", None)
        return
    terminal = getattr(sys.stdout, "encoding", None) or "utf-8"
    os.environ |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": f"{terminal}:replace"}
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - the same program


def print_what_can_be_printed() -> None:
    """Print a replacement for characters that standard output cannot encode; printing then never raises."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
