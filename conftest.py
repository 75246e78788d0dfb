"""Of all tests: no test asserts on time, so Hypothesis has no deadline for an example either. numpy multiplies in one
thread, also in processes that tests start: on matrices of this size, threads waiting for each other take five times the
work. The key that marks runs (shared.run.trust) lies in a folder of the test process.

`--part K/N` runs the tests whose name falls into part K of N, K from 0: the parts of a suite are disjoint and together
are the suite.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import zlib
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is first imported
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="volley-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
settings.register_profile("volley", deadline=None)
settings.load_profile("volley")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run only part K of N of the tests, K from 0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of one part; a test stays in its part whatever else is selected."""
    if (part := config.getoption("--part")) is None:
        return
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise pytest.UsageError(f"--part {part}: give K/N with K below N, for example 0/2")
    own = {item: zlib.crc32(item.nodeid.encode()) % int(count) == int(number) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not own[item]])
    items[:] = [item for item in items if own[item]]


@pytest.fixture(scope="session")
def session_parts() -> dict[str, Any]:
    """What one pytest starts once. A fixture that several conftest.py import is set up once in each of them."""
    return {}
