"""Versions of submitted environments on offer, their names, and observations of their episodes.

Invariants: `adder@2` names that version as long as it can be played; `adder` names the version in use, else the canary,
else nothing. A version's output is kept in memory, the failures of its episodes on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from services.env.catalogue import Catalogue, CatalogueEntry
from services.env.episode_slots import EpisodeCall
from shared.errors import InputError, VolleyError
from shared.process import telemetry
from volley_sandbox.agents.backend import AgentBackend
from volley_sandbox.backends.harbor import HARBOR, HarborBackend, read_config
from volley_sandbox.backends.remote.protocols import RemoteEnvironment, open_remote
from volley_sandbox.backends.remote.site import RemoteAccess
from volley_sandbox.backends.sandboxed import LOG_LINES, SandboxedBackend
from volley_sandbox.backends.submitted import SubmittedBackend
from volley_sandbox.players.backend import WithPlayers
from volley_sandbox.sandbox.limits import SandboxLimits
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.submissions.canary import LiveRecord
from volley_sandbox.submissions.programs import AgentPrograms
from volley_sandbox.submissions.record import PLAYABLE, SubmittedVersion
from volley_sandbox.submissions.store import SubmissionStore
from volley_sandbox.submissions.submission import TASKS

MAX_KEPT, _MAX_LINE = 20, 500
_log = telemetry.Log("submissions")


class Offers:
    """Versions on offer.

    Args:
        remotes: access to remote environments.
        programs: programs of the other submissions.
        deadline_s: deadline of one call into submitted code, in seconds.
        ca_file: certificate authorities for the model of agents.
        with_players: adds players of seats to a backend.
    """

    def __init__(
        self,
        store: SubmissionStore,
        catalogue: Catalogue,
        sandboxes: Sandboxes,
        remotes: RemoteAccess,
        programs: AgentPrograms,
        limits: SandboxLimits,
        deadline_s: float,
        ca_file: Path | None = None,
        with_players: WithPlayers = lambda _, backend: backend,
    ) -> None:
        self._ca_file, self._with_players = ca_file, with_players
        self._store, self._catalogue, self._sandboxes, self._remotes = store, catalogue, sandboxes, remotes
        self._programs, self._limits, self._deadline_s = programs, limits, deadline_s
        self._records: dict[str, LiveRecord] = {}
        self._canaries: set[str] = set()
        self._logs: dict[str, deque[str]] = {}
        self._failures: dict[str, deque[str]] = {}
        self._unsaved: dict[str, SubmittedVersion] = {}

    def backend(self, version: SubmittedVersion) -> SubmittedBackend:
        """Build the backend of a version. Raises InputError if this service does not know its settings."""
        log = self._log_of(version)
        if version.url is not None:
            remote = RemoteEnvironment(version.protocol, version.url, version.config)
            known = (version.splits, version.has_demonstration, self._store.source(version) / TASKS)
            return open_remote(version.full_name, remote, self._remotes, log, *known)
        return local_backend(
            version, self._programs, self._sandboxes, self._limits, self._deadline_s, log, self._ca_file
        )

    def put(self, version: SubmittedVersion) -> None:
        """Offer or withdraw a version, according to its state. A canary's observations start from zero."""
        self._canaries.discard(version.full_name)
        if version.state not in PLAYABLE or not version.splits:
            self._catalogue.withdraw(version.full_name)
            return
        if version.state == "canary":
            self._canaries.add(version.full_name)
            self._records.pop(version.full_name, None)
        backend = self._with_players(version.full_name, self.backend(version))
        entry = CatalogueEntry(version.full_name, version.kind, version.config, backend, weight=version.weight)
        self._catalogue.offer(entry, version.full_name)

    def restore(self, version: SubmittedVersion) -> None:
        """Offer a stored version at startup. Blocks on disk.

        A version whose settings this service does not know is skipped, like one that cannot be read.
        """
        self._failures[version.full_name] = deque(self._store.failures(version), maxlen=MAX_KEPT)
        self._log_of(version).extend(self._failures[version.full_name])
        try:
            self.put(version)
        except InputError as error:
            _log.error("submitted environment skipped", env=version.full_name, reason=str(error))

    def assign_name(self, name: str, versions: Iterable[SubmittedVersion]) -> None:
        """Let the plain name stand for the version in use, else for the canary.

        Args:
            versions: all versions of the name.
        """
        by_state = {version.state: version for version in versions}
        chosen = by_state.get("active") or by_state.get("canary")
        if chosen is not None and self._catalogue.has(chosen.full_name):
            self._catalogue.offer(self._catalogue.get(chosen.full_name), name)
        else:
            self._catalogue.withdraw(name)

    def verdicts(self) -> Iterator[tuple[str, bool, str]]:
        """Yield (full name, whether it passes, reason) of each canary with enough observations."""
        for name in sorted(self._canaries):
            if (verdict := self._record(name).verdict) is not None:
                yield name, *verdict

    def regression(self, version: SubmittedVersion, before: SubmittedVersion) -> str | None:
        """Reason to roll back a version that replaced `before`; None if there is none."""
        seen = self._records.get(version.full_name)
        return seen.regression(self._records.get(before.full_name)) if seen is not None else None

    def trouble(self, env: str) -> str | None:
        """Description of an environment's excess failures; None if there are none."""
        seen = self._records.get(env)
        return seen.trouble if seen is not None else None

    def failures(self, env: str) -> list[Mapping[str, float | int]]:
        """One row for each turn at which its live episodes failed."""
        seen = self._records.get(env)
        return seen.rates.describe() if seen is not None else []

    def log(self, version: SubmittedVersion) -> str:
        """Recent output and failures of a version, or its validation's output."""
        lines = self._logs.get(version.full_name)
        return "\n".join(lines) if lines else version.report.log if version.report else ""

    def called(self, call: EpisodeCall, version: SubmittedVersion | None) -> None:
        """Record a call.

        Args:
            version: the version that was called, None if it was not submitted.
        """
        self._record(call.env).called(call)
        env, failure = call.env, call.failure
        if failure is not None and version is not None:
            detail = " ".join(failure.detail.split())[:_MAX_LINE]
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC an episode failed: {detail}"
            self._failures.setdefault(env, deque(maxlen=MAX_KEPT)).append(line)
            self._unsaved[env] = version

    def ended(self, env: str) -> None:
        self._record(env).ended()

    async def keep_failures(self) -> None:
        """Write the failures since the last call to disk."""
        while self._unsaved:
            env, version = self._unsaved.popitem()
            try:
                await asyncio.to_thread(self._store.keep_failures, version, tuple(self._failures[env]))
            except (VolleyError, OSError) as error:
                _log.warning("failures of an environment cannot be saved", env=env, reason=str(error))

    def _record(self, env: str) -> LiveRecord:
        return self._records.setdefault(env, LiveRecord())

    def _log_of(self, version: SubmittedVersion) -> deque[str]:
        return self._logs.setdefault(version.full_name, deque(maxlen=LOG_LINES))


def local_backend(
    version: SubmittedVersion,
    programs: AgentPrograms,
    sandboxes: Sandboxes,
    limits: SandboxLimits,
    deadline_s: float,
    log: deque[str],
    ca_file: Path | None = None,
) -> SubmittedBackend:
    """Build the backend of a version submitted as a file.

    Raises InputError if its settings are unknown, Forbidden without containers for task folders.
    """
    name, splits = version.full_name, version.splits
    if version.protocol == HARBOR:
        config = read_config(version.config)
        programs.containers.check()
        return HarborBackend(name, lambda: programs.tasks_of(version), splits, config, programs.containers, log)
    known = (lambda: programs.of(version), splits, version.has_demonstration, sandboxes, limits, deadline_s, log)
    if version.agent is not None:
        return AgentBackend(name, *known, agent=version.agent, ca_file=ca_file)
    return SandboxedBackend(name, *known)
