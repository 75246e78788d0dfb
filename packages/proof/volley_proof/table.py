"""Commands of the package."""

from volley.command import Command

VERIFY = Command(
    "volley_proof.verify.command",
    "prove that no ticket was lost or trained twice",
    "verify runs/quickstart",
    group="Prove",
)
REPLAY = Command(
    "volley_proof.commands.replay",
    "train archived groups again, and compare bit for bit",
    "replay runs/quickstart --from-step 14",
    group="Prove",
)
FORK = Command(
    "volley_proof.commands.fork",
    "train archived groups again under other settings, as a new run, without generating",
    "fork runs/quickstart algorithm.name=dppo --from 8",
    outlives_output=True,
    group="Prove",
)
REVERIFY = Command(
    "volley_proof.reverify.command",
    "replay archived episodes in today's environments, and compare rewards",
    "reverify runs/quickstart",
    group="Prove",
)
