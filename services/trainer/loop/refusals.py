"""Record of refused steps: those that gave non-finite numbers.

`refused.jsonl` has a line for each; `refused/e000001/s000042-1.zst` holds the groups, in the archive's format, of the
first refusal of e000001-s000042. If refused steps are skipped, the same version may be refused again, with other
groups.

Invariant: the groups are moved there before the line is written, and the line is durable before a ticket ends for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from services.trainer.groups.group_buffer import ReadyGroup
from shared.errors import NonFinite
from shared.files import storage
from shared.run import archive
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from shared.visible import quoted

_NAMED = 3


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """A line of refused.jsonl.

    The step would have made `version` from `base`; `what` names the non-finite numbers; `action` is `stop` or `skip`.
    """

    version: str
    base: str
    step: int
    what: tuple[str, ...]
    tickets: tuple[int, ...]
    digests: tuple[str, ...]
    action: str

    @classmethod
    def of(
        cls, error: NonFinite, before: WeightVersion, held: Sequence[ReadyGroup], digests: Sequence[str], action: str
    ) -> RefusedStep:
        version = WeightVersion(before.epoch, before.step + 1)
        tickets = tuple(h.group.ticket for h in held)
        return cls(str(version), str(before), version.step, error.what, tickets, tuple(digests), action)

    @property
    def reason(self) -> str:
        """Sentence that names the non-finite numbers."""
        more = len(self.what) - _NAMED
        names = ", ".join(self.what[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"step {self.step} gave numbers that are not finite: {names}"

    def sentence(self, run_folder: Path) -> str:
        """Message for users, on one line: what happened and what to do."""
        return (
            f"{self.reason}; tickets {', '.join(map(str, self.tickets))}. It was refused, {self.base} is the last good"
            f" version. Lower the learning rate: `volley up {quoted(run_folder)}"
            f" trainer.optimizer_config.learning_rate=…`; or"
            f" replay the step: `volley replay {quoted(run_folder)} --refused {quoted(self.version)}`"
        )


class Refusals:
    """Refusals of one run."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder

    def keep(self, refusal: RefusedStep) -> None:
        """Record a refusal durably; may be repeated after an error. Raises StorageUnavailable."""
        version = WeightVersion.parse(refusal.version)
        run = RunFolder(self.folder)
        source, root = archive.path_of(run.archive, version), run.refused_groups
        folder = archive.refused_path(root, version, 1).parent
        with storage.storage(self.folder):
            root.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            if source.exists():  # otherwise an earlier try moved it
                n = sum(found == version for found, _ in archive.refused(root)) + 1
                source.rename(archive.refused_path(root, version, n))
            for changed in (folder, root, source.parent, self.folder):
                storage.fsync(changed)
        storage.append(run.refused, orjson.dumps(asdict(refusal)) + b"\n", durable=True)
