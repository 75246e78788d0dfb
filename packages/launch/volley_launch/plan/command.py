"""`volley plan`: what a run takes, before anything starts: devices, memory, weight updates, disk and cost."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from shared import config
from shared.errors import ConfigError
from volley import own_data
from volley.printing import print_result

_DEVICES = "NAME[=BYTES][:COUNT]"


def add(parser: argparse.ArgumentParser) -> None:
    config.add_arguments(parser, required=False)
    own_data.add(parser)
    parser.add_argument(
        "--trainer", metavar=_DEVICES, help="the trainer's devices, e.g. v5e:8 (default: this machine's)"
    )
    parser.add_argument(
        "--rollout",
        metavar=_DEVICES,
        help="devices of all rollout servers, e.g. h100:4, or `shared`: the trainer's GPU (default: same)",
    )
    parser.add_argument(
        "--bandwidth", metavar="RATE", help="from the trainer to a rollout server, e.g. 10Gbit/s or 1.2GB/s"
    )
    parser.add_argument(
        "--moved",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="share of the weights that a step changes in bfloat16, for the size of deltas (default: 0.02)",
    )
    parser.add_argument("--prices", type=Path, metavar="FILE.yaml", help="lines NAME: PRICE, per device and hour")
    parser.add_argument("--step-s", type=float, metavar="SECONDS", help="time of a step, for the price of the run")


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if the run does not fit. Raises ConfigError."""
    from shared.models.config import ModelConfig
    from shared.models.hub import model_folder
    from volley import choices
    from volley_launch.plan.run_plan import PlanRequest, make
    from volley_launch.plan.text import format_plan
    from volley_launch.planning import automatic
    from volley_launch.planning.quantities import parse_rate, read_prices

    _check("--step-s", arguments.step_s, most=math.inf)
    _check("--moved", arguments.moved, most=1.0)
    loaded = own_data.load(arguments)
    run_config = loaded.config
    model = ModelConfig.read(model_folder(run_config.model.path, run_config.run.folder))
    if arguments.trainer is None and arguments.rollout is None:
        loaded = automatic.fit(loaded, model)
    request = PlanRequest(
        trainer=arguments.trainer,
        rollout=arguments.rollout,
        bandwidth=None if arguments.bandwidth is None else parse_rate(arguments.bandwidth),
        moved=arguments.moved,
        prices=None if arguments.prices is None else read_prices(arguments.prices),
        step_s=arguments.step_s,
    )
    plan = make(loaded, model, request)
    chosen = [f"chosen: {line}" for line in choices.lines(loaded)]
    print_result({**plan.to_json(), "chosen": dict(loaded.choices)}, lambda: "\n".join([*chosen, format_plan(plan)]))
    return 1 if plan.refusals else 0


def _check(name: str, value: float | None, most: float) -> None:
    if value is not None and not (0 < value <= most and math.isfinite(value)):
        raise ConfigError(
            f"{name} {value:g} is not a number above 0" + (f" and at most {most:g}" if most < math.inf else "")
        )
