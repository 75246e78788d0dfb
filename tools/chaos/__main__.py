"""`make chaos`: inject faults into a run, and check its results.

    make chaos ARGS="--seed 1 --kills 300 --wipes 10 --zombies 20"

No ticket may be lost or trained twice. By default, real processes run a simulated engine and a small learner; the final
weights must be bit-identical to those of the same run without faults. With `--real`, the real engine and trainer run
for some minutes; the last steps must replay bit by bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import count, minutes
from tools.chaos import campaign
from tools.chaos.campaign import CampaignSpec
from tools.chaos.plan import Amounts
from volley.printing import complain, join_lines, print_result, use_json
from volley.program import run_program


def main(argv: Sequence[str] | None = None) -> None:
    """Print the result. Exit code 0 if every requirement holds, else 1."""
    run_program(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make chaos", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="seed of the plan of faults (default: 0)")
    amount = "; not with --real (default: %(default)s)"
    add("--kills", type=count, default=40, metavar="N", help=f"SIGKILLs over all services{amount}")
    add("--wipes", type=count, default=2, metavar="N", help=f"times that Redis loses all data{amount}")
    add("--zombies", type=count, default=3, metavar="N", help=f"trainers that resume after being replaced{amount}")
    add("--real", action="store_true", help="run the real engine and trainer for --minutes, not simulated ones")
    add("--minutes", type=minutes, default=3.0, metavar="M", help="length with --real, more than 0 (default: 3)")
    add("--dir", type=Path, default=Path("runs"), metavar="DIR", help="parent of the run's folder (default: runs)")
    add("--save-interval-steps", type=int, default=1, metavar="N", help="steps between checkpoints (default: 1)")
    add("--json", action="store_true", help="print JSON")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Raises VolleyError if the services cannot be started."""
    amounts = Amounts(arguments.kills, arguments.wipes, arguments.zombies)
    wanted = CampaignSpec(arguments.seed, amounts, arguments.minutes, arguments.dir, arguments.save_interval_steps)
    result = (campaign.real if arguments.real else campaign.simulated)(wanted, _progress)
    use_json(arguments.json)
    print_result(result, lambda: format_result(result))
    return 0 if result["ok"] else 1


def format_result(result: dict[str, Any]) -> str:
    """Result as Markdown tables, then one line per broken requirement."""
    faults = [[name, str(n)] for name, n in result["faults"].items()]
    kills = ", ".join(f"{name} {n}" for name, n in result["kills"].items())
    sums = ["recovered", "retried_episodes", "lost", "doubly_trained", "bit_identical", "steps", "elapsed_sec"]
    recovery = [[name, f"{one['median']:.2f}", f"{one['max']:.2f}"] for name, one in result["recovery_sec"].items()]
    lines = [
        *_table(["fault", "times"], faults),
        "",
        *_table(
            [name.replace("_", " ") for name in ["faults", *sums]],
            [[str(sum(result["faults"].values())), *(str(result[name]) for name in sums)]],
        ),
        "",
        *_table(["service", "recovery, median s", "max s"], recovery),
        "",
        f"Kills: {kills}. Seed {result['seed']}; {result['machine']}.",
        *(f"BROKEN {one['requirement']}: {one['detail']}" for one in result["violations"]),
    ]
    return join_lines(lines)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _progress(line: str) -> None:
    complain(line)


if __name__ == "__main__":
    main()
