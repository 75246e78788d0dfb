"""Command of the package."""

from volley.command import Command

EXPORT = Command(
    "volley_convert.command",
    "write a run's weights as a folder that transformers loads",
    "export runs/quickstart models/mine",
    group="Models and environments",
)
