"""Read the fields of a decoded record with their exact types.

Each raises TypeError for a value of another type.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def read_array(value: Any, dtype: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != np.dtype(dtype):
        raise TypeError(f"expected a {dtype} array, got {type(value).__name__}")
    return value


def read_int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an integer, got {type(value).__name__}")
    return value


def read_float(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def read_counts(value: Any) -> dict[str, int]:
    return {read_text(name): read_int(n) for name, n in value.items()}
