"""The services of compose.yaml as they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def services() -> dict[str, Any]:
    """Return the services; Compose's tag `!reset`, which YAML does not know, is left out."""
    return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8").replace("!reset ", ""))["services"]
