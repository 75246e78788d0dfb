"""Submitted environments: store, validate, try as canary, activate, roll back, retire.

Invariants (see `record` for the states)
- An answered request is on disk. A restarted service continues: offered versions are offered, interrupted validations
  and canaries start again.
- Of one name, one version is in use; a new one replaces it only after passing as canary.
- One submission is validated at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from services.env.catalogue import Catalogue
from services.env.episode_slots import EpisodeCall
from shared.errors import Conflict, InputError, NotFound, StorageUnavailable, Unavailable
from shared.process import telemetry
from volley_sandbox.backends.submitted import EnvironmentDescription, SubmittedBackend
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.submissions.offers import Offers
from volley_sandbox.submissions.programs import AgentPrograms
from volley_sandbox.submissions.record import (
    LIVE,
    PENDING,
    PLAYABLE,
    Check,
    Report,
    State,
    SubmittedVersion,
    Transition,
    count,
    listed,
)
from volley_sandbox.submissions.store import SubmissionStore
from volley_sandbox.submissions.submission import MIN_TIER, Submission, check_admission, described, is_same, numbered
from volley_sandbox.submissions.validation import Validated, validate

MAX_NAMES, MAX_VERSIONS = 64, 128
_log = telemetry.Log("submissions")


class Submissions:
    """Submissions of the service.

    Args:
        programs: programs of the submissions that are not remote.
        offers: versions on offer.
        unsandboxed: names that may be submitted on a machine without an adequate sandbox.
        retry_s: wait before repeating a validation that could not run (no index, no free sandbox), in seconds.
        patience_s: time after the first attempt in this process at which it is given up, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: SubmissionStore,
        catalogue: Catalogue,
        sandboxes: Sandboxes,
        programs: AgentPrograms,
        offers: Offers,
        *,
        unsandboxed: Iterable[str] = (),
        retry_s: float = 5.0,
        patience_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._catalogue, self._sandboxes, self._programs = store, catalogue, sandboxes, programs
        self._offers = offers
        self._unsandboxed = frozenset(unsandboxed)
        self._retry_s, self._patience_s, self._clock = retry_s, patience_s, clock
        self._versions: dict[str, dict[int, SubmittedVersion]] = {}
        self._put_off_since: dict[str, float] = {}
        self._waiting: asyncio.Queue[SubmittedVersion] = asyncio.Queue()
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Load stored versions and offer them."""
        for version in await asyncio.to_thread(self._store.load):
            if self._catalogue.has(version.name):
                _log.error("submitted environment skipped: its name is taken", env=version.full_name)
                continue
            self._versions.setdefault(version.name, {})[version.version] = version
        for name, known in self._versions.items():
            in_use = [version for version in known.values() if version.state == "active"]
            if len(in_use) > 1:
                await self._put(*self._superseded(max(in_use, key=lambda version: version.history[-1].at)))
            for version in known.values():
                if version.state in ("submitted", "validating"):
                    self._waiting.put_nowait(version)
                else:
                    await asyncio.to_thread(self._offers.restore, version)
            self._offers.assign_name(name, known.values())
        count(self.all())

    async def submit(self, wanted: Submission) -> SubmittedVersion:
        """Submit the first version of a new name. Repeating it returns the existing version.

        Raises InputError, TooLarge, Forbidden (no sandbox here), Conflict (the name is taken, or there are too many),
        StorageUnavailable.
        """
        async with self._lock:
            wanted = await check_admission(wanted, self._sandboxes, self._unsandboxed)
            if known := self._versions.get(wanted.name):
                newest = known[max(known)]
                if is_same(newest, wanted) and newest.state in LIVE:
                    return newest
                if any(version.state in LIVE for version in known.values()):
                    raise Conflict(
                        f"there is an environment {wanted.name!r} already ({newest.full_name} is {newest.state})",
                        f"PUT /environments/{wanted.name} submits a new version of it",
                    )
            elif self._catalogue.has(wanted.name):
                raise Conflict(f"{wanted.name!r} is the name of another environment", "choose another name")
            elif len(self._versions) >= MAX_NAMES:
                raise Conflict(
                    f"{MAX_NAMES} environments have been submitted",
                    f"PUT /environments/NAME submits a new version of one of them: {', '.join(sorted(self._versions))}",
                )
            return await self._add(wanted)

    async def replace(self, wanted: Submission) -> SubmittedVersion:
        """Submit a new version of an existing name. The version in use stays until the new one passes.

        Raises NotFound, Conflict (another version is pending), and what `submit` raises.
        """
        async with self._lock:
            wanted = await check_admission(wanted, self._sandboxes, self._unsandboxed)
            known = self._named(wanted.name)
            newest = known[max(known)]
            if is_same(newest, wanted) and newest.state in LIVE:
                return newest
            for version in known.values():
                if version.state in PENDING:
                    raise Conflict(
                        f"{version.full_name} is {version.state}", "wait until its validation ends, or retire it first"
                    )
            return await self._add(wanted)

    async def ensure(self, full_name: str, read: Callable[[], Submission]) -> SubmittedVersion:
        """Put an environment that the run's configuration names in use.

        It has one version: the stored one, or the result of `read`, validated now. The configuration allows it even on
        a machine without a sandbox. Raises InputError (it is rejected, or this service does not have what it needs),
        Unavailable, and what `read` raises.
        """
        name = full_name.partition("@")[0]
        async with self._lock:
            version = self._versions.get(name, {}).get(1)
            if version is None:
                if self._catalogue.has(name):
                    raise Conflict(f"{name!r} is the name of another environment", "give the file another name")
                version = await self._add(await asyncio.to_thread(read))
            elif version.state in PLAYABLE and version.splits:
                if not self._catalogue.has(full_name):  # skipped at startup
                    self._offers.put(version)
                return version
            elif version.state not in PENDING:  # rejected at an earlier start, perhaps by a timeout
                version = version.model_copy(update={"history": (Transition(state="submitted", at=time.time()),)})
                await self._put(version)
        if (tier := await self._sandboxes.probe()).level < MIN_TIER:
            _log.warning("submitted code runs without a sandbox", env=version.full_name, missing=tier.missing)
        await self._validate(version)
        version = self._versions[name][1]
        if version.state not in PLAYABLE:
            hints = [check.hint for check in version.report.failed] if version.report else []
            raise InputError(version.why, hints[0] if hints else "")
        return version

    def versions(self, name: str) -> list[SubmittedVersion]:
        """Versions of a name, oldest first, or the version `name@number`. Raises NotFound."""
        base, _, number = name.partition("@")
        known = self._named(base)
        if not number:
            return [known[n] for n in sorted(known)]
        if not number.isdecimal() or int(number[:9]) not in known:
            raise NotFound(f"there is no environment {name[:80]!r}", f"its versions: {', '.join(map(str, known))}")
        return [known[int(number)]]

    def all(self) -> list[SubmittedVersion]:
        return [version for known in self._versions.values() for version in known.values()]

    def listed(self) -> list[SubmittedVersion]:
        """Live versions of each name, and the newest of the others."""
        return [version for known in self._versions.values() for version in listed(known)]

    def log(self, version: SubmittedVersion) -> str:
        """Recent output and failures of a version's episodes."""
        return self._offers.log(version)

    async def retire(self, name: str) -> SubmittedVersion:
        """Retire a version, so that no new groups use it.

        Without a number, retires the newest that is pending or in use. Raises NotFound, Conflict.
        """
        async with self._lock:
            chosen = self.versions(name)
            alive = [version for version in chosen if version.state in LIVE]
            return await self._move((alive or chosen)[-1], "retired", "on request")

    async def activate(self, name: str) -> SubmittedVersion:
        """Activate a version in place of the present one: promote a canary, or return to a retired version.

        Without a number, activates the newest eligible one. Raises NotFound, Conflict.
        """
        async with self._lock:
            chosen = self.versions(name)
            ready = [version for version in chosen if version.state in ("canary", "retired") and version.splits]
            version = (ready or chosen)[-1]
            if version.state == "retired" and not version.splits:
                raise Conflict(f"{version.full_name} was retired before it was validated", "submit it again")
            return await self._activate(version, "on request")

    def trouble(self, env: str) -> str | None:
        """Description of an environment's excess failures; None if there are none."""
        return self._offers.trouble(env)

    def failures(self, env: str) -> list[Mapping[str, float | int]]:
        """One row for each turn at which its live episodes failed."""
        return self._offers.failures(env)

    def called(self, call: EpisodeCall) -> None:
        name, _, number = call.env.partition("@")
        self._offers.called(call, self._versions.get(name, {}).get(int(number)) if number else None)

    def ended(self, env: str) -> None:
        self._offers.ended(env)

    async def validate_waiting(self) -> None:
        """Worker: probe the sandbox, then validate submissions one after the other."""
        try:
            await self._sandboxes.probe()
        except Unavailable as error:
            _log.error("no sandbox can be started: submissions are refused", reason=str(error))
        while True:
            version = await self._waiting.get()
            try:
                await self._validate(version)
                self._put_off_since.pop(version.full_name, None)
            except Unavailable as error:
                await self._put_off(version, error)

    async def _put_off(self, version: SubmittedVersion, error: Unavailable) -> None:
        """Queue another attempt; after `patience_s`, reject the version with the reason."""
        _log.warning("validation put off", env=version.full_name, reason=str(error))
        now = self._clock()
        waited_s = now - self._put_off_since.setdefault(version.full_name, now)
        await asyncio.sleep(self._retry_s)
        if waited_s > self._patience_s:
            async with self._lock:
                version = self._versions[version.name][version.version]
                with suppress(StorageUnavailable, Conflict):
                    await self._move(version, "rejected", f"it could not be validated: {error.detail}")
                    del self._put_off_since[version.full_name]
                    return
        self._waiting.put_nowait(version)

    async def judge_canaries(self) -> None:
        """Worker: promote, reject and roll back versions by their observations, and save failures."""
        while True:
            await asyncio.sleep(0.5)
            await self._offers.keep_failures()
            await self._roll_back_failing()
            for name, good, why in list(self._offers.verdicts()):
                try:
                    async with self._lock:
                        version = self.versions(name)[0]
                        if version.state == "canary":
                            await (self._activate(version, why) if good else self._move(version, "rejected", why))
                except Unavailable as error:
                    _log.warning("verdict on a canary postponed", env=name, reason=str(error))

    async def _roll_back_failing(self) -> None:
        """Roll back versions that fail more often than the ones they replaced; at most once each."""
        for version in [one for one in self.all() if one.state == "active"]:
            before = self._replaced_by(version)
            why = self._offers.regression(version, before) if before is not None else None
            if before is None or why is None:
                continue
            async with self._lock:
                now = self._versions[version.name][version.version]
                if now != version or self._replaced_by(version) != before:
                    continue
                try:
                    await self._put(*version.rolled_back(before, why))
                except Unavailable as error:
                    _log.warning("roll-back postponed", env=version.full_name, reason=str(error))

    def _replaced_by(self, version: SubmittedVersion) -> SubmittedVersion | None:
        return version.replaced(self._versions[version.name].values())

    async def _add(self, wanted: Submission) -> SubmittedVersion:
        source = await self._programs.check(wanted)
        known = self._versions.get(wanted.name, {})
        number = 1 + max(max(known, default=0), await asyncio.to_thread(self._store.newest, wanted.name))
        if len(known) >= MAX_VERSIONS:
            raise Conflict(f"{wanted.name} has {len(known)} versions, which is the limit", "choose another name")
        version = numbered(wanted, number, source.protocol)
        await asyncio.to_thread(self._store.add, version, source.files)
        self._versions.setdefault(wanted.name, {})[number] = version
        self._waiting.put_nowait(version)
        count(self.all())
        _log.info("environment submitted", env=version.full_name, bytes=version.size)
        return version

    async def _validate(self, version: SubmittedVersion) -> None:
        """Validate one version. On Unavailable it stays to be validated."""
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
        def open_backend(known: EnvironmentDescription | None) -> SubmittedBackend:
            return self._offers.backend(described(version, known))

        try:
            return await validate(open_backend)
        except Unavailable:
            raise
        except Exception:  # noqa: BLE001 - a defect here must not keep others from being validated
            _log.exception("the validation itself failed", env=version.full_name)
            check = Check(name="validation", ok=False, detail="failed through an error in the service; see its log")
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
            "agent": description.agent,
            "entry": version.entry if version.entry or version.archive else description.entry,
        }
        if version.weight > 0:
            await self._move(version, "canary", "validated; a small share of live groups decides", **known)
        else:
            await self._activate(version, "validated; weight 0 joins no live run", **known)

    async def _activate(self, version: SubmittedVersion, why: str, **changes: Any) -> SubmittedVersion:
        """Activate a version and retire the one before it.

        A crash between the two writes leaves two active versions on disk; `open` keeps the later one.
        """
        made = version.to("active", why, **changes)
        await self._put(made, *self._superseded(made))
        return made

    def _superseded(self, by: SubmittedVersion) -> list[SubmittedVersion]:
        """The other active versions of a name, retired."""
        return [
            other.to("retired", by.replacement_reason)
            for other in self._versions[by.name].values()
            if other.state == "active" and other.version != by.version
        ]

    async def _move(self, version: SubmittedVersion, state: State, why: str = "", **changes: Any) -> SubmittedVersion:
        moved = version.to(state, why, **changes)
        await self._put(moved)
        return moved

    async def _put(self, *moved: SubmittedVersion) -> None:
        """Save versions in their new states, then publish all of them at once. Raises StorageUnavailable."""
        for version in moved:
            await asyncio.to_thread(self._store.update, version)
        for version in moved:
            self._versions[version.name][version.version] = version
            self._offers.put(version)
            _log.info("environment changed state", env=version.full_name, state=version.state, why=version.why)
        for name in {version.name for version in moved}:
            self._offers.assign_name(name, self._versions[name].values())
        count(self.all())

    def _named(self, name: str) -> dict[int, SubmittedVersion]:
        if not (known := self._versions.get(name)):
            raise NotFound(
                f"no environment {name[:80]!r} was submitted",
                f"submitted: {', '.join(sorted(self._versions)) or 'none yet'}",
            )
        return known
