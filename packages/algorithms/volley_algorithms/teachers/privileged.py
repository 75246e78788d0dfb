"""Show a teacher more than the policy has seen (self-distillation: OPSD, SDPO).

A group is scored when all its episodes have ended, because an episode may be shown the answer of a better one. The
first user message, or without one the first system message, is replaced by the text of a template. Its placeholders are
filled from these places, and nothing else:

    {prompt}    the message; a template without it stands in front of the message
    {expected}  the newest `expected` in the `info` of a step: text or a number
    {feedback}  the newest `feedback` in the `info` of a step: text or a number
    {sibling}   the model's turns in the best episode of the group, if its reward is above this one's

The first template that can be filled is used. The model's chat template renders the new message within its
conversation; all tokens after the sequence's prompt stay as they are. An episode for which no template can be filled,
or that would not fit the context, gets no log-probabilities of the teacher, and a record of what it lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.context import EpisodeContext
from shared.errors import ContextExceeded
from shared.models.chat import ChatTokenizer
from shared.server_schema import placeholders
from shared.teacher_view import TeacherPrompt, TeacherView
from shared.types import Message, Trajectory
from volley_algorithms.teachers.teaching import EpisodeTeaching

_PROMPT, _SIBLING, _CONTEXT = "prompt", "sibling", "context"
_ROLES = ("user", "system")


class PrivilegedTeaching:
    """Adds the log-probabilities of a privileged teacher to complete groups.

    Args:
        templates: at least one, each with a placeholder beside {prompt}.
        max_tokens: most tokens that the teacher can score; None if that is not known.
        max_attempts: of each episode, as for those that failed while it was played.
    """

    def __init__(
        self,
        teaching: EpisodeTeaching,
        tokenizer: ChatTokenizer,
        templates: Sequence[str],
        max_tokens: int | None,
        max_attempts: int,
    ) -> None:
        self._teaching, self._max_tokens, self._max_attempts = teaching, max_tokens, max_attempts
        self._tokenizer = tokenizer if max_tokens is None else tokenizer.within(max_tokens)
        self._templates = [one if _PROMPT in placeholders(one) else f"{one}\n\n{{prompt}}" for one in templates]

    async def teach(
        self, trajectories: Sequence[Trajectory], contexts: Sequence[EpisodeContext]
    ) -> tuple[Trajectory, ...]:
        """As `GroupTeaching.teach`."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._taught(one, context, sibling_of(one, trajectories, contexts)))
                for one, context in zip(trajectories, contexts, strict=True)
            ]
        return tuple(task.result() for task in tasks)

    async def _taught(self, trajectory: Trajectory, context: EpisodeContext, sibling: str | None) -> Trajectory:
        known = context.hints | ({} if sibling is None else {_SIBLING: sibling})
        view = await asyncio.to_thread(self._view, trajectory, context, known)
        budget = TokenBudget(self._max_attempts, trajectory.attempt)
        budget.failures.update(trajectory.failures)
        return await self._teaching.add_logprobs(trajectory, budget, view)

    def _view(self, trajectory: Trajectory, context: EpisodeContext, known: Mapping[str, str]) -> TeacherView:
        """Make the prompts of an episode. Raises InputError if the chat template refuses them."""
        lengths = trajectory.lengths()
        if len(context.prompts) != len(lengths):  # of an agent, whose calls are not known here
            return TeacherView(lacks=(_PROMPT,))
        missing = [placeholders(template) - known.keys() - {_PROMPT} for template in self._templates]
        if all(missing):
            return TeacherView(lacks=tuple(sorted(frozenset[str]().union(*missing))))
        template, prompts = self._templates[missing.index(frozenset())], list[TeacherPrompt]()
        for (messages, n_tokens), length in zip(context.prompts, lengths, strict=True):
            if (shown := _with_text(messages, template, known)) is None:
                return TeacherView(lacks=(_PROMPT,))
            try:
                ids = self._tokenizer.render_prompt(shown, context.tools)
            except ContextExceeded:
                return TeacherView(lacks=(_CONTEXT,))
            if self._max_tokens is not None and len(ids) + length - n_tokens > self._max_tokens:
                return TeacherView(lacks=(_CONTEXT,))
            prompts.append(TeacherPrompt(np.asarray(ids, np.int32), n_tokens))
        return TeacherView(tuple(prompts))


def sibling_of(trajectory: Trajectory, group: Sequence[Trajectory], contexts: Sequence[EpisodeContext]) -> str | None:
    """Return the model's turns in the best episode of the group, each on lines of its own.

    None if no episode has a higher reward than this one, or the best has no text. The first of equal ones is used.
    """
    best = max(range(len(group)), key=lambda i: group[i].reward)
    if not group[best].reward > trajectory.reward:
        return None
    return "\n".join(contexts[best].answers) or None


def _with_text(messages: Sequence[Message], template: str, known: Mapping[str, str]) -> list[Message] | None:
    """Return the messages with the template's text as the first of a user or, without one, of the system."""
    at = next((i for role in _ROLES for i, one in enumerate(messages) if one["role"] == role), None)
    if at is None:
        return None
    text = template.format_map({**known, _PROMPT: messages[at]["content"]})
    return [*messages[:at], {**messages[at], "content": text}, *messages[at + 1 :]]
