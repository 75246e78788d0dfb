"""Expressions in the files for Prometheus and Grafana, each with the text that shows its labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "docker" / "observability"


def rules() -> Iterator[tuple[str, str]]:
    """Expressions of the alert rules with their annotations."""
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]:
        yield from ((rule["expr"], " ".join(rule["annotations"].values())) for rule in group["rules"])


def panels() -> Iterator[tuple[str, str]]:
    """Expressions of the dashboard with their legends."""
    for panel in json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))["panels"]:
        yield from ((target["expr"], target["legendFormat"]) for target in panel.get("targets", ()))
