"""Which versions of submitted environments are on offer, under which names, and what was seen of their episodes.

Invariants: `adder@2` is that version for as long as it can be played; `adder` stands for the version in use, else for
the canary, else for nothing. What a version printed is kept in memory, how its episodes failed on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from services.env.backend import SubmittedBackend
from services.env.backends.harbor import HARBOR, HarborBackend, read_config
from services.env.backends.remote.protocols import RemoteEnvironment, open_remote
from services.env.backends.remote.site import RemoteAccess
from services.env.backends.sandboxed import LOG_LINES, SandboxedBackend
from services.env.catalogue import Catalogue, CatalogueEntry
from services.env.episodes import EpisodeCall
from services.env.sandbox.limits import SandboxLimits
from services.env.sandbox.sandboxes import Sandboxes
from services.env.submissions.canary import LiveRecord
from services.env.submissions.programs import Programs
from services.env.submissions.record import PLAYABLE, SubmittedVersion
from services.env.submissions.store import SubmissionStore
from services.env.submissions.submission import TASKS
from shared.errors import InputError, VolleyError
from shared.process import telemetry

MAX_KEPT, _MAX_LINE = 20, 500
_log = telemetry.Log("submissions")


class Offers:
    """Args: remotes: how remote environments are reached; programs: what is run for the others; deadline_s: for one
    call into submitted code.
    """

    def __init__(
        self,
        store: SubmissionStore,
        catalogue: Catalogue,
        sandboxes: Sandboxes,
        remotes: RemoteAccess,
        programs: Programs,
        limits: SandboxLimits,
        deadline_s: float,
    ) -> None:
        self._store, self._catalogue, self._sandboxes, self._remotes = store, catalogue, sandboxes, remotes
        self._programs, self._limits, self._deadline_s = programs, limits, deadline_s
        self._records: dict[str, LiveRecord] = {}
        self._canaries: set[str] = set()
        self._logs: dict[str, deque[str]] = {}
        self._failures: dict[str, deque[str]] = {}
        self._unkept: dict[str, SubmittedVersion] = {}

    def backend(self, version: SubmittedVersion) -> SubmittedBackend:
        """Raises InputError where its settings are none that this service knows."""
        log = self._log_of(version)
        if version.url is not None:
            remote = RemoteEnvironment(version.protocol, version.url, version.config)
            known = (version.splits, version.has_demonstration, self._store.source(version) / TASKS)
            return open_remote(version.full_name, remote, self._remotes, log, *known)
        return local_backend(version, self._programs, self._sandboxes, self._limits, self._deadline_s, log)

    def put(self, version: SubmittedVersion) -> None:
        """Offers a version, or withdraws it, by its state. What was seen of a canary begins with that state."""
        self._canaries.discard(version.full_name)
        if version.state not in PLAYABLE or not version.splits:
            self._catalogue.withdraw(version.full_name)
            return
        if version.state == "canary":
            self._canaries.add(version.full_name)
            self._records.pop(version.full_name, None)
        backend = self.backend(version)
        entry = CatalogueEntry(version.full_name, version.kind, version.config, backend, weight=version.weight)
        self._catalogue.offer(entry, version.full_name)

    def put_again(self, version: SubmittedVersion) -> None:
        """After a start: one whose settings this version of the service does not know is left out, as one that cannot
        be read. Blocks on disk.
        """
        self._failures[version.full_name] = deque(self._store.failures(version), maxlen=MAX_KEPT)
        self._log_of(version).extend(self._failures[version.full_name])
        try:
            self.put(version)
        except InputError as error:
            _log.error("a submitted environment is left out", env=version.full_name, reason=str(error))

    def point(self, name: str, versions: Iterable[SubmittedVersion]) -> None:
        """Args: versions: all of that name."""
        by_state = {version.state: version for version in versions}
        chosen = by_state.get("active") or by_state.get("canary")
        if chosen is not None and self._catalogue.has(chosen.full_name):
            self._catalogue.offer(self._catalogue.get(chosen.full_name), name)
        else:
            self._catalogue.withdraw(name)

    def verdicts(self) -> Iterator[tuple[str, bool, str]]:
        """Of the canaries that enough was seen of: (full name, whether it is good, why)."""
        for name in sorted(self._canaries):
            if (verdict := self._record(name).verdict) is not None:
                yield name, *verdict

    def regression(self, version: SubmittedVersion, before: SubmittedVersion) -> str | None:
        """Why a version fails more often than the one whose place it took; None if it does not."""
        seen = self._records.get(version.full_name)
        return seen.regression(self._records.get(before.full_name)) if seen is not None else None

    def trouble(self, env: str) -> str | None:
        """Why episodes of an environment fail too often; None if they do not."""
        seen = self._records.get(env)
        return seen.trouble if seen is not None else None

    def failures(self, env: str) -> list[Mapping[str, float | int]]:
        """A row for each turn at which its live episodes failed."""
        seen = self._records.get(env)
        return seen.rates.describe() if seen is not None else []

    def log(self, version: SubmittedVersion) -> str:
        """What its episodes printed last, and how they failed; what it printed while it was validated, if nothing
        since.
        """
        lines = self._logs.get(version.full_name)
        return "\n".join(lines) if lines else version.report.log if version.report else ""

    def called(self, call: EpisodeCall, version: SubmittedVersion | None) -> None:
        """Args: version: what its environment is, if it was submitted."""
        self._record(call.env).called(call)
        env, failure = call.env, call.failure
        if failure is not None and version is not None:
            told = " ".join(failure.detail.split())[:_MAX_LINE]
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC an episode failed: {told}"
            self._failures.setdefault(env, deque(maxlen=MAX_KEPT)).append(line)
            self._unkept[env] = version

    def ended(self, env: str) -> None:
        self._record(env).ended()

    async def keep_failures(self) -> None:
        """Writes down how episodes failed since the last time."""
        while self._unkept:
            env, version = self._unkept.popitem()
            try:
                await asyncio.to_thread(self._store.keep_failures, version, tuple(self._failures[env]))
            except (VolleyError, OSError) as error:
                _log.warning("failures of an environment cannot be kept", env=env, reason=str(error))

    def _record(self, env: str) -> LiveRecord:
        return self._records.setdefault(env, LiveRecord())

    def _log_of(self, version: SubmittedVersion) -> deque[str]:
        return self._logs.setdefault(version.full_name, deque(maxlen=LOG_LINES))


def local_backend(
    version: SubmittedVersion,
    programs: Programs,
    sandboxes: Sandboxes,
    limits: SandboxLimits,
    deadline_s: float,
    log: deque[str],
) -> SubmittedBackend:
    """The backend of a version that came as a file. Raises InputError where its settings are none that are known."""
    name, splits = version.full_name, version.splits
    if version.protocol == HARBOR:
        config = read_config(version.config)
        return HarborBackend(name, lambda: programs.tasks_of(version), splits, config, sandboxes, limits, log)
    return SandboxedBackend(
        name,
        lambda: programs.of(version),
        splits,
        version.has_demonstration,
        sandboxes,
        limits,
        deadline_s,
        log,
    )
