"""Prompts that a privileged teacher was shown instead of the policy's, and their wire records.

Such a teacher scores the sampled tokens of a sequence after a prompt with information that the policy does not have
(self-distillation: OPSD, SDPO). The ids are those of `TeacherPrompt.token_ids`, then those of the sequence from
`replaces` on: every sampled token keeps its id and its order. An episode whose information is missing has no such
prompts and no log-probabilities of the teacher; `TeacherView.lacks` says what was missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shared.fields import read_array, read_int, read_text
from shared.sequences import WeightVersion, require

MOST_POSITIVE = 1e-3
"""Largest log-probability accepted of a teacher, in nats, for servers that round."""
_MOST_LACKS = 16


class TeacherLogprobs(NamedTuple):
    """A teacher's log-probabilities of given tokens (nats, temperature 1), float32.

    `version` is that of the run's weights that gave them; None for a teacher that is another server.
    """

    logprobs: np.ndarray
    version: str | None = None


@dataclass(frozen=True, slots=True)
class TeacherPrompt:
    """Prompt int32 [n] in place of the first `replaces` tokens of a sequence.

    `version` is that of the run's weights that scored the sequence; None for a teacher that is another server.
    """

    token_ids: np.ndarray
    replaces: int
    version: str | None = None

    def shown(self, sequence_ids: np.ndarray) -> np.ndarray:
        """Return int32 [n + T - replaces]: the ids that the teacher scores, given the sequence's, int32 [T]."""
        return np.concatenate([self.token_ids, sequence_ids[self.replaces :]])


@dataclass(frozen=True, slots=True)
class TeacherView:
    """`prompts` of a privileged teacher, one per sequence of the episode; or none, and what it `lacks`."""

    prompts: tuple[TeacherPrompt, ...] = ()
    lacks: tuple[str, ...] = ()

    def validate(self, lengths: Sequence[int], *, is_scored: bool) -> None:
        """Check the record against the sequences' lengths. Raises DecodeError."""
        require(bool(self.prompts) != bool(self.lacks), "a teacher's view has either prompts or what it lacks")
        require(
            bool(self.prompts) == is_scored, "a teacher's prompts come without its log-probabilities, or these alone"
        )
        require(len(self.lacks) <= _MOST_LACKS, "a teacher lacks too many things")
        if self.lacks:
            return
        require(len(self.prompts) == len(lengths), "a teacher was not shown each sequence")
        for prompt, length in zip(self.prompts, lengths, strict=True):
            require(0 < prompt.replaces < length, "a teacher's prompt replaces more than a sequence has")
            ids = prompt.token_ids
            require(ids.dtype == np.int32 and ids.ndim == 1 and len(ids) > 0, "a teacher's prompt has no ids")
            require(bool((ids >= 0).all()), "a teacher's prompt has negative ids")
            if prompt.version is not None:
                WeightVersion.parse(prompt.version)

    def to_wire(self) -> dict[str, Any]:
        return {
            "prompts": [[one.token_ids, one.replaces, one.version] for one in self.prompts],
            "lacks": list(self.lacks),
        }


def read_view(value: Any) -> TeacherView | None:
    """Decode a view; None if there is none. Raises TypeError, KeyError or ValueError."""
    if value is None:
        return None
    return TeacherView(
        tuple(
            TeacherPrompt(read_array(ids, "i4"), read_int(replaces), None if version is None else read_text(version))
            for ids, replaces, version in value["prompts"]
        ),
        tuple(read_text(name) for name in value["lacks"]),
    )
