"""Of all tests: no test asserts on time, so Hypothesis has no deadline for an example either."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("volley", deadline=None)
settings.load_profile("volley")
