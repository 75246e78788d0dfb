"""A seeded mutator changes copies of a valid run in hundreds of ways; the proof names every one, within bounds and
without a traceback.

The mutator runs in a process of its own, so that its peak of memory is that of `verify`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import small_run

_OF_A_KIND = 4
_HUNG_S = 120
"""On whatever machine the suite runs; the bound of `verify` is that of `python -m tests.support.mutations` on an idle
one.
"""


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_every_manipulation_is_named_within_bounds(tmp_path: Path):
    valid = small_run.make(tmp_path / small_run.RUN)
    command = [sys.executable, "-m", "tests.support.mutations", str(valid), "1", str(_OF_A_KIND), str(_HUNG_S)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = re.search(r"^(\d+) manipulations of \d+ kinds, (\d+) named", done.stdout, re.M)
    assert summary is not None
    assert int(summary[1]) == int(summary[2]) >= 50 * _OF_A_KIND
