"""`volley chaos`: breaks everything it can reach of a run, then requires that nothing came of it.

By default a run of simulated services: real processes around a simulated engine and a small learner, whose weights must
end bit by bit as in the same run without faults. With `--real` the real engine and trainer, on a clock, whose last
steps must replay.
"""

from __future__ import annotations

from typing import Any

from services.cli.printing import complain, printed_block, printed_json, told_lines
from tools.chaos import campaign
from tools.chaos.campaign import CampaignSpec


def main(wanted: CampaignSpec, *, real: bool, as_json: bool) -> int:
    """Prints the result; 0 if every requirement holds, else 1. Raises VolleyError if the services cannot be started."""
    result = (campaign.real if real else campaign.simulated)(wanted, _progress)
    printed_json(result) if as_json else printed_block(told(result))
    return 0 if result["ok"] else 1


def told(result: dict[str, Any]) -> str:
    """For people: tables in Markdown, then a line for every requirement that is broken."""
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
    return told_lines(lines)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _progress(line: str) -> None:
    complain(line)
