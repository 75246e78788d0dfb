"""Commands of the package."""

from volley.command import Command

DASHBOARD = Command(
    "volley_dashboard.page.command",
    "look at runs in a browser: curves, services, every token",
    "dashboard runs",
    outlives_output=True,
    group="Look",
)
TRACK = Command(
    "volley_dashboard.tracking.command",
    "report a run to TensorBoard, W&B, trackio or MLflow",
    "track runs/quickstart --to tensorboard",
    group="Look",
)
TRAJECTORIES = Command(
    "volley_dashboard.trajectories.command",
    "search, read and export the episodes of a run",
    "trajectories runs/quickstart --reward-max 0 --sort tokens",
    group="Look",
)
