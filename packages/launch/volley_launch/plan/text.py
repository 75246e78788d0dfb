"""Plan of a run as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from volley.printing import join_lines
from volley_launch.plan.costs import Cost, Disk, HandOver
from volley_launch.plan.run_plan import RunPlan
from volley_launch.planning.quantities import show_bytes, show_seconds

_WIDTH = 30


def format_plan(plan: RunPlan) -> str:
    """Format every part that the run has, then notes and refusals."""
    parts: Sequence[tuple[str, Any, Callable[[Any], Iterator[str]]]] = (
        (f"topology (mode {plan.topology['mode']})", plan.topology, _of_topology),
        ("each device of the trainer", plan.trainer, _of_trainer),
        ("each device of a rollout server", plan.rollout, _of_rollout),
        ("memory of the whole machine", plan.host, _of_host),
        ("weight update of each rollout server", plan.hand_over, _of_hand_over),
        ("disk, at most", plan.disk, _of_disk),
        ("cost of the devices", plan.cost, _of_cost),
    )
    lines = [_model(plan.model)]
    for title, found, rows in parts:
        lines += [] if found is None else ["", title, *rows(found)]
    lines += [f"note: {note}" for note in plan.notes]
    for one in plan.refusals:
        lines += ["", f"CANNOT RUN: {one.reason}", f"  change: {one.change}"]
    if not plan.refusals:
        lines += ["", "It fits."]
    return join_lines(lines)


def _row(name: str, value: str, note: str = "") -> str:
    return f"  {name:{_WIDTH}} {value:>12}{'   ' * bool(note)}{note}"


def _model(model: Mapping[str, Any]) -> str:
    trained = "" if model["trained"] == model["parameters"] else f", {model['trained']:,} of adapters are trained"
    return f"model {model['path']} ({model['type']}): {model['parameters']:,} parameters{trained}"


def _of_topology(found: Mapping[str, Any]) -> Iterator[str]:
    for host, names in found["processes"].items():
        yield f"  {host}: {', '.join(names)}"
    for name, url in found["external"].items():
        yield f"  {name}: {url}"
    trainer, servers = found["trainer"], found["rollout"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in trainer["mesh"].items())
    yield f"  trainer on {_devices(trainer)}: mesh {mesh}, {_count(trainer['processes'], 'process')}"
    if servers is not None:
        each = f", {servers['devices_of_each']} each" if servers["servers"] > 1 else ""
        yield f"  {_count(servers['servers'], 'rollout server')} on {_devices(servers)}{each}"


def _devices(part: Mapping[str, Any]) -> str:
    idle = f", {part['idle']} more idle" if part["idle"] else ""
    devices = f"{part['devices']} x {part['device']} of {show_bytes(part['memory'])}"
    return f"{devices} ({_count(part['hosts'], 'host')}{idle})"


def _count(n: int, name: str) -> str:
    return f"{n} {name}{'' if n == 1 else 'es' if name.endswith('s') else 's'}"


def _of_trainer(found: Mapping[str, Any]) -> Iterator[str]:
    for name, n in (found["kept"] | found["step"]).items():
        yield _row(name, show_bytes(n))
    for name, n in found["host"].items():
        yield _row(f"{name} (host)", show_bytes(n))
    for phase, n in found["phases"].items():
        yield _row(f"peak of a {phase}", show_bytes(n), f"of {show_bytes(found['usable'])}")


def _of_rollout(found: Mapping[str, Any]) -> Iterator[str]:
    yield _row("weights", show_bytes(found["weights"]))
    yield _row("weights that arrive", show_bytes(found["arriving"]))
    yield _row("prefill and logits", show_bytes(found["step"]))
    pool = f"{max(0, found['pool_tokens']):,} tokens: {found['sequences']:,} sequences of {found['context_length']:,}"
    yield _row("keys and values", show_bytes(found["pool"]), pool)
    yield _row("sum", show_bytes(found["total"]), f"of {show_bytes(found['limit'])}")


def _of_host(found: Mapping[str, Any]) -> Iterator[str]:
    yield _row("trainer", show_bytes(found["trainer"]), "arrays, programs and libraries")
    if n := found["n_servers"]:
        yield _row(_count(n, "rollout server"), show_bytes(n * found["server"]), "likewise")
    yield _row("other processes of the run", show_bytes(found["services"]))
    yield _row("left to the system", show_bytes(found["system"]))
    yield _row("sum", show_bytes(found["total"]), f"of {show_bytes(found['memory'])}")


def _of_hand_over(found: HandOver) -> Iterator[str]:
    if found.base:
        yield _row("base, once", show_bytes(found.base))
    yield _row("whole", show_bytes(found.whole), _at_least(found.whole_s))
    if found.delta is not None:
        yield _row("delta", show_bytes(found.delta), _at_least(found.delta_s))


def _at_least(seconds: float | None) -> str:
    return "" if seconds is None else f"at least {show_seconds(seconds)}"


def _of_disk(found: Disk) -> Iterator[str]:
    yield _row("checkpoints", show_bytes(found.checkpoint * found.n_checkpoints), _times(found))
    if found.base:
        yield _row("base of the adapters", show_bytes(found.base))
    if found.published:
        yield _row("published versions", show_bytes(found.published))
        yield _row("archive", show_bytes(found.archive), f"{show_bytes(found.archive_per_step)} a step")
        yield _row("on each rollout server", show_bytes(found.on_server))
    yield _row("run folder", show_bytes(found.total))


def _times(found: Disk) -> str:
    return f"{found.n_checkpoints} of {show_bytes(found.checkpoint)}"


def _of_cost(found: Cost) -> Iterator[str]:
    for name, price in found.parts.items():
        yield _row(f"{name} per hour", f"{price:,.2f}")
    yield _row("per hour", f"{found.per_hour:,.2f}")
    if found.of_run is not None and found.hours is not None:
        yield _row("of the run", f"{found.of_run:,.2f}", f"{show_seconds(found.hours * 3600)} of steps")
