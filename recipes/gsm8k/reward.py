"""Reward of a GSM8K solution: 0.9 for the right number, and 0.1 for a number in the form that is asked for."""

import re
from typing import Any

_NUMBER = re.compile(r"####\s*\$?(-?\d[\d,]*(?:\.\d+)?)")


def reward(completion: str, row: dict[str, Any]) -> dict[str, float | bool]:
    said = _NUMBER.search(completion)
    right = said is not None and float(said[1].replace(",", "")) == float(row["answer"])
    return {"right": 0.9 * right, "format": 0.1 * (said is not None), "success": right}
