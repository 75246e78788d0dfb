"""Commands of the package."""

from volley.command import Command

COMMAND = Command(
    "volley_tinker.command",
    "train a model for clients of Tinker's interface (the tinker SDK)",
    "tinker models/smollm2",
    group="Train",
    outlives_output=True,
)
