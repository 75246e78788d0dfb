"""Phases of a run for the live display.

Rows for current phases, and a line for each phase that has ended. Values in, text out; needs no terminal. Durations
come from the watcher's clock, the time left from the records' times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from volley.local.supervisor import ServiceState
from volley.reporting.intervals import SuccessRate
from volley.reporting.lines import duration, format_mixture, number
from volley.reporting.progress import Activity, Record, RecordKind

_PACE = 6
"""Number of latest records from which the time left is estimated."""
_BEFORE_RL = ("", "loading", "warm start", "starting")


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A current phase: `done` of `total`, if known."""

    name: str
    detail: str
    done: int | None = None
    total: int | None = None


class RunPhases:
    """Phases by the events of a run. `service` and `record` return lines of phases that the event ends.

    Args:
        clock: seconds.
    """

    def __init__(self, max_steps: int, clock: Callable[[], float]) -> None:
        self._max_steps, self._clock = max_steps, clock
        self._services: dict[str, ServiceState] = {}
        self._since: dict[str, float] = {}
        self._answered = False
        self._stopping = False
        self._activity = Activity()
        self._sft: list[Record] = []
        self._steps: list[Record] = []
        self._waiting = ""

    def service(self, name: str, state: ServiceState) -> list[str]:
        self._services[name] = state
        self._stopping = state == "stopping" or (self._stopping and state == "down")
        if state in ("pending", "starting"):
            self._since.setdefault("services", self._clock())
        if state == "starting":
            self._since[name] = self._clock()
        if state != "up":
            return []
        if self._answered:
            return [self._ended(name, name, "answers again")]
        if all(one == "up" for one in self._services.values()):
            self._answered = True
            return [self._ended("services", "services", f"{', '.join(self._services)} answer")]
        return []

    def record(self, kind: RecordKind, record: Record) -> list[str]:
        self._waiting = ""
        if kind == "evaluation":
            return [_evaluated(record)]
        if kind == "sft":
            self._since.setdefault("warm start", self._clock())
            self._sft += [record] if "loss" in record else []
            return self._warm_start_ended() if self._sft and record.get("step") == record.get("max_steps") else []
        self._since.setdefault("RL", self._clock())
        self._steps = [*(one for one in self._steps if _step(one) < _step(record)), record]
        return self._rl_ended() if _step(record) >= self._max_steps else []

    def activity(self, activity: Activity) -> None:
        self._activity = activity
        phase = activity.trainer.get("phase")
        if phase == "warm start":
            self._since.setdefault("warm start", self._clock())
        elif phase not in (None, *_BEFORE_RL):
            self._since.setdefault("RL", self._clock())

    def quiet(self, waiting: str) -> None:
        self._waiting = waiting

    def rows(self) -> list[PhaseRow]:
        """Current phases: services, trainer, evaluations, then what the run waits for."""
        if self._stopping or (self._answered and set(self._services.values()) == {"down"}):
            left = [name for name, state in self._services.items() if state not in ("down", "pending")]
            return [PhaseRow("stopping", ", ".join(left))]
        rows = [*self._service_rows(), *self._trainer_rows(), *self._evaluation_rows()]
        return [*rows, PhaseRow("waiting", self._waiting)] if self._waiting else rows

    def _service_rows(self) -> list[PhaseRow]:
        missing = [name for name, state in self._services.items() if state != "up"]
        if not missing:
            return []
        n, names = len(self._services), ", ".join(missing)
        detail = f"{n - len(missing)}/{n} answer, {'starting again' if self._answered else 'starting'}: {names}"
        return [PhaseRow("services", detail, n - len(missing), n)]

    def _trainer_rows(self) -> list[PhaseRow]:
        trainer = self._activity.trainer
        phase, wait = trainer.get("phase", ""), trainer.get("waiting_for")
        if phase == "loading":
            return [PhaseRow("trainer", wait or "loads the model")]
        if phase == "warm start" or (not self._max_steps and phase in ("training", "saving", "paused")):
            return [self._warm_start_row(wait)]
        if phase == "starting":
            return [PhaseRow("trainer", wait or "makes the first checkpoint")]
        recorded = _step(self._steps[-1]) if self._steps else 0
        step = int(trainer.get("step") or recorded)
        if not (phase or self._steps) or max(step, recorded) >= self._max_steps:
            return []
        return [self._rl_row(step), *self._next_step_row(phase, step), *self._mixture_row()]

    def _warm_start_row(self, wait: str | None) -> PhaseRow:
        if not self._sft:
            return PhaseRow(self._supervised, wait or "before its first step")
        last = self._sft[-1]
        step, total = _step(last), int(last.get("max_steps") or 0)
        detail = f"{step}/{total}{_left(self._sft, total - step)}  loss {number(last, 'loss', '.4f')}"
        return PhaseRow(self._supervised, detail, step, total)

    def _rl_row(self, step: int) -> PhaseRow:
        detail = f"{step}/{self._max_steps}"
        if self._steps:
            last = self._steps[-1]
            detail += _left(self._steps, self._max_steps - step)
            detail += f"  reward {number(last, 'reward_mean', '+.3f')}  success {number(last, 'success', '.0%')}"
            detail += f"  {number(last, 'tokens_per_sec', ',.0f')} tokens/s"
        return PhaseRow("RL", detail, step, self._max_steps)

    def _next_step_row(self, phase: str, step: int) -> list[PhaseRow]:
        trainer, run = self._activity.trainer, self._activity.run
        name = f"step {step + 1}"
        if phase == "waiting":
            groups, wanted = int(trainer.get("waiting_groups") or 0), int(run.get("groups_per_step") or 0)
            episodes = f"running episodes: {n}" if (n := run.get("episodes_running")) else ""
            ready = f"{min(groups, wanted)}/{wanted} groups" if wanted else f"{groups} groups"
            return [PhaseRow(name, ", ".join(filter(None, (ready, episodes))), min(groups, wanted), wanted or None)]
        if phase == "saving":
            return [PhaseRow("checkpoint", f"of step {step}")]
        labels = {"training": "is trained", "paused": "paused on request"}
        return [PhaseRow(name, labels[phase])] if phase in labels else []

    def _mixture_row(self) -> list[PhaseRow]:
        mixture = format_mixture(self._activity.run.get("mixture"))
        return [PhaseRow("mixture", mixture)] if mixture else []

    def _evaluation_rows(self) -> list[PhaseRow]:
        run = self._activity.run
        if run.get("evaluating_step") is None:
            return []
        done, total = run.get("evaluated") or (None, None)
        detail = f"{done}/{total} tasks, " if total else ""
        return [PhaseRow("evaluation", f"{detail}after step {run['evaluating_step']}", done, total)]

    def _warm_start_ended(self) -> list[str]:
        first, last = self._sft[0], self._sft[-1]
        loss = number(last, "loss", ".4f")
        if _step(first) == 1:
            loss = f"{number(first, 'loss', '.4f')} → {loss}"
        return [self._ended("warm start", self._supervised, f"{_step(last)} steps, loss {loss}")]

    @property
    def _supervised(self) -> str:
        """Name of the supervised phase: a warm start if RL follows."""
        return "warm start" if self._max_steps else "supervised"

    def _rl_ended(self) -> list[str]:
        first, last = self._steps[0], self._steps[-1]
        steps = f"{len(self._steps)} steps" if _step(first) == 1 else f"steps {_step(first)}–{_step(last)}"
        reward = f"{number(first, 'reward_mean', '+.3f')} → {number(last, 'reward_mean', '+.3f')}"
        tokens = sum(int(one.get("tokens") or 0) for one in self._steps)
        return [self._ended("RL", "RL", f"{steps}, reward {reward}, {tokens:,} tokens trained")]

    def _ended(self, what: str, name: str, detail: str) -> str:
        return _line(name, self._clock() - self._since[what], detail)


def _evaluated(record: Record) -> str:
    rate = SuccessRate.of(record)
    success = f"{rate} of {rate.tasks} tasks" if rate else f"{number(record, 'success', '.1%')}"
    failed = f", {record['failed']} failed" if record.get("failed") else ""
    of = f"{record['env']}: " if record.get("env") else ""
    detail = f"{of}success {success}{failed}, after step {record.get('step', '?')}"
    return _line("evaluation", record.get("elapsed_s"), detail)


def _line(name: str, seconds: Any, detail: str) -> str:
    took = duration(seconds) if isinstance(seconds, int | float) else "–"
    return f"✓ {name:<10} {took:>11}  {detail}"


def _left(records: list[Record], n: int) -> str:
    """Estimated time for `n` more records, at the pace of the latest ones."""
    times = [float(one["time"]) for one in records[-_PACE:] if isinstance(one.get("time"), int | float)]
    if len(times) < 2 or times[-1] <= times[0] or n <= 0:
        return ""
    return f"  {_clock_time((times[-1] - times[0]) / (len(times) - 1) * n)} left"


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _step(record: Mapping[str, Any]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0
