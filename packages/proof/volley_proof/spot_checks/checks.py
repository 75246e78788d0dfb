"""Spot checks in the train loop: before a step, score episodes that arrived since the last one, and name wrong servers.

Nothing that is trained depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.interfaces import TrainerBackend
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.process import telemetry
from shared.types import WeightVersion
from volley_proof.spot_checks.servers import ServerRecords, Suspicion

_log = telemetry.Log("spot_checks")


class SpotChecks:
    """Records of the servers, since this trainer started."""

    def __init__(self, backend: TrainerBackend, status: TrainerStatus, waiter: Waiter, *, truncated: bool) -> None:
        self._backend, self._status, self._waiter = backend, status, waiter
        self._records = ServerRecords(truncated=truncated)
        self._seen = set[int]()

    async def check(self, groups: Sequence[ReadyGroup], present: WeightVersion) -> dict[str, Any]:
        """Check the groups that were not here before; return fields for the step's line of metrics.

        Args:
            groups: all that are here, those of the step included.
            present: version of the present weights.
        """
        new = [one for one in groups if one.group.ticket not in self._seen]
        self._seen = {one.group.ticket for one in groups}
        before = self._records.suspected
        self._records.add(await self._waiter.blocking(self._backend.spot_check, new, present))
        self._report(before)
        return self._records.of_line()

    def _report(self, before: Mapping[str, Suspicion]) -> None:
        records, run = self._records, self._status.run
        for server in records.suspected.keys() - before.keys():
            _log.warning("server computes something else", run=run, **records.describe(server))
        for server in before.keys() - records.suspected.keys():
            _log.info("server computes what it should again", run=run, url=server)
        self._status.spot_checks = records.describe_all()
        self._status.warnings = [_warning(one) for one in self._status.spot_checks if "fault" in one]


def _warning(about: Mapping[str, Any]) -> str:
    if about["fault"] == "sampling":
        return (
            f"{about['url']} draws its tokens otherwise than the other servers, seen since {about['since']}: their"
            f" -log p exceeds the entropy by {about['excess']:.0%}; compare its sampling settings with the others'"
        )
    return (
        f"{about['url']} computes something else than the weights it names, since {about['since']}: mean |Δ log p| is"
        f" {about['difference']:.2g} nats a token, {about['ratio']:.3g} times the rounding noise"
    )
