"""Commands of the package."""

from volley.command import Command

LAUNCH = Command(
    "volley_launch.launch",
    "write a script that starts a run on Slurm, with SkyPilot or on TPU VMs",
    "launch slurm --config configs/quickstart.yaml --nodes 3",
    group="Train",
)
PLAN = Command(
    "volley_launch.plan.command",
    "devices, memory, weight updates, disk and cost of a run, before it starts",
    "plan --config configs/quickstart.yaml",
    group="Train",
)
NODE = Command(
    "volley_launch.node",
    "run the services of one host of a run on several hosts",
    "node launch/quickstart --hosts host0,host1 --index 0",
    outlives_output=True,
    group="Train",
)
