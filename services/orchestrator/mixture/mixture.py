"""Mixture of a running run: tasks of tickets, environments that join, leave or are set aside.

Every decision becomes a line of mixture.jsonl (see `log`). It follows from the environment service's offers, people's
requests, failing groups, and a curriculum. A ticket of an environment that has left keeps its
environment: its group fails with the error's class, the ticket ends as `failed`, and another one replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

from services.orchestrator.mixture.log import MixtureLog
from services.orchestrator.mixture.members import Offer, members_of, offers_in, weighted
from services.orchestrator.mixture.suspension import Suspensions, Verdicts
from services.orchestrator.status import RunStatus
from services.orchestrator.tallies import EnvironmentTallies
from shared import packages
from shared.data_schema import CurriculumConfig
from shared.errors import InputError, NotFound, RuleFailed, Unavailable, VolleyError
from shared.process import telemetry
from shared.run.mixture import MixtureChange, SplitSizes, base_name
from shared.run.seeding import TaskOrder, TicketTask
from shared.run.shares import Member, weights_of

_LOOK_S = 1.5
_log = telemetry.Log("mixture")


class OffersEnvironments(Protocol):
    """The part of `EnvClient` that the mixture uses."""

    async def environments(self) -> Any: ...

    async def num_tasks(self, env: str, split: str) -> int: ...


class Curriculum(Protocol):
    """Factors of a mixture's weights, which follow from its groups."""

    @property
    def is_due(self) -> bool:
        """True if new factors are due, until `settled`."""
        ...

    async def judged(self, factors: Mapping[str, float], tickets: Mapping[str, int]) -> dict[str, float]:
        """Return new factors by environment. Raises RuleFailed.

        Args: factors, tickets: of each environment so far; the latter name all.
        """
        ...

    def after(self, last: Mapping[str, float], judged: Mapping[str, float], envs: Iterable[str]) -> dict[str, float]:
        """Return these environments' factors other than 1: the judged ones if one moves enough, else the last."""
        ...

    def settled(self) -> None:
        """Mark the factors as applied."""
        ...


def opened_curriculum(config: CurriculumConfig, tallies: EnvironmentTallies, names: Iterable[str]) -> Curriculum:
    """Return a run's curriculum. Raises ConfigError if no package brings it, or a rule of the user's own fails."""
    return packages.part("curriculum")(config, tallies, names)


@dataclass(frozen=True, slots=True)
class ConfiguredMixture:
    """The mixture that a run starts with; `main` is the environment that the run requires.

    Without a `curriculum`, weights stay as given.
    """

    main: str
    members: Mapping[str, Member]
    seed: int
    curriculum: CurriculumConfig | None = None


class RunMixture:
    """The mixture of one run. Args: sizes: of the configured environments."""

    def __init__(
        self,
        configured: ConfiguredMixture,
        sizes: Mapping[str, SplitSizes],
        log: MixtureLog,
        service: OffersEnvironments,
        status: RunStatus,
        suspensions: Suspensions | None = None,
    ) -> None:
        self._configured, self._sizes_known, self._log = configured, dict(sizes), log
        self._service, self._status = service, status
        self._suspensions = suspensions or Suspensions()
        settings = configured.curriculum
        self._curriculum = opened_curriculum(settings, status.by_env, configured.members) if settings else None
        self._offers: dict[str, Offer] | None = None
        self._unplayable: dict[str, str] = {}
        self._wake, self._settling = asyncio.Event(), asyncio.Lock()

    async def task_of(self, ticket: int) -> TicketTask:
        """Return the task of a reserved ticket, which never changes."""
        env, ordinal = await self._log.drawn(ticket)
        sizes = self.sizes.get(env)
        if sizes is None:
            raise NotFound(f"the number of tasks of {env!r} is unknown", "was mixture.jsonl changed?")
        return TicketTask(env, TaskOrder(self._configured.seed, sizes.n_train).index(ordinal))

    @property
    def sizes(self) -> dict[str, SplitSizes]:
        """Sizes of all environments that the run has ever played."""
        return {**self._log.assignment.sizes, **self._sizes_known}

    def offer(self, env: str) -> Offer | None:
        """Return the environment service's latest offer of an environment; None without one."""
        return (self._offers or {}).get(env)

    def evaluated(self) -> dict[str, int]:
        """Return the environments to evaluate besides the main one, with the sizes of their evaluation splits.

        They are the configured ones and those that have joined, without those set aside.
        """
        now = self._log.current
        names = {*self._configured.members, *now.weights, *self._idle(now)}
        sizes, left_out = self.sizes, {*now.suspended, self._configured.main}
        return {env: sizes[env].n_eval for env in sorted(names - left_out) if env in sizes}

    async def watch(self) -> None:
        """Follow the environment service's offers until cancelled; while it does not answer, nothing changes.

        Raises RuleFailed.
        """
        problem = ""
        while True:
            try:
                await self.look()
            except RuleFailed:
                raise
            except VolleyError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("mixture unchanged: the environment service did not answer", reason=problem)
            else:
                problem = ""
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def look(self) -> None:
        """Apply the present offers. Raises VolleyError; then nothing has changed."""
        self._offers = offers_in(await self._service.environments())
        await self.settle()

    async def choose(self, weights: Mapping[str, float]) -> None:
        """Apply a person's weights, by name without version; 0 removes.

        Raises InputError for an unknown environment, and for removing the last one; Unavailable.
        """
        if self._offers is None:
            raise Unavailable("the environment service has not answered yet", "try again")
        known = {*self._configured.members, *self._log.current.chosen, *map(base_name, self._offers)}
        if unknown := sorted(weights.keys() - known):
            raise InputError(f"there is no environment {unknown[0][:80]!r}", f"known: {', '.join(sorted(known))}")
        await self.settle(weights)

    async def settle(self, asked: Mapping[str, float] | None = None) -> None:
        """Apply everything known, and the curriculum unless something was `asked`.

        Raises InputError for what was `asked`, Unavailable, RuleFailed.
        """
        offers, curriculum, asked = self._offers, self._curriculum if asked is None else None, asked or {}
        if offers is None:
            return
        async with self._settling:
            chosen = {**self._log.current.chosen, **asked}
            found = await self._sizes_of_newcomers(chosen, asked)
            judged = await self._judged(curriculum, offers, chosen) if curriculum else {}
            trials = self._suspensions.taken()
            try:
                changed = await self._log.change(
                    lambda last: self._following(last, offers, asked, found, trials, judged)
                )
            except VolleyError:
                self._suspensions.put_back(trials)
                raise
            if curriculum:
                curriculum.settled()
            if changed:
                now = self._log.current
                self._suspensions.sent((env for env in now.first if env in now.suspended), now.from_ticket)

    def set_aside(self, env: str, why: str) -> bool:
        """Set an environment aside; return False if the run needs it: it is the main one, or the only one."""
        now = self._log.current
        others = {*now.weights, *self._idle(now)} - {env} - self._suspensions.failing.keys()
        if env == self._configured.main or not others:
            return False
        if env in now.weights:
            self._suspensions.fail(env, why)
            self._wake.set()
        return True

    def ended(self, env: str, *, failed: bool, ticket: int) -> None:
        if self._suspensions.ended(env, failed=failed, ticket=ticket):
            self._wake.set()

    def describe(self) -> list[dict[str, Any]]:
        """Return a row for each environment that is, could be, or was played."""
        current, offers = self._log.current, self._offers or {}
        members, shares = members_of(self._configured.members, offers, current.chosen), current.shares()
        names = [*self._configured.members, *members, *shares, *current.suspended, *self._status.by_env.names()]
        return [self._row(env, members.get(env), shares.get(env, 0.0)) for env in dict.fromkeys(names)]

    def _row(self, env: str, member: Member | None, share: float) -> dict[str, Any]:
        suspended = self._log.current.suspended.get(env)
        reason = suspended or self._unplayable.get(env)
        return {
            "env": env,
            "weight": float(member.weight) if member else 0.0,
            "share": round(share, 6),
            "state": "suspended" if suspended else self._state(env, member),
            **({"reason": reason} if reason else {}),
            **self._status.by_env[env].describe(),
        }

    def _state(self, env: str, member: Member | None) -> str:
        if env in self._configured.members:
            return "configured" if member else "removed"
        if member is None:
            return "left"
        return "canary" if member.canary else "active"

    def _idle(self, change: MixtureChange) -> set[str]:
        """Return the environments that the mixture has, but does not play while their factor is 0."""
        found = {env for env, factor in change.factors.items() if not factor and env in self.sizes}
        return found - change.weights.keys() - change.suspended.keys()

    async def _judged(
        self, curriculum: Curriculum, offers: Mapping[str, Offer], chosen: Mapping[str, float]
    ) -> dict[str, float]:
        """Return new factors where they are due. Raises RuleFailed, QueueUnavailable."""
        if not curriculum.is_due:
            return {}
        played = await self._log.counts()
        names = sorted({*self._configured.members, *members_of(self._configured.members, offers, chosen)})
        return await curriculum.judged(self._log.current.factors, {env: played.get(env, 0) for env in names})

    async def _sizes_of_newcomers(
        self, chosen: Mapping[str, float], asked: Mapping[str, float]
    ) -> dict[str, SplitSizes]:
        """Return the sizes of environments that would be played but never were.

        One that does not answer is left out, and asked again later; one that a person requested raises instead.
        """
        found, self._unplayable = dict[str, SplitSizes](), {}
        for env in members_of(self._configured.members, self._offers or {}, chosen).keys() - self.sizes.keys():
            try:
                found[env] = await self._asked_sizes(env)
            except VolleyError as error:
                if base_name(env) in asked:
                    raise
                self._unplayable[env] = str(error)
        return found

    async def _asked_sizes(self, env: str) -> SplitSizes:
        n_train = await self._service.num_tasks(env, "train")
        if n_train < 1:
            raise InputError(f"{env} has no tasks to train on")
        try:
            return SplitSizes(n_train, await self._service.num_tasks(env, "eval"))
        except InputError:  # it has no such split
            return SplitSizes(n_train, 0)

    def _following(
        self,
        last: MixtureChange,
        offers: Mapping[str, Offer],
        asked: Mapping[str, float],
        found: Mapping[str, SplitSizes],
        trials: Verdicts,
        judged: Mapping[str, float],
    ) -> MixtureChange | None:
        """Return the mixture that follows from everything known; None if it is the last one. Raises InputError."""
        chosen, known = {**last.chosen, **asked}, {**self.sizes, **found}
        members = members_of(self._configured.members, offers, chosen)
        factors = self._curriculum.after(last.factors, judged, members) if self._curriculum else {}
        members = {env: member for env, member in members.items() if env in known}
        reasons = {**last.suspended, **trials.failing}
        suspended = {env: why for env, why in reasons.items() if env in members and env not in trials.recovered}
        played = {env: member for env, member in members.items() if env not in suspended}
        if not played and asked:
            raise InputError("nothing would be left to train on", "give another environment a weight above 0 first")
        weights = weights_of(weighted(played, factors) or played or {self._configured.main: Member(Fraction(1))})
        had = {*last.weights, *last.suspended, *self._idle(last)}
        new = [env for env in weights if env not in {*had, *self._configured.members}]
        due = self._suspensions.due([env for env in suspended if factors.get(env, 1)])
        before = (dict(last.weights), dict(last.chosen), dict(last.suspended), dict(last.factors))
        if not due and (weights, chosen, suspended, factors) == before:
            return None
        sizes = {env: sizes for env, sizes in found.items() if env in members}
        change = MixtureChange(0, weights, (*new, *due), sizes, chosen, suspended, factors=factors)
        return replace(change, why=_why(last, change, had, {*members, *weights}, asked))


def _why(last: MixtureChange, now: MixtureChange, had: set[str], has: set[str], asked: Mapping[str, float]) -> str:
    """Describe the change in a sentence. Args: had, has: environments of the mixture before and after it."""
    parts = [f"asked for: {', '.join(f'{env} {weight:g}' for env, weight in sorted(asked.items()))}"] if asked else []
    parts += [f"{env} set aside: {why}" for env, why in now.suspended.items() if env not in last.suspended]
    parts += [f"{env} is back" for env in last.suspended if env in has and env not in now.suspended]
    parts += [f"{env} is tried again" for env in now.first if env in now.suspended]
    parts += [f"{env} joined" for env in sorted(has - had)]
    parts += [f"{env} left" for env in sorted(had - has)]
    if now.factors != last.factors:
        parts += [f"curriculum: {', '.join(f'{env} {now.factors.get(env, 1.0):g}' for env in sorted(has))}"]
    if not any(now.factors.get(env, 1.0) for env in now.weights):
        parts += ["the curriculum has no factor above 0 for any of them: weights without it"]
    return "; ".join(parts) or "the shares changed"
