"""Commands of the package."""

from volley.command import Command

COMPARE = Command(
    "volley_dashboard.report.compare",
    "several runs in a table and one plot; with --vary, train them first",
    "compare runs/a runs/b",
    outlives_output=True,
    group="Look",
)
DASHBOARD = Command(
    "volley_dashboard.page.command",
    "look at runs in a browser: curves, services, every token",
    "dashboard runs",
    outlives_output=True,
    group="Look",
)
REPORT = Command(
    "volley_dashboard.report.report",
    "table, plot.png and summary.json of a run",
    "report runs/quickstart",
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
