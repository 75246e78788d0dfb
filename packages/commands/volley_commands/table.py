"""Commands of the package."""

from volley.command import Command

FOLLOW = Command(
    "volley_commands.follow",
    "watch a run whose services run elsewhere, and report at its end",
    "follow --config configs/quickstart.yaml",
    group="Train",
)
STATUS = Command(
    "volley_commands.status",
    "readiness, weight versions, who waits for whom",
    "status runs/quickstart --watch",
    group="Look",
)
EVAL = Command(
    "volley_commands.evaluate",
    "evaluate a run's version or a model on held-out tasks, without training",
    "eval runs/quickstart --json result.json",
    outlives_output=True,
    group="Look",
)
MODEL = Command(
    "volley_commands.model",
    "download a model",
    "model get smollm2 models/smollm2",
    group="Models and environments",
)
DOCTOR = Command("volley_commands.doctor", "check what is installed and usable here", "doctor", group="This machine")
CONFIG = Command(
    "volley_commands.configuration",
    "a configuration with the source of each value, or its JSON schema",
    "config show --config configs/quickstart.yaml --set",
    group="This machine",
)
UPGRADE = Command(
    "volley_commands.upgrade",
    "what is installed, how to upgrade it, and what becomes of runs",
    "upgrade",
    group="This machine",
)
COMPLETION = Command(
    "volley_commands.completion",
    "a script that completes commands and runs in bash, zsh or fish",
    'eval "$(volley completion bash)"',
    group="This machine",
)
ACCESS = Command(
    "volley_commands.access",
    "addresses and token files of a run, as shell variables",
    'eval "$(volley access runs/quickstart)"',
    group="This machine",
)
