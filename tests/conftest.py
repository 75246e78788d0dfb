"""Of all tests: no test asserts on time, so Hypothesis has no deadline for an example either. numpy multiplies in one
thread, also in processes that tests start: on matrices of this size, threads waiting for each other take five times the
work. The key that marks runs (shared.run.trust) lies in a folder of the test process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is first imported
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="volley-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
settings.register_profile("volley", deadline=None)
settings.load_profile("volley")
