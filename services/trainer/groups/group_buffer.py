"""Buffer of groups between queue and optimizer: selects the groups of the next step, and drops others.

Invariants: every entry leaves either in a step or as a `DroppedGroup` with a reason. With order `ticket` the sequence
of steps is a pure function of the groups' content, filters included: those that depend on a group alone decide the same
whenever it arrives. No I/O here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.trainer.groups.filters import NO_FILTERS, FilterOptions, verdict
from shared.errors import DecodeError, Untrainable
from shared.outcomes import DEFECTS, FilterRule
from shared.own_rules import FILTER
from shared.process.offload import by_size
from shared.queue.records import Finished, StreamEntry
from shared.routing import RoutingShape
from shared.rule_code import in_thread
from shared.run.archive import MAX_GROUP_BYTES
from shared.run.lineage import ForkPoint, in_lineage, in_log
from shared.run.progress import TicketProgress
from shared.types import Group, WeightVersion

Order = Literal["arrival", "ticket"]
Reason = Literal["failed", "stale", "poison", "superseded", "filtered"]
MAX_DELIVERIES = 3


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """Requirements for groups.

    `max_staleness` is in steps, `longest` in tokens; ids are below `vocab_size`; a group has at most `group_size`
    episodes. With `has_teacher` episodes need a teacher's log-probabilities; they need the reward `components`.
    Experts, if present, must match `routing`.
    """

    order: Order
    max_staleness: int
    longest: int
    vocab_size: int
    group_size: int
    filters: FilterOptions = NO_FILTERS
    has_teacher: bool = False
    components: tuple[str, ...] = ()
    routing: RoutingShape | None = None


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group ready for training; `payload` is its wire bytes, `oldest` and `newest` are the versions of its tokens."""

    group: Group
    payload: bytes
    entry_id: str
    oldest: WeightVersion
    newest: WeightVersion

    @property
    def finished(self) -> Finished:
        return Finished(self.group.ticket, self.entry_id)


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A ticket that ends without training.

    `versions` are the oldest and newest of its tokens, if it has any; `rule` is the filter that dropped it.
    """

    entry: StreamEntry
    reason: Reason
    detail: str
    versions: tuple[WeightVersion, WeightVersion] | None = None
    rule: FilterRule | None = None

    @property
    def is_defect(self) -> bool:
        """True if the group points to a defect: it is sent to the dead letters."""
        return self.reason == "poison" or (self.reason == "filtered" and self.rule in (None, *DEFECTS))

    @property
    def finished(self) -> Finished:
        return Finished(self.entry.ticket, self.entry.entry_id)


class _Examined(NamedTuple):
    """The group of an entry or why it is none, and the filter that excludes it with its reason."""

    group: Group | DecodeError
    found: tuple[FilterRule, str] | None = None


class GroupBuffer:
    """Holds groups until a step takes them; marks tickets finished in `progress` as it decides.

    Args:
        progress: shared with the checkpoint, which saves it.
        lineage: see `TrainerState`; the last entry is the present incarnation.
        forks: logs of other runs whose groups may come too.

    `n_filtered` counts the groups that were filtered since the last step was taken.
    """

    def __init__(
        self,
        progress: TicketProgress,
        lineage: Sequence[tuple[int, int]],
        rules: AdmissionRules,
        forks: Sequence[ForkPoint] = (),
    ) -> None:
        self.progress, self._lineage, self._rules, self._forks = progress, lineage, rules, forks
        self._waiting: dict[int, tuple[ReadyGroup, StreamEntry]] = {}
        self.highest = 0
        self.n_filtered = Counter[FilterRule]()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[ReadyGroup]:
        return [held for held, _ in self._waiting.values()]

    async def receive(self, entries: Sequence[StreamEntry]) -> list[DroppedGroup]:
        """Offer the entries in order; return those dropped.

        Large groups are decoded off the event loop, and the user's filter runs there. Raises RuleFailed; then no entry
        was added.
        """
        examined = [await self._examined_beside(e) if self._is_read(e) else None for e in entries]
        return [dropped for dropped in map(self.offer, entries, examined) if dropped is not None]

    async def _examined_beside(self, entry: StreamEntry) -> _Examined:
        if self._rules.filters.custom is not None:
            return await in_thread(FILTER, lambda: self._examined(entry))
        return await by_size(len(entry.payload), lambda: self._examined(entry))

    def _examined(self, entry: StreamEntry) -> _Examined:
        """Decode the group of an entry, and apply the filters if it can be trained. May block. Raises RuleFailed."""
        group = self._decoded(entry)
        if isinstance(group, DecodeError) or group.failure is not None or self._undone(group):
            return _Examined(group)
        return _Examined(group, verdict(group, self._rules.filters))

    def _decoded(self, entry: StreamEntry) -> Group | DecodeError:
        """Decode the group of an entry; return the error if it is invalid or not of this model."""
        try:
            group = Group.decode(entry.payload)
            for one in (one for t in group.trajectories for one in (t, *t.branches)):
                if one.routed_experts is None:
                    continue
                if self._rules.routing is None:
                    raise DecodeError("an episode has experts, but the model has none")
                self._rules.routing.check(one.routed_experts)
            self._check(group, entry)
        except DecodeError as error:
            return error
        return group

    def _is_read(self, entry: StreamEntry) -> bool:
        """True if the entry should be decoded: it is new, and was not delivered so often that it may kill readers."""
        return not self._is_known(entry) and entry.deliveries < MAX_DELIVERIES

    def _undone(self, group: Group) -> WeightVersion | None:
        """Return a version of the group's tokens or of its teacher that is in no lineage."""
        foreign = (
            v
            for v in sampled_by(group) | group.teachers()
            if not in_lineage(v, self._lineage) and not in_log(v, self._forks)
        )
        return next(foreign, None)

    def _is_known(self, entry: StreamEntry) -> bool:
        return self.progress.is_finished(entry.ticket) or entry.ticket in self._waiting

    def offer(self, entry: StreamEntry, examined: _Examined | None = None) -> DroppedGroup | None:
        """Add an entry; return a `DroppedGroup` if its ticket ends at once. Raises RuleFailed unless it is examined."""
        self.highest = max(self.highest, entry.ticket)
        if self._is_known(entry):
            return None
        if not self._is_read(entry):
            return self._drop(entry, "poison", f"{entry.deliveries - 1} trainers ended while they held it")
        group, found = examined or self._examined(entry)
        if isinstance(group, Untrainable):
            return self._drop(entry, "filtered", group.detail, rule=group.rule)
        if isinstance(group, DecodeError):
            return self._drop(entry, "poison", group.detail)
        if group.failure is not None:
            return self._drop(entry, "filtered" if group.rule else "failed", group.failure, rule=group.rule)
        held = ready_group(group, entry.payload, entry.entry_id)
        if undone := self._undone(group):
            return self._drop(
                entry, "superseded", f"{undone} was undone by a later trainer", (held.oldest, held.newest)
            )
        emptied = StreamEntry(entry.entry_id, entry.ticket, b"", entry.deliveries)
        if found is not None:
            rule, why = found
            return self._drop(emptied, "filtered", why, (held.oldest, held.newest), rule)
        self._waiting[entry.ticket] = held, emptied
        return None

    def expire(self, step: int) -> list[DroppedGroup]:
        """Drop groups that are too old for `step`, and groups of versions that do not exist yet: of another run."""
        now = WeightVersion(self._lineage[-1][0], step)
        foreign = [(h, e) for h, e in self._waiting.values() if h.newest > now]
        old = [
            (h, e)
            for h, e in self._waiting.values()
            if h.newest <= now and step - h.oldest.step > self._rules.max_staleness
        ]
        for held, _ in (*foreign, *old):
            del self._waiting[held.group.ticket]
        superseded = [
            self._drop(e, "superseded", f"{h.newest} does not exist yet", (h.oldest, h.newest)) for h, e in foreign
        ]
        return superseded + [
            self._drop(e, "stale", f"{step - h.oldest.step} steps old", (h.oldest, h.newest)) for h, e in old
        ]

    def has(self, n: int) -> bool:
        """True if the next `n` groups are here."""
        return len(self._next(n)) == n

    def ahead(self, n: int) -> list[ReadyGroup]:
        """Return the next `n` groups without taking them; none while they are not all here."""
        tickets = self._next(n)
        return [self._waiting[ticket][0] for ticket in tickets] if len(tickets) == n else []

    def filter(self, ticket: int, rule: FilterRule, why: str) -> DroppedGroup:
        """Drop a waiting group."""
        held, entry = self._waiting.pop(ticket)
        return self._drop(entry, "filtered", why, (held.oldest, held.newest), rule)

    def take(self, n: int) -> list[ReadyGroup] | None:
        """Take the next `n` groups, or None if they are not all here yet."""
        tickets = self._next(n)
        if len(tickets) < n:
            return None
        taken = [self._waiting.pop(ticket)[0] for ticket in tickets]
        for held in taken:
            self.progress.finish(held.group.ticket)
        self.n_filtered.clear()
        return taken

    def _next(self, n: int) -> list[int]:
        """Find up to `n` next tickets; in order `ticket`, up to the first that is not here."""
        if self._rules.order == "arrival":
            return list(itertools.islice(self._waiting, n))
        tickets: list[int] = []
        ticket = self.progress.low + 1
        while len(tickets) < n:
            if not self.progress.is_finished(ticket):
                if ticket not in self._waiting:
                    break
                tickets.append(ticket)
            ticket += 1
        return tickets

    def _check(self, group: Group, entry: StreamEntry) -> None:
        if len(entry.payload) > MAX_GROUP_BYTES:
            raise DecodeError(
                f"a group of {len(entry.payload)} bytes could not be archived: at most {MAX_GROUP_BYTES} are allowed"
            )
        if group.ticket != entry.ticket:
            raise DecodeError(f"the group says ticket {group.ticket}")
        if len(group.trajectories) > self._rules.group_size:
            raise DecodeError(f"{len(group.trajectories)} episodes in a group of {self._rules.group_size}")
        for trajectory in group.trajectories:
            longest, highest = max(trajectory.lengths()), int(trajectory.stored("token_ids").max())
            if longest > self._rules.longest:
                raise DecodeError(f"an episode of {longest} tokens exceeds the longest bucket, {self._rules.longest}")
            if highest >= self._rules.vocab_size:
                raise DecodeError(f"token id {highest} is outside the vocabulary")
            if self._rules.has_teacher and trajectory.teacher_logprobs is None and trajectory.teacher_view is None:
                raise DecodeError("an episode has no teacher log-probabilities")
            if missing := [name for name in self._rules.components if name not in trajectory.reward_components]:
                raise DecodeError(
                    f"an episode has no reward component {missing[0]!r}; it has"
                    f" {', '.join(sorted(trajectory.reward_components)[:8]) or 'none'}",
                    "algorithm.reward_components names components that every episode of the environment has",
                )

    def _drop(
        self,
        entry: StreamEntry,
        reason: Reason,
        detail: str,
        versions: tuple[WeightVersion, WeightVersion] | None = None,
        rule: FilterRule | None = None,
    ) -> DroppedGroup:
        self.progress.finish(entry.ticket, void=True)
        if rule is not None:
            self.n_filtered[rule] += 1
        return DroppedGroup(entry, reason, detail, versions, rule)


def ready_group(group: Group, payload: bytes, entry_id: str) -> ReadyGroup:
    versions = sampled_by(group)
    return ReadyGroup(group, payload, entry_id, min(versions), max(versions))


def sampled_by(group: Group) -> set[WeightVersion]:
    """Return the versions that sampled the group's tokens."""
    return {WeightVersion.parse(span.version) for trajectory in group.trajectories for span in trajectory.all_spans()}
