"""Groups between the queue and the optimizer: which are trained next, and which end without training, and why.

Invariants: every entry that comes in leaves either in a step or as a `DroppedGroup` with a reason; order `ticket` makes
the sequence of steps a pure function of the groups' content, filters included: those that look at a group alone decide
the same whenever it comes. No I/O here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.trainer.groups.filters import NO_FILTERS, FilterOptions, verdict
from shared.errors import DecodeError, Untrainable
from shared.outcomes import FilterRule
from shared.process.offload import by_size
from shared.queue.records import Finished, StreamEntry
from shared.routing import RoutingShape
from shared.run.archive import MAX_GROUP_BYTES
from shared.run.progress import TicketProgress
from shared.run.state import in_lineage
from shared.types import Group, WeightVersion

Order = Literal["arrival", "ticket"]
Reason = Literal["failed", "stale", "poison", "superseded", "filtered"]
MAX_DELIVERIES = 3


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What a group must satisfy. `max_staleness` in steps, `longest` in tokens, ids below `vocab_size`, at most
    `group_size` episodes; `has_teacher`: with a teacher's log-probabilities; experts, where a group brings
    any, of the model that `routing` is of.
    """

    order: Order
    max_staleness: int
    longest: int
    vocab_size: int
    group_size: int
    filters: FilterOptions = NO_FILTERS
    has_teacher: bool = False
    routing: RoutingShape | None = None


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group ready for training. `payload` are its wire bytes; `oldest` and `newest` are the versions that sampled its
    tokens.
    """

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
    """A ticket that ends without training. `versions` are the oldest and newest of its tokens, if it has any; `rule`
    is which filter it was.
    """

    entry: StreamEntry
    reason: Reason
    detail: str
    versions: tuple[WeightVersion, WeightVersion] | None = None
    rule: FilterRule | None = None

    @property
    def is_defect(self) -> bool:
        """Whether nobody meant to make such a group: it is worth being looked at."""
        return self.reason == "poison" or (self.reason == "filtered" and self.rule != "zero_variance")

    @property
    def finished(self) -> Finished:
        return Finished(self.entry.ticket, self.entry.entry_id)


class GroupBuffer:
    """Holds groups until a step takes them; marks tickets finished in `progress` as it decides.

    Args:
        progress: shared with the checkpoint, which saves it.
        lineage: see `TrainerState`; the last entry is the present incarnation.

    `n_filtered` counts the groups that were filtered since the last step was taken.
    """

    def __init__(self, progress: TicketProgress, lineage: Sequence[tuple[int, int]], rules: AdmissionRules) -> None:
        self.progress, self._lineage, self._rules = progress, lineage, rules
        self._waiting: dict[int, tuple[ReadyGroup, StreamEntry]] = {}
        self.highest = 0
        self.n_filtered = Counter[FilterRule]()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def receive(self, entries: Sequence[StreamEntry]) -> list[DroppedGroup]:
        """`offer` for each, in their order; large groups are decoded beside the event loop. Those that were dropped."""
        groups = [
            await by_size(len(e.payload), lambda e=e: self._decoded(e)) if self._is_read(e) else None for e in entries
        ]
        return [dropped for dropped in map(self.offer, entries, groups) if dropped is not None]

    def _decoded(self, entry: StreamEntry) -> Group | DecodeError:
        """The group of an entry, or why it is none of this model; large ones take a while."""
        try:
            group = Group.decode(entry.payload)
            for routed in (t.routed_experts for t in group.trajectories if t.routed_experts is not None):
                if self._rules.routing is None:
                    raise DecodeError("an episode comes with experts, and the model has none")
                self._rules.routing.check(routed)
        except DecodeError as error:
            return error
        return group

    def _is_read(self, entry: StreamEntry) -> bool:
        """Whether what it holds counts. What may have killed its readers is not looked at."""
        return not self._is_known(entry) and entry.deliveries < MAX_DELIVERIES

    def _is_known(self, entry: StreamEntry) -> bool:
        return self.progress.is_finished(entry.ticket) or entry.ticket in self._waiting

    def offer(self, entry: StreamEntry, group: Group | DecodeError | None = None) -> DroppedGroup | None:
        """Takes an entry in; a `DroppedGroup` if its ticket ends here and now. `group`: what `_decoded` made of
        it, if it was read.
        """
        self.highest = max(self.highest, entry.ticket)
        if self._is_known(entry):
            return None
        if not self._is_read(entry):
            return self._drop(entry, "poison", f"{entry.deliveries - 1} trainers ended while they held it")
        try:
            group = self._decoded(entry) if group is None else group
            if isinstance(group, DecodeError):
                raise group
            self._check(group, entry)
        except Untrainable as error:
            return self._drop(entry, "filtered", error.detail, rule=error.rule)
        except DecodeError as error:
            return self._drop(entry, "poison", error.detail)
        if group.failure is not None:
            return self._drop(entry, "failed", group.failure)
        held = ready_group(group, entry.payload, entry.entry_id)
        undone = next((v for v in sampled_by(group) if not in_lineage(v, self._lineage)), None)
        if undone is not None:
            return self._drop(
                entry, "superseded", f"{undone} was undone by a later trainer", (held.oldest, held.newest)
            )
        emptied = StreamEntry(entry.entry_id, entry.ticket, b"", entry.deliveries)
        if found := verdict(group, self._rules.filters.rules):
            rule, why = found
            return self._drop(emptied, "filtered", why, (held.oldest, held.newest), rule)
        self._waiting[entry.ticket] = held, emptied
        return None

    def expire(self, step: int) -> list[DroppedGroup]:
        """Ends the groups that are too old to be trained at `step`, and those of another run: of weights that are not
        made yet.
        """
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
            self._drop(e, "superseded", f"{h.newest} is not made yet", (h.oldest, h.newest)) for h, e in foreign
        ]
        return superseded + [
            self._drop(e, "stale", f"{step - h.oldest.step} steps old", (h.oldest, h.newest)) for h, e in old
        ]

    def has(self, n: int) -> bool:
        """Whether the next `n` groups are here."""
        return len(self._next(n)) == n

    def ahead(self, n: int) -> list[ReadyGroup]:
        """The next `n` groups, which stay; none while they are not all here."""
        tickets = self._next(n)
        return [self._waiting[ticket][0] for ticket in tickets] if len(tickets) == n else []

    def filter(self, ticket: int, rule: FilterRule, why: str) -> DroppedGroup:
        """Ends a group that waits."""
        held, entry = self._waiting.pop(ticket)
        return self._drop(entry, "filtered", why, (held.oldest, held.newest), rule)

    def take(self, n: int) -> list[ReadyGroup] | None:
        """The next `n` groups, or None if they are not all here yet."""
        tickets = self._next(n)
        if len(tickets) < n:
            return None
        taken = [self._waiting.pop(ticket)[0] for ticket in tickets]
        for held in taken:
            self.progress.finish(held.group.ticket)
        self.n_filtered.clear()
        return taken

    def _next(self, n: int) -> list[int]:
        """Up to `n` tickets; in order `ticket` up to the first that is not here."""
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
                f"a group of {len(entry.payload)} bytes could not be archived, the most is {MAX_GROUP_BYTES}"
            )
        if group.ticket != entry.ticket:
            raise DecodeError(f"the group says ticket {group.ticket}")
        if len(group.trajectories) > self._rules.group_size:
            raise DecodeError(f"{len(group.trajectories)} episodes in a group of {self._rules.group_size}")
        for trajectory in group.trajectories:
            if len(trajectory.token_ids) > self._rules.longest:
                raise DecodeError(
                    f"an episode of {len(trajectory.token_ids)} tokens exceeds the longest bucket,"
                    f" {self._rules.longest}"
                )
            if int(trajectory.token_ids.max()) >= self._rules.vocab_size:
                raise DecodeError(f"token id {int(trajectory.token_ids.max())} is outside the vocabulary")
            if self._rules.has_teacher and trajectory.teacher_logprobs is None:
                raise DecodeError("an episode comes without its teacher's log-probabilities")

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
    """The versions that sampled its tokens."""
    return {WeightVersion.parse(span.version) for trajectory in group.trajectories for span in trajectory.versions}
