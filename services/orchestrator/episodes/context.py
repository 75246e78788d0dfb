"""Knowledge of a running episode besides its tokens, for a teacher that is shown more than the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.types import Message

type Tools = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class EpisodeContext:
    """Conversation of an episode's present attempt; empty for an episode of an agent.

    Attributes:
        tools: of the conversation.
        prompts: for each sequence, the messages at its beginning and the number of tokens that render them.
        hints: the newest texts of `info`, by name.
        answers: texts of the model's turns.
    """

    tools: Tools = ()
    prompts: list[tuple[Sequence[Message], int]] = field(default_factory=list[tuple[Sequence[Message], int]])
    hints: dict[str, str] = field(default_factory=dict[str, str])
    answers: list[str] = field(default_factory=list[str])

    def begin(self, messages: Sequence[Message], n_tokens: int, tools: Tools) -> None:
        """Begin an attempt, with its first prompt."""
        self.tools, self.hints, self.answers = tools, {}, []
        self.prompts = [(tuple(messages), n_tokens)]

    def answered(self, text: str, hints: Mapping[str, str]) -> None:
        """Record a turn of the model and the environment's answer."""
        self.answers.append(text)
        self.hints.update(hints)
