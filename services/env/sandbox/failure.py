"""How a sandbox fails."""

from __future__ import annotations

from services.env.sandbox.limits import Why
from shared.errors import VolleyError


class SandboxFailed(VolleyError):
    """Code in a sandbox did not do what it was asked.

    `why`: `exception` (it raised one; the detail ends with where), `crash` (its process ended by itself or by a fault
    of its own), `memory`, `cpu`, `time` (the call's deadline) and `output` (its answer, log or files) for limits,
    `protocol` (what it said is no answer), `refused` (what it returned is not what an environment returns, or it could
    not be started). `alive`: whether the sandbox answers further calls; one that does not is gone.
    """

    title = "Sandboxed code failed"

    def __init__(self, detail: str, hint: str = "", why: Why = "crash", alive: bool = False) -> None:
        super().__init__(detail, hint)
        self.why: Why = why
        self.alive = alive
