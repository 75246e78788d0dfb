"""Backend of a trainer of several processes: each call of process 0 runs in all of them.

Calls carry the groups' wire bytes and versions, so every process makes the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from services.trainer.backend.policy import PolicyBackend
from services.trainer.backend.warm_start import WarmSteps
from services.trainer.groups.group_buffer import ReadyGroup, ready_group
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.publishing.publications import PublishedVersion
from shared.run.checksums import Checksums
from shared.run.pinned import Flat
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion
from volley_multihost.distributed import join_devices, leave_devices
from volley_multihost.processes import SAVES, Calls, Leader, stream, together


class LeadingBackend:
    """`Backend` of process 0: each call runs in all processes and returns when all have finished.

    An error of any process is raised. `restore`, the first call, raises ProcessesMissing until all have joined.
    """

    def __init__(self, own: PolicyBackend, leader: Leader) -> None:
        self._own, self._leader = own, leader

    @property
    def memory(self) -> Mapping[str, float]:
        return self._own.memory

    @property
    def plan(self) -> str:
        return self._own.plan

    def restore(self) -> TrainerState | None:
        if (coordinator := self._leader.assemble()) is not None:
            join_devices(coordinator, self._leader.n, 0, self._own.n_devices)
        return self._together("restore", {}, self._own.restore)

    def build(self) -> None:
        self._together("build", {}, self._own.build)

    def warm_start(self, steps: WarmSteps) -> Iterator[Any]:
        ours = self._together("warm_start", {"examples": steps.to_wire()}, lambda: self._own.warm_start(steps))
        while (made := self._together("warm_step", {}, lambda: next(ours, None))) is not None:
            yield made

    def start(self, state: TrainerState) -> Path:
        return self._together("start", {"state": state.to_json()}, lambda: self._own.start(state))

    def apply_settings(self, settings: Flat) -> None:
        self._together("under", {"settings": orjson.dumps(settings)}, lambda: self._own.apply_settings(settings))

    def compile(self) -> None:
        self._together("compile", {}, self._own.compile)

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        arguments = {"groups": _payloads(held), "version": str(before)}
        return self._together("step", arguments, lambda: self._own.step(held, before))

    def logprob_diffs(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[float | None]:
        arguments = {"groups": _payloads(held), "version": str(present)}
        return self._together("logprob_diffs", arguments, lambda: self._own.logprob_diffs(held, present))

    def spot_check(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[Any]:
        arguments = {"groups": _payloads(held), "version": str(present)}
        return self._together("spot_check", arguments, lambda: self._own.spot_check(held, present))

    def effective_share(self, held: Sequence[ReadyGroup], present: WeightVersion) -> float:
        arguments = {"groups": _payloads(held), "version": str(present)}
        return self._together("effective_share", arguments, lambda: self._own.effective_share(held, present))

    def rewind(self, version: WeightVersion) -> None:
        self._together("rewind", {"version": str(version)}, lambda: self._own.rewind(version))

    def checksum(self) -> str:
        return self._together("checksum", {}, self._own.checksum)

    def checksums(self) -> Checksums:
        return self._together("checksums", {}, self._own.checksums)

    def take(self, state: TrainerState, base: WeightVersion) -> Callable[[], Path]:
        arguments = {"state": state.to_json(), "version": str(base)}
        ours = self._together("take", arguments, lambda: self._own.take(state, base))

        def write() -> Path:
            with stream(SAVES):
                return self._together("write_taken", {}, ours)

        return write

    def publish(self, version: WeightVersion) -> PublishedVersion:
        return self._together("publish", {"version": str(version)}, lambda: self._own.publish(version))

    def close(self) -> None:
        """End the incarnation in order: all processes leave together."""
        self._leader.end()
        leave_devices()
        self._leader.close()

    def _together[R](self, name: str, arguments: Mapping[str, Any], ours: Callable[[], R]) -> R:
        return together(self._leader, name, arguments, ours)


class FollowingCalls:
    """Calls of a follower, on its own backend. `received` makes the steps of a warm start from its examples."""

    def __init__(self, own: PolicyBackend, received: Callable[[Any], WarmSteps]) -> None:
        self._own, self._received = own, received
        self._warm_steps: Iterator[Any] = iter(())
        self._write: Callable[[], object] = _nothing_taken

    def table(self) -> Calls:
        """Return the functions of calls by name."""
        own = self._own
        return {
            "restore": lambda _: own.restore(),
            "build": lambda _: own.build(),
            "warm_start": self._warm_start,
            "warm_step": lambda _: next(self._warm_steps, None),
            "start": lambda given: own.start(_state(given)),
            "under": lambda given: own.apply_settings(orjson.loads(given["settings"])),
            "compile": lambda _: own.compile(),
            "step": lambda given: own.step(_groups(given), _version(given)),
            "logprob_diffs": lambda given: own.logprob_diffs(_groups(given), _version(given)),
            "spot_check": lambda given: own.spot_check(_groups(given), _version(given)),
            "effective_share": lambda given: own.effective_share(_groups(given), _version(given)),
            "rewind": lambda given: own.rewind(_version(given)),
            "checksum": lambda _: own.checksum(),
            "checksums": lambda _: own.checksums(),
            "take": self._take,
            "publish": lambda given: own.publish(_version(given)),
        }

    def saving(self) -> Calls:
        """Return the functions of the stream `SAVES`, which another thread follows."""
        return {"write_taken": lambda _: self._write()}

    def _take(self, given: Mapping[str, Any]) -> None:
        self._write = self._own.take(_state(given), _version(given))

    def _warm_start(self, given: Mapping[str, Any]) -> None:
        self._warm_steps = self._own.warm_start(self._received(given["examples"]))


def _nothing_taken() -> None:
    raise AssertionError("a checkpoint must be taken before it is written")


def _payloads(held: Sequence[ReadyGroup]) -> list[bytes]:
    return [one.payload for one in held]


def _groups(given: Mapping[str, Any]) -> list[ReadyGroup]:
    return [ready_group(Group.decode(payload), payload, "") for payload in given["groups"]]


def _version(given: Mapping[str, Any]) -> WeightVersion:
    return WeightVersion.parse(given["version"])


def _state(given: Mapping[str, Any]) -> TrainerState:
    return TrainerState.from_mapping(orjson.loads(given["state"]))
