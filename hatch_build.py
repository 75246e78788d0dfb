"""Build hook: a wheel holds the core, all of packages/, and the locked project that its environments are made from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROJECT = "volley/project"
"""Folder of the wheel with the files that are not code; volley/wheel.py puts them beside the code again."""
FILES = ("pyproject.toml", "uv.lock", "configs", "recipes", "deploy/sky", "deploy/slurm", "deploy/tpu-vm")


class WheelHook(BuildHookInterface):
    """Adds files, requirements and entry points to a wheel; an editable installation has none of these."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        root, included = Path(self.root), build_data["force_include"]
        included |= {str(root / name): f"{PROJECT}/{name}" for name in FILES}
        for file in sorted(root.glob("packages/*/pyproject.toml")):
            project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
            included[str(file)] = f"{PROJECT}/{file.relative_to(root)}"
            included |= {str(module): module.name for module in file.parent.glob("volley_*")}
            needed = project.get("dependencies", ())
            build_data["dependencies"] += [one for one in needed if not one.startswith("volley-")]
            for group, points in project.get("entry-points", {}).items():
                self.metadata.core.entry_points.setdefault(group, {}).update(points)
