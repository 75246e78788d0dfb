"""The run's own rollout servers as a teacher."""

from __future__ import annotations

import numpy as np

from services.orchestrator.servers.balancer import Balancer, VersionBounds
from shared.errors import RateLimited, Unavailable, VolleyError
from shared.teacher_view import TeacherLogprobs
from volley_algorithms.teachers.client import TeacherAway, TeacherFailed


class OwnServers:
    """Scores with the weights that a server has at the time, which are as new as those that sample.

    A server that is out costs no attempt: another one is asked, or the same one later.
    """

    def __init__(self, balancer: Balancer, timeout_s: float) -> None:
        self._balancer, self._timeout_s = balancer, timeout_s

    async def logprobs(self, ids: np.ndarray, start: int) -> TeacherLogprobs:
        """As `TeacherClient.logprobs`, with the version. Raises RateLimited, TeacherAway, TeacherFailed, InputError."""
        async with self._balancer.server(VersionBounds()) as server:
            try:
                found = await server.engine.score(ids, start, timeout_s=self._timeout_s)
            except RateLimited:
                raise
            except VolleyError as error:
                if isinstance(error.__cause__, TimeoutError):  # it may only be slow
                    raise TeacherFailed(f"{server.url}: {error.detail}", error.hint) from error
                if error.transient:
                    self._balancer.fail(server, str(error), error.waits_on)
                if error.outage and isinstance(error, Unavailable):
                    raise TeacherAway(f"{server.url}: {error.detail}", error.hint, error.retry_after_s) from error
                raise
        self._balancer.succeeded(server, found.version)
        return found
