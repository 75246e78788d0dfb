"""Environments that people submit: taken, kept, validated, tried in a live run, put on offer, taken back.

Invariants (see `record` for the states)
- What is answered is on disk. A service that starts again goes on where it was: what was on offer is on offer, what was
  being validated is validated again, a canary is tried again.
- Of one name, one version is in use; a new one takes its place only when it has proved itself, and until then the old
  one goes on.
- One submission is validated at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from services.env.backends.base import SubmittedBackend
from services.env.backends.remote.protocols import RemoteEnvironment, checked, open_remote
from services.env.backends.remote.site import RemoteAccess
from services.env.backends.sandboxed import LOG_LINES, SandboxedBackend
from services.env.catalogue import Catalogue, CatalogueEntry, check_name
from services.env.sandbox.limits import SandboxLimits
from services.env.sandbox.sandboxes import Sandboxes
from services.env.submissions.canary import Canary
from services.env.submissions.programs import Programs
from services.env.submissions.record import (
    LIVING,
    ON_ITS_WAY,
    PLAYABLE,
    STATES,
    Check,
    Report,
    State,
    SubmittedVersion,
    Transition,
)
from services.env.submissions.store import SubmissionStore
from services.env.submissions.submission import Submission, is_same
from services.env.submissions.validation import Validated, validate
from shared.errors import Conflict, Forbidden, InputError, NotFound, StorageUnavailable, Unavailable, VolleyError
from shared.process import telemetry

MAX_NAMES, MAX_VERSIONS = 64, 256
MIN_TIER = 1
_RESERVED = frozenset({"environments", "episodes", "splits", "num_tasks", "task", "demonstration", "test"})
"""Names that are parts of paths."""
_RETRY_S, _PATIENCE_S = 5.0, 600.0
_VERSIONS = telemetry.Gauge(
    "volley_env_submissions", "Versions of submitted environments by state", ["state"], registry=telemetry.REGISTRY
)
_log = telemetry.Log("env")


class Submissions:
    """Args:
    remotes: how remote environments are reached; programs: what is run for the others.
    unsandboxed: names that may be submitted where this machine has no sandbox worth the name.
    deadline_s: for one call into submitted code.
    """

    def __init__(
        self,
        store: SubmissionStore,
        catalogue: Catalogue,
        sandboxes: Sandboxes,
        remotes: RemoteAccess,
        programs: Programs,
        *,
        limits: SandboxLimits,
        deadline_s: float,
        unsandboxed: Iterable[str] = (),
    ) -> None:
        self._store, self._catalogue, self._sandboxes, self._remotes = store, catalogue, sandboxes, remotes
        self._programs = programs
        self._limits, self._deadline_s, self._unsandboxed = limits, deadline_s, frozenset(unsandboxed)
        self._versions: dict[str, dict[int, SubmittedVersion]] = {}
        self._canaries: dict[str, Canary] = {}
        self._logs: dict[str, deque[str]] = {}
        self._waiting: asyncio.Queue[SubmittedVersion] = asyncio.Queue()
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Takes up what was kept."""
        for version in await asyncio.to_thread(self._store.load):
            if self._catalogue.has(version.name):
                _log.error("a submitted environment is left out: its name is taken", env=version.full_name)
                continue
            self._versions.setdefault(version.name, {})[version.version] = version
        for known in self._versions.values():
            in_use = [version for version in known.values() if version.state == "active"]
            if len(in_use) > 1:
                await self._put(*self._superseded(max(in_use, key=lambda version: version.history[-1].at)))
            for version in known.values():
                if version.state in ("submitted", "validating"):
                    self._waiting.put_nowait(version)
                elif version.state in PLAYABLE and version.splits:
                    self._offer_again(version)
        self._count()

    async def submit(self, wanted: Submission) -> SubmittedVersion:
        """The first version of a new name. The same again gives the version there is.

        Raises InputError, TooLarge, Forbidden (no sandbox here), Conflict (the name is taken), Unavailable (full),
        StorageUnavailable.
        """
        async with self._lock:
            wanted = await self._checked(wanted)
            if known := self._versions.get(wanted.name):
                newest = known[max(known)]
                if is_same(newest, wanted) and newest.state in LIVING:
                    return newest
                if any(version.state in LIVING for version in known.values()):
                    raise Conflict(
                        f"there is an environment {wanted.name!r} already ({newest.full_name} is {newest.state})",
                        f"PUT /environments/{wanted.name} submits a new version of it",
                    )
            elif self._catalogue.has(wanted.name):
                raise Conflict(f"{wanted.name!r} is the name of another environment", "choose another name")
            elif len(self._versions) >= MAX_NAMES:
                raise Unavailable(f"{MAX_NAMES} environments have been submitted", retry_after_s=60.0)
            return await self._add(wanted)

    async def replace(self, wanted: Submission) -> SubmittedVersion:
        """A new version of a name that is there; the one in use goes on until the new one has proved itself.

        Raises NotFound, Conflict (another version is on its way), and what `submit` raises.
        """
        async with self._lock:
            wanted = await self._checked(wanted)
            known = self._named(wanted.name)
            newest = known[max(known)]
            if is_same(newest, wanted) and newest.state in LIVING:
                return newest
            for version in known.values():
                if version.state in ON_ITS_WAY:
                    raise Conflict(
                        f"{version.full_name} is {version.state}", "wait until it is decided, or retire it first"
                    )
            return await self._add(wanted)

    def versions(self, name: str) -> list[SubmittedVersion]:
        """Of one name, oldest first; of `name@number` that one. Raises NotFound."""
        base, _, number = name.partition("@")
        known = self._named(base)
        if not number:
            return [known[n] for n in sorted(known)]
        if not number.isdecimal() or int(number[:9]) not in known:
            raise NotFound(f"there is no environment {name[:80]!r}", f"its versions: {', '.join(map(str, known))}")
        return [known[int(number)]]

    def all(self) -> list[SubmittedVersion]:
        return [version for known in self._versions.values() for version in known.values()]

    def log(self, version: SubmittedVersion) -> str:
        """What its episodes printed last, and how they failed; what it printed while it was validated, if nothing
        since.
        """
        lines = self._logs.get(version.full_name)
        return "\n".join(lines) if lines else version.report.log if version.report else ""

    async def retire(self, name: str) -> SubmittedVersion:
        """Takes a version back: no new groups. Without a number, the newest that is on its way or in use.

        Raises NotFound, Conflict.
        """
        async with self._lock:
            chosen = self.versions(name)
            alive = [version for version in chosen if version.state in LIVING]
            return await self._move((alive or chosen)[-1], "retired", "on request")

    async def activate(self, name: str) -> SubmittedVersion:
        """Puts a version in use, in place of the present one: promotes a canary, or goes back to a retired version.
        Without a number, the newest that can be.

        Raises NotFound, Conflict.
        """
        async with self._lock:
            chosen = self.versions(name)
            ready = [version for version in chosen if version.state in ("canary", "retired") and version.splits]
            version = (ready or chosen)[-1]
            if version.state == "retired" and not version.splits:
                raise Conflict(f"{version.full_name} was retired before it was validated", "submit it again")
            return await self._activate(version, "on request")

    def stepped(self, env: str, seconds: float) -> None:
        if (canary := self._canaries.get(env)) is not None:
            canary.stepped(seconds)

    def ended(self, env: str, failure: VolleyError | None) -> None:
        if (canary := self._canaries.get(env)) is not None:
            canary.ended(failure)

    async def validate_waiting(self) -> None:
        """Worker: finds out what the sandbox can do here, then validates what was submitted, one after the other."""
        try:
            await self._sandboxes.probe()
        except Unavailable as error:
            _log.error("no sandbox: nothing can be submitted", reason=str(error))
        while True:
            version = await self._waiting.get()
            try:
                await self._validate(version)
            except Unavailable as error:
                await self._put_off(version, error)

    async def _put_off(self, version: SubmittedVersion, error: Unavailable) -> None:
        """Validates it later; what could not be validated for long is rejected, with the reason."""
        _log.warning("validation put off", env=version.full_name, reason=str(error))
        await asyncio.sleep(_RETRY_S)
        async with self._lock:
            version = self._versions[version.name][version.version]
            began = next(line.at for line in reversed(version.history) if line.state == "submitted")
            if version.state == "validating" and time.time() - began > _PATIENCE_S:
                with suppress(StorageUnavailable):
                    await self._move(version, "rejected", f"it could not be validated: {error.detail}")
                    return
        self._waiting.put_nowait(version)

    async def judge_canaries(self) -> None:
        """Worker: promotes or rejects canaries by what was seen of them."""
        while True:
            await asyncio.sleep(0.5)
            for name, canary in list(self._canaries.items()):
                verdict = canary.verdict
                if verdict is None:
                    continue
                good, why = verdict
                try:
                    async with self._lock:
                        version = self.versions(name)[0]
                        if version.state == "canary":
                            await (self._activate(version, why) if good else self._move(version, "rejected", why))
                except Unavailable as error:
                    _log.warning("a canary's verdict waits", env=name, reason=str(error))

    async def _checked(self, wanted: Submission) -> Submission:
        """Raises InputError, TooLarge, Forbidden."""
        check_name(wanted.name)
        if wanted.name in _RESERVED:
            raise InputError(f"{wanted.name!r} is a part of the service's own paths", "choose another name")
        if isinstance(wanted.source, RemoteEnvironment):
            return replace(wanted, source=checked(wanted.source))
        tier = await self._sandboxes.probe()
        if tier.level < MIN_TIER and wanted.name not in self._unsandboxed:
            raise Forbidden(
                f"this machine cannot confine submitted code: {'; '.join(tier.missing)}",
                f"services.env.unsandboxed: [{wanted.name}] in the run's configuration allows it by name",
            )
        return wanted

    async def _add(self, wanted: Submission) -> SubmittedVersion:
        files = {} if wanted.remote else await self._programs.check(wanted)
        known = self._versions.get(wanted.name, {})
        number = 1 + max(max(known, default=0), await asyncio.to_thread(self._store.newest, wanted.name))
        if len(known) >= MAX_VERSIONS:
            raise Unavailable(f"{wanted.name} has {len(known)} versions", "choose another name", 60.0)
        version = SubmittedVersion(
            name=wanted.name,
            version=number,
            entry=wanted.entry,
            config=dict(wanted.config or {}),
            weight=wanted.weight,
            url=wanted.remote.url if wanted.remote else None,
            archive=wanted.archive,
            protocol=wanted.remote.protocol if wanted.remote else "",
            digest=wanted.digest,
            size=len(wanted.content),
            history=(Transition(state="submitted", at=time.time()),),
        )
        await asyncio.to_thread(self._store.add, version, files)
        self._versions.setdefault(wanted.name, {})[number] = version
        self._waiting.put_nowait(version)
        self._count()
        _log.info("environment submitted", env=version.full_name, bytes=version.size)
        return version

    async def _validate(self, version: SubmittedVersion) -> None:
        """Raises Unavailable; then it is still to be validated."""
        async with self._lock:
            version = self._versions[version.name][version.version]
            if version.state == "submitted":
                version = await self._move(version, "validating")
            elif version.state != "validating":
                return
        found = await self._validated(version)
        async with self._lock:
            version = self._versions[version.name][version.version]
            if version.state == "validating":
                await self._judge(version, found)

    async def _validated(self, version: SubmittedVersion) -> Validated:
        def open_backend(splits: Mapping[str, int], has_demonstration: bool) -> SubmittedBackend:
            return self._backend(version.model_copy(update={"splits": splits, "has_demonstration": has_demonstration}))

        try:
            return await validate(open_backend)
        except Unavailable:
            raise
        except Exception:  # noqa: BLE001 - a defect here must not keep others from being validated
            _log.exception("the validation itself failed", env=version.full_name)
            check = Check(name="validation", ok=False, detail="failed for a reason of the service's own; see its log")
            return Validated(Report(checks=(check,)), None)

    async def _judge(self, version: SubmittedVersion, found: Validated) -> None:
        report, description = found.report, found.description
        if description is None or not report.passed:
            first = report.failed[0]
            await self._move(version, "rejected", f"{first.name}: {first.detail.splitlines()[0]}", report=report)
            return
        known: dict[str, Any] = {
            "report": report,
            "splits": dict(description.splits),
            "tools": tuple(description.tools),
            "has_demonstration": description.has_demonstration,
            "protocol": description.protocol,
            "entry": version.entry if version.entry or version.archive else description.entry,
        }
        if version.weight > 0:
            await self._move(version, "canary", "validated; a small share of live groups decides", **known)
        else:
            await self._activate(version, "validated; weight 0 joins no live run", **known)

    async def _activate(self, version: SubmittedVersion, why: str, **changes: Any) -> SubmittedVersion:
        """The version in use, from now on; the one before is retired with it. A crash between the two leaves two that
        are active on disk: the later one counts, see `open`.
        """
        made = version.to("active", why, **changes)
        await self._put(made, *self._superseded(made))
        return made

    def _superseded(self, by: SubmittedVersion) -> list[SubmittedVersion]:
        """The other active versions of a name, retired."""
        return [
            other.to("retired", f"{by.full_name} took its place")
            for other in self._versions[by.name].values()
            if other.state == "active" and other.version != by.version
        ]

    async def _move(self, version: SubmittedVersion, state: State, why: str = "", **changes: Any) -> SubmittedVersion:
        moved = version.to(state, why, **changes)
        await self._put(moved)
        return moved

    async def _put(self, *moved: SubmittedVersion) -> None:
        """Keeps versions in their new states, then lets all of them be seen at once. Raises StorageUnavailable."""
        for version in moved:
            await asyncio.to_thread(self._store.update, version)
        for version in moved:
            self._versions[version.name][version.version] = version
            self._canaries.pop(version.full_name, None)
            if version.state in PLAYABLE and version.splits:
                self._offer(version)
            else:
                self._catalogue.withdraw(version.full_name)
            _log.info("environment moved on", env=version.full_name, state=version.state, why=version.why)
        for name in {version.name for version in moved}:
            self._point(name)
        self._count()

    def _offer_again(self, version: SubmittedVersion) -> None:
        """One whose settings this version of the service does not know is left out, as one that cannot be read."""
        try:
            self._offer(version)
        except InputError as error:
            _log.error("a submitted environment is left out", env=version.full_name, reason=str(error))

    def _offer(self, version: SubmittedVersion) -> None:
        if version.state == "canary":
            self._canaries.setdefault(version.full_name, Canary())
        entry = CatalogueEntry(
            version.full_name, version.kind, version.config, self._backend(version), weight=version.weight
        )
        self._catalogue.offer(entry, version.full_name)
        self._point(version.name)

    def _point(self, name: str) -> None:
        """The name without a number stands for the version in use, else for the canary."""
        by_state = {version.state: version for version in self._versions[name].values()}
        chosen = by_state.get("active") or by_state.get("canary")
        if chosen is not None and self._catalogue.has(chosen.full_name):
            self._catalogue.offer(self._catalogue.get(chosen.full_name), name)
        else:
            self._catalogue.withdraw(name)

    def _backend(self, version: SubmittedVersion) -> SubmittedBackend:
        log = self._logs.setdefault(version.full_name, deque(maxlen=LOG_LINES))
        if version.url is not None:
            remote = RemoteEnvironment(version.protocol, version.url, version.config)
            known = (version.splits, version.has_demonstration)
            return open_remote(version.full_name, remote, self._remotes, log, *known)
        return SandboxedBackend(
            version.full_name,
            lambda: self._programs.of(version),
            version.splits,
            version.has_demonstration,
            self._sandboxes,
            self._limits,
            self._deadline_s,
            log,
        )

    def _named(self, name: str) -> dict[int, SubmittedVersion]:
        if not (known := self._versions.get(name)):
            raise NotFound(
                f"nobody submitted an environment {name[:80]!r}",
                f"submitted: {', '.join(sorted(self._versions)) or 'none yet'}",
            )
        return known

    def _count(self) -> None:
        counted = Counter(version.state for version in self.all())
        for state in STATES:
            _VERSIONS.labels(state).set(counted[state])
