"""`make simulate`: hand-over and recovery at sizes that no machine here has, from constants that it prints.

Options go in ARGS: `--measure` takes the rates of this machine, `--json FILE` writes all of it there too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from shared.files.storage import replace
from tools.simulate import scenarios
from tools.simulate.assumptions import SERVERS, SIZES, Assumptions

_DISTANCES = (1, 10, 50)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="take the rates of this machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args(argv)
    given = Assumptions()
    if options.measure:
        from tools.simulate.measure import measured

        given = measured(given)
    handed = [
        scenarios.hand_over(size, n, given, delta=delta) for size in SIZES for n in SERVERS for delta in (False, True)
    ]
    recovered = [scenarios.recovery(size, distance, given) for size in SIZES for distance in _DISTANCES]
    joined = {size.name: scenarios.joining(size, given) for size in SIZES}
    print("\n".join(["What is taken for given:", *given.lines(), ""]))
    print("\n".join(_hand_overs(handed)))
    print("\n".join(_recoveries(recovered)))
    after = ", ".join(f"{seconds:,.0f} s ({model})" for model, seconds in joined.items())
    print(f"\nA server that starts serves the newest version after {after}")
    if options.json is not None:
        document = {
            "assumptions": {name: c._asdict() for name, c in given._asdict().items()},
            "hand_over": [asdict(one) for one in handed],
            "recovery": recovered,
            "joining_s": joined,
        }
        replace(options.json, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    return 0


def _hand_overs(found: Sequence[scenarios.HandOver]) -> list[str]:
    lines = [
        "Hand-over, seconds from the end of an optimizer step:",
        f"{'model':>6} {'servers':>8} {'kind':>6} {'GB':>8} {'offered':>8} {'pulled':>8} {'serving':>8}"
        f" {'without fan-out':>16} {'sent by the trainer':>20}",
    ]
    for one in found:
        lines.append(
            f"{one.model:>6} {one.servers:>8} {one.kind:>6} {one.gigabytes:>8.1f} {one.made_s:>8.1f}"
            f" {one.pulled_s:>8.1f} {one.serving_s:>8.1f} {one.alone_s:>16,.0f} {one.trainer_sent:>13.2f} versions"
        )
    return lines


def _recoveries(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "\nRecovery of the trainer, seconds by the distance of the newest checkpoint:",
        f"{'model':>6} {'steps':>6} {'start':>8} {'read':>8} {'train again':>12} {'in all':>8}",
    ]
    for one in found:
        lines.append(
            f"{one['model']:>6} {one['distance']:>6} {one['boot_s']:>8.0f} {one['read_s']:>8.0f}"
            f" {one['replay_s']:>12.0f} {one['total_s']:>8.0f}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
