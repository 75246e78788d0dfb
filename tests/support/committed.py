"""Configurations that come with Volley."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
_FILES = [*sorted(ROOT.glob("configs/*.yaml")), *sorted(ROOT.glob("recipes/*/config*.yaml"))]
CONFIGS = [path for path in _FILES if "env" in yaml.safe_load(path.read_text(encoding="utf-8"))["data"]]
FOR_OWN_DATA = [path for path in _FILES if path not in CONFIGS]
"""Those that `volley train --data` completes."""
every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
"""Runs a test with the `path` of each of them."""
