"""Of all tests: no test asserts on time, so Hypothesis has no deadline for an example either. numpy multiplies in one
thread, also in processes that tests start: on matrices of this size, threads waiting for each other take five times the
work.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is first imported
settings.register_profile("volley", deadline=None)
settings.load_profile("volley")
