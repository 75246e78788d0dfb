"""Command of the package."""

from volley.command import Command

SERVE = Command(
    "volley_serving.serve",
    "serve a model or a run's version by HTTP, alone",
    "serve runs/quickstart",
    outlives_output=True,
    group="Models and environments",
)
