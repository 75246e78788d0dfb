"""Keys that this package adds to the section `run` of the configuration."""

from __future__ import annotations

from typing import Literal

from shared.section import PackageKey

type TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]

TRACKERS: PackageKey[tuple[TrackerName, ...]] = PackageKey(
    tuple[TrackerName, ...], (), "`trackers` are the experiment trackers that `volley train` reports to."
)
DASHBOARD: PackageKey[bool] = PackageKey(
    bool, True, "With `dashboard`, `volley train` offers a page to look at the run."
)
