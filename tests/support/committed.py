"""Configurations that come with Volley."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGS = [*sorted(ROOT.glob("configs/*.yaml")), *sorted(ROOT.glob("recipes/*/config*.yaml"))]
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
"""Runs a test with the `path` of each of them."""
