"""Amounts of bytes, rates and prices: read from text, and written for readers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config_files import read_tree
from shared.errors import ConfigError

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_AMOUNT = re.compile(r"(?P<n>\d+(\.\d+)?)\s*(?P<prefix>[kmgt]?)(?P<binary>i?)(?P<unit>b(it|yte)?s?)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read 24GiB, 80GB or a number of bytes. Raises ConfigError."""
    match = _AMOUNT.fullmatch(text.strip())
    found = None if match is None or "bit" in (match["unit"] or "").lower() else _value(match)
    if not found:
        raise ConfigError(f"{text!r} is no amount of memory", "write it as 24GiB, 80GB or a number of bytes")
    return int(found)


def parse_rate(text: str) -> float:
    """Read a bandwidth as bytes per second: 200Mbit/s or 10Gbps in bits, 1.2GB/s in bytes. Raises ConfigError."""
    bare = re.sub(r"\s*(/s|ps)$", "", text.strip(), flags=re.IGNORECASE)
    match = _AMOUNT.fullmatch(bare)
    found = None if match is None or not match["unit"] else _value(match)
    if match is None or not found:
        raise ConfigError(f"{text!r} is no bandwidth", "write it as 200Mbit/s, 10Gbps or 1.2GB/s")
    unit = match["unit"]
    in_bits = "bit" in unit.lower() or (unit == "b")
    return found / 8 if in_bits else found


def _value(match: re.Match[str]) -> float:
    return float(match["n"]) * (1024 if match["binary"] else 1000) ** _PREFIXES[match["prefix"].lower()]


def read_prices(path: Path) -> Mapping[str, float]:
    """Read a table of prices per device and hour, by the device's name. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file", "give --prices a YAML file with lines NAME: PRICE")
    tree: Mapping[Any, Any] = read_tree(path)
    wrong = [name for name, price in tree.items() if not _is_price(price)]
    if wrong:
        raise ConfigError(
            f"{path}: the price of {wrong[0]} is {tree[wrong[0]]!r}",
            "write a line NAME: NUMBER for each type of device, its price per device and hour",
        )
    prices: dict[str, float] = {}
    for name, price in tree.items():
        if prices.setdefault(str(name).lower(), float(price)) != price:
            raise ConfigError(f"{path}: {name} has two prices", "name each type of device once")
    return prices


def _is_price(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def show_bytes(n: float) -> str:
    """1.50 GiB"""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:,.{1 if n >= 100 * size else 2}f} {unit}"
    return f"{n:,.0f} bytes"


def show_seconds(seconds: float) -> str:
    """0.4 s, 12 s, 3.5 min or 2.1 h"""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
