"""Checks of the values in a config.json. Each raises ConfigError with the file's name and the key."""

from __future__ import annotations

import math
from typing import cast

from shared.errors import ConfigError
from shared.models.families import supported


def size(value: object, key: str, where: str, most: int) -> int:
    """Check a whole number from 1 to `most`."""
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{where}: {key} is {shorten(value)}, expected a whole number from 1 to {most}", supported())
    return value


def number(value: object, key: str, where: str, most: float) -> float:
    """Check a number above 0 and at most `most`."""
    if (
        type(value) not in (int, float)
        or not 0 < (given := float(cast(float, value))) <= most
        or not math.isfinite(given)
    ):
        raise ConfigError(
            f"{where}: {key} is {shorten(value)}, expected a number above 0 and at most {most:g}", supported()
        )
    return given


def boolean(value: object, key: str, where: str) -> bool:
    """Check true or false."""
    if type(value) is not bool:
        raise ConfigError(f"{where}: {key} is {shorten(value)}, expected true or false", supported())
    return value


def unsupported(key: str, value: object, where: str, hint: str | None = None, *, why: str | None = None) -> ConfigError:
    """Error for a value that asks for a computation we do not have."""
    because = "" if why is None else f": {why}"
    return ConfigError(f"{where}: {key}={shorten(value)} is not supported{because}", hint or supported())


def shorten(value: object) -> str:
    """Shorten any value of a file for a sentence."""
    return repr(value)[:80]
