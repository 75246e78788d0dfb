"""Results per environment of a run with several.

Sources: the `env/NAME/…` figures of metrics.jsonl, and held-out evaluations that name an environment. A step without
such figures played only the main environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from volley.reporting.intervals import SuccessRate, success_rates

type Rows = Sequence[Mapping[str, Any]]
type Figures = tuple[float, float, int]
"""Mean reward, success, groups."""
_PREFIX = "env/"
_MOST_TOLD = 20


@dataclass(slots=True)
class EnvironmentCurve:
    """Results of one environment.

    `groups`: number of trained groups. `steps`: (step, mean reward, success). `held_out`: its evaluations.
    """

    env: str
    groups: int = 0
    steps: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    held_out: list[SuccessRate] = field(default_factory=list[SuccessRate])

    def summary(self) -> dict[str, Any]:
        first, last = (self.steps[0], self.steps[-1]) if self.steps else (None, None)
        return {
            "env": self.env,
            "groups": self.groups,
            "first_step": first[0] if first else None,
            "reward_first_step": first[1] if first else None,
            "reward_last_step": last[1] if last else None,
            "success_first_step": first[2] if first else None,
            "success_last_step": last[2] if last else None,
            "evaluations": [asdict(rate) for rate in self.held_out],
        }


def curves(steps: Rows, evals: Rows, main: str) -> list[EnvironmentCurve]:
    """One curve per environment, the main one first, then in order of appearance.

    Empty for a run that played only its main environment.

    Args:
        evals: evaluations of all environments; those of the main one name none.
    """
    others = any(_played(row) for row in steps) or any(row.get("env") for row in evals)
    if not others:
        return []
    found = {main: EnvironmentCurve(main)}
    for row in steps:
        for env, (reward, success, groups) in (_played(row) or _whole(row, main)).items():
            one = found.setdefault(env, EnvironmentCurve(env))
            one.groups += groups
            one.steps.append((int(row["step"]), reward, success))
    for row in evals:
        one = found.setdefault(str(row.get("env") or main), EnvironmentCurve(str(row.get("env") or main)))
        one.held_out += success_rates([row])
    return list(found.values())


def of_main(evals: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Evaluations of the main environment."""
    return [row for row in evals if not row.get("env")]


def by_environment(evals: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last row per step and environment, ordered by step."""
    last = {(int(row["step"]), str(row.get("env") or "")): row for row in evals if isinstance(row.get("step"), int)}
    return [last[key] for key in sorted(last)]


def table_rows(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Table rows (label, value), one per environment, with held-out success before and after."""
    rows: list[tuple[str, str]] = []
    for one in environments[:_MOST_TOLD]:
        parts = [f"{one['groups']} groups"]
        if one["reward_first_step"] is not None:
            parts.append(f"reward {one['reward_first_step']:.3f} → {one['reward_last_step']:.3f}")
            parts.append(f"success {one['success_first_step']:.0%} → {one['success_last_step']:.0%}")
        if one["evaluations"]:
            first, last = (SuccessRate(**one["evaluations"][i]) for i in (0, -1))
            change = f"{first.success:.1%} → {last}" if first.step != last.step else f"{last}"
            parts.append(f"held-out {change}")
        rows.append((f"environment {one['env']}", ", ".join(parts)))
    if len(environments) > _MOST_TOLD:
        rows.append(("environments", f"{len(environments) - _MOST_TOLD} more in summary.json"))
    return rows


def _played(row: Mapping[str, Any]) -> dict[str, Figures]:
    """Figures of a step by environment; empty if its line names none."""
    names = [key[len(_PREFIX) : -len("/groups")] for key in row if key.startswith(_PREFIX) and key.endswith("/groups")]
    found = {env: _figures(row, f"{_PREFIX}{env}/") for env in names}
    return {env: figures for env, figures in found.items() if figures is not None}


def _whole(row: Mapping[str, Any], main: str) -> dict[str, Figures]:
    figures = _figures(row, "")
    return {} if figures is None else {main: figures}


def _figures(row: Mapping[str, Any], prefix: str) -> Figures | None:
    reward, success, groups = (row.get(f"{prefix}{name}") for name in ("reward_mean", "success", "groups"))
    if isinstance(reward, int | float) and isinstance(success, int | float) and isinstance(groups, int | float):
        return float(reward), float(success), int(groups)
    return None
