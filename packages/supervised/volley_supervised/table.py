"""Commands of the package; imported to list them, so it stays light."""

from volley.command import Command

SFT = Command(
    "volley_supervised.command",
    "train on conversations: files, or an environment's demonstrations",
    "sft talks.jsonl run.name=talks --model models/smollm2",
    outlives_output=True,
    group="Train",
    section="sft",
)
DPO = Command(
    "volley_supervised.command",
    "train on preference pairs (direct preference optimization)",
    "dpo pairs.jsonl run.name=pairs --model models/smollm2",
    outlives_output=True,
    group="Train",
    section="sft",
)
