"""Arbitrary values as JSON and msgpack carry them, and valid trees in which some are put."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("VOLLEY_FUZZ_CASES", "150"))
"""Of a service; a test of one parser has a third of it."""

EXAMPLES = settings(
    max_examples=max(50, CASES // 3),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats() | st.booleans() | st.none()
_NAMES = ["e000001-s000000", "..", "/etc/passwd", "\0", "a" * 5000, "٣", "NaN", "1e400", "9" * 5000]
TEXTS = st.text(max_size=12) | st.sampled_from(_NAMES)
ARRAYS = st.sampled_from(["<i4", "<f4", "u1", "<i8", "<f8"]).flatmap(
    lambda dtype: st.integers(0, 3).map(lambda n: np.zeros(n, dtype))
)
KEYS = st.text(max_size=4) | st.binary(max_size=2)
JSON: st.SearchStrategy[Any] = st.recursive(
    NUMBERS | TEXTS,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
    max_leaves=6,
)
WIRE: st.SearchStrategy[Any] = st.recursive(
    NUMBERS | TEXTS | ARRAYS | st.binary(max_size=4),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3),
    max_leaves=6,
)


def as_json(tree: Any) -> bytes:
    """With NaN and infinities, as Python writes them."""
    return json.dumps(tree).encode()


def changed(valid: Mapping[str, Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """`valid` with some of its fields, or fields of its fields, missing or replaced; and fields it has not."""

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        tree = json.loads(json.dumps(valid))
        for _ in range(draw(st.integers(1, 3))):
            node: Any = tree
            while True:
                places = list(node) if isinstance(node, dict) else list(range(len(node)))
                key = (
                    draw(st.sampled_from([*places, "extra"]))
                    if isinstance(node, dict)
                    else draw(st.sampled_from(places))
                )
                inside = node.get(key) if isinstance(node, dict) else node[key]
                if not isinstance(inside, dict | list) or not inside or draw(st.booleans()):
                    break
                node = inside
            if draw(st.integers(0, 4)) or isinstance(node, list):
                node[key] = draw(values)
            else:
                node.pop(key, None)
        return tree

    return build()
