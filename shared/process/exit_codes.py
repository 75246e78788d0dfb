"""Exit codes of a service, which tell a supervisor whether another start can succeed."""

from __future__ import annotations

import signal
from contextlib import suppress

from shared.errors import ConfigError, EngineDied, ProcessLost, Unavailable

FAILED = 1
"""A defect, or another error that a new start would probably meet again."""
REFUSED = 2
"""The configuration is wrong: another start cannot succeed."""
AGAIN = 75
"""Something that the service needs is gone for now; sysexits.h calls this code EX_TEMPFAIL."""
SIGKILL_HINT = "the kernel ends processes with this signal when memory runs out: see how much is left on this machine"


def exit_code(error: BaseException) -> int:
    """Return the exit code of a service that ends with this error."""
    if isinstance(error, ConfigError):
        return REFUSED
    return AGAIN if isinstance(error, Unavailable | EngineDied | ProcessLost) else FAILED


def signal_of(code: int) -> int | None:
    """Return the number of the signal that ended a process, None if none did.

    The code is negative for a signal to the process itself; a shell or container that runs it adds 128.
    """
    number = -code if code < 0 else code - 128
    return number if code < 0 or 0 < number < signal.NSIG else None


def describe(code: int) -> str:
    """Describe an exit code, such as `exit code 1`, `signal 9 (SIGKILL)` or `exit code 137 (SIGKILL)`."""
    number = signal_of(code)
    text = f"signal {-code}" if code < 0 else f"exit code {code}"
    with suppress(ValueError):
        return text if number is None else f"{text} ({signal.Signals(number).name})"
    return text
