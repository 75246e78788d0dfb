"""Checks of the records that are handed over: lines that the proof of the run would reject for ever are refused.

A holder of the service token may write anything there, and no line is ever removed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from services.trainer.interfaces import RecordCheck
from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.data_schema import DataSection
from shared.errors import DecodeError, InputError, NotFound, NotReady
from shared.run import archive, commits, counted
from shared.run.data import differing
from shared.run.folder import Record, RunFolder
from shared.run.ledger import TRAINED
from shared.run.ledger import parse as parse_end
from shared.run.mixture import MixtureChange, TicketAssignment, parse, replayed
from shared.run.shares import configured, weights_of
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion
from volley_proof.records import evaluations
from volley_proof.records.made import MadeVersions

_FURTHEST = 10_000
"""Most tickets between the newest one that the trainer knows and the first one of a change of the mixture."""


class RecordChecks:
    """Checks of each record of one run.

    Args:
        run: the run's name; its groups are in the archive of `folder`.
        versions: looks up an environment's name in the environment service; raises NotFound.
    """

    def __init__(
        self, folder: RunFolder, run: str, data: DataSection, versions: Callable[[str], Awaitable[object]]
    ) -> None:
        self._folder, self._run, self._data, self._versions = folder, run, data, versions

    @property
    def by_record(self) -> Mapping[Record, RecordCheck]:
        return {
            "evals": self._in_thread(self._evals),
            "samples": self._in_thread(self._samples),
            "mixture": self.mixture,
        }

    def _in_thread(self, check: Callable[[Sequence[bytes], Sequence[bytes]], Iterator[str]]) -> RecordCheck:
        async def checked(new: Sequence[bytes], there: Sequence[bytes]) -> None:
            if (why := await asyncio.to_thread(lambda: next(check(new, there), None))) is not None:
                raise InputError(f"the run cannot have this line: {why}", "hand over what the run's servers measured")

        return checked

    def _evals(self, new: Sequence[bytes], there: Sequence[bytes]) -> Iterator[str]:
        """Yield faults of evaluations: of versions that were never made, of other data, or impossible."""
        made = self._made()
        for line in new:
            try:
                found = counted.versions_of(codec.from_record(line, "a line", MAX_LINE_VALUES))
            except (DecodeError, TypeError, AttributeError) as error:
                yield str(error)
                continue
            yield from (why for version in found if (why := made.why_not(version)) is not None)
            if not found:
                yield "it names no version"
        lines, n = [*there, *new], len(there)
        yield from (why for number, why in evaluations.invalid_lines(lines) if number > n)
        known = dict[str, dict[str, str]]()
        for number, _, env, data in evaluations.measured(lines, self._data.env):
            first = known.setdefault(env, {})
            if number > n and differing(first, data):
                yield f"it measured {env[:80]} with other data than the evaluations before"
            known[env] = {**data, **first}

    def _samples(self, new: Sequence[bytes], there: Sequence[bytes]) -> Iterator[str]:
        """Yield faults of samples: steps that were never made."""
        last = self._made().last_step
        for line in new:
            try:
                step = codec.from_record(line, "a line", MAX_LINE_VALUES).get("step")
            except DecodeError as error:
                yield error.detail
                continue
            if type(step) is not int or not 0 <= step <= last:
                yield f"it is of step {str(step)[:20]}, the newest step is {last}"

    def _made(self) -> MadeVersions:
        return MadeVersions(self._folder, self._head())

    def _head(self) -> TrainerState:
        head = commits.newest(self._folder)
        if head is None:
            raise NotReady("the run has no version yet", "repeat the request when the trainer is ready")
        return head

    async def mixture(self, new: Sequence[bytes], there: Sequence[bytes]) -> None:
        """RecordCheck changes of the mixture: their order, their environments, and the groups trained already.

        Raises InputError; DecodeError for a line that is no change of a mixture; and Unavailable while the environment
        service, which knows the submitted environments, is away.
        """
        changes = [parse(line) for line in new]
        known = set(configured(self._data))
        for line in there:
            with contextlib.suppress(DecodeError):
                known |= _named(parse(line))
        for name in sorted({name for change in changes for name in _named(change)} - known):
            try:
                await self._versions(name)
            except NotFound as error:
                raise InputError(
                    f"a change of the mixture names an unknown environment, {name[:80]!r}",
                    "submit it to the environment service first, or name it in data.mixture",
                ) from error
        await asyncio.to_thread(self._check_tickets, changes, new, there)

    def _check_tickets(self, changes: Sequence[MixtureChange], new: Sequence[bytes], there: Sequence[bytes]) -> None:
        hint = "a change holds from a ticket on that nobody has reserved"
        assignment = TicketAssignment(weights_of(configured(self._data)))
        before = replayed(assignment, there)
        if len(wrong := [*before, *replayed(assignment, new)]) > len(before):
            raise InputError(wrong[-1], hint)
        head = commits.newest(self._folder)
        issued = 0 if head is None else head.issued
        if (furthest := max(change.from_ticket for change in changes)) > issued + _FURTHEST:
            raise InputError(f"a change of the mixture is from ticket {furthest} on, {issued} are known", hint)
        first = min(change.from_ticket for change in changes)
        for group in self._trained_from(first, head) if head is not None and first <= issued else ():
            if group.ticket >= first and group.env != (env := assignment.of(group.ticket).env):
                raise InputError(f"ticket {group.ticket} was played in {group.env}, the change says {env[:80]}", hint)

    def _trained_from(self, first: int, head: TrainerState) -> Iterator[Group]:
        """Yield the groups of each step that trained a ticket from `first` on."""
        steps = set[WeightVersion]()
        with contextlib.suppress(FileNotFoundError):
            for line in self._folder.ledger.read_bytes().splitlines():
                end = parse_end(line)
                if end is not None and end.get("disposition") == TRAINED and end["ticket"] >= first:
                    steps.add(WeightVersion(end["epoch"], end["step"]))
        for version in sorted(steps):
            with contextlib.suppress(DecodeError):
                if counted.is_step(version, head):
                    yield from map(Group.decode, archive.read(self._folder.archive, self._run, version))


def _named(change: MixtureChange) -> set[str]:
    return {*change.weights, *change.first, *change.sizes}
