"""Finished conversations as tokens with a loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Encoding

from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from shared.models.continuation import HistoryChanged
from shared.models.templates import Messages, Tools
from volley_serving.templates.answers import AnswerRenderer, RenderedTurn
from volley_serving.templates.blocks import render_marked
from volley_supervised.conversations.masks import mark_spans, transfer_marks

_ANCHOR = 200  # characters


def render_demonstration(
    tokenizer: ChatTokenizer, messages: Messages, tools: Tools = (), learned: Sequence[bool] | None = None
) -> tuple[list[int], list[int]]:
    """Compute ids and loss mask of a finished conversation, exactly as a rollout of it is recorded.

    The mask is 1 on the assistant's tokens. If the template has `{% generation %}` blocks, it is 1 only on those
    that transformers marks in the whole conversation.

    Args:
        learned: for each message, True if an assistant's tokens may have mask 1; None: True for all.
    """
    return _DemonstrationRenderer(tokenizer).render(messages, tools, learned)


@dataclass(frozen=True, slots=True)
class _Said:
    """A tokenized assistant's turn, with its end.

    Attributes:
        marks: 1 for each id that is learned.
        is_open: the template writes no end.
    """

    ids: list[int]
    marks: list[int]
    is_open: bool


class _DemonstrationRenderer:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self._answers = tokenizer, AnswerRenderer(tokenizer)

    def render(self, messages: Messages, tools: Tools, learned: Sequence[bool] | None) -> tuple[list[int], list[int]]:
        if not messages or messages[-1]["role"] != "assistant" or messages[0]["role"] == "assistant":
            raise InputError("a demonstration must end with an assistant message")
        counts = [True] * len(messages) if learned is None else learned
        ids, marks, turns = list[int](), list[int](), list[tuple[int, range]]()
        is_open, at = False, 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            turn = self._answers.turn(messages[:i], message, tools)
            said, before = self._said(turn), None
            try:
                before = self._between(ids, messages[:at], messages[at:i], turn, tools) if at else None
            except HistoryChanged:
                if any(counts[earlier] for earlier, _ in turns):
                    raise
                ids, marks, turns = [], [], []  # nothing so far is learned: the prompt is rendered whole
            if before is None:
                self._tokenizer.turns.check_written((), messages[:i], tools)
                before = self._tokenizer.encode(turn.prompt)
            elif is_open and before[:1] and before[0] in self._tokenizer.end_ids:
                ids[-1] = before.pop(0)  # the next turn's header ends this one
            ids += before + said.ids
            marks += [0] * len(before) + said.marks
            turns.append((i, range(len(ids) - len(said.ids), len(ids))))
            is_open, at = said.is_open, i + 1
        text, spans = render_marked(self._tokenizer.templates, messages, tools)
        if spans is not None:
            whole = self._tokenizer.encoded(text)
            marks = transfer_marks(ids, marks, [turn for _, turn in turns], whole.ids, mark_spans(whole, spans))
        mask = [0] * len(ids)
        for i, turn in turns:
            mask[turn.start : turn.stop] = [mark * bool(counts[i]) for mark in marks[turn.start : turn.stop]]
        if any(counts[i] for i, _ in turns) and not any(mask):
            raise InputError("the chat template marks nothing that the assistant says with {% generation %}")
        return ids, mask

    def _said(self, turn: RenderedTurn) -> _Said:
        """Tokenize a turn. Raises InputError for an end token inside it, because no rollout continues after one."""
        n, start, encoding = self._after_anchor(turn)
        ids = encoding.ids[n:]
        ends = [i for i, token in enumerate(ids) if token in self._tokenizer.end_ids]
        after = encoding.offsets[n + ends[0]][1] - start if ends else len(turn.said)
        if turn.said[after:].strip() and not self._is_closed(turn.said, after):
            raise InputError(
                f"the assistant says {self._tokenizer.token(ids[ends[0]])}, which ends a turn: no rollout goes on after"
                " it",
                "leave it out; the chat template writes it at the end",
            )
        marks = [1] * len(ids)
        if turn.spans is not None:
            marks = mark_spans(encoding, [(begin + start, end + start) for begin, end in turn.spans])[n:]
        if not ends:
            return _Said([*ids, self._tokenizer.eos_id], [*marks, 1], True)
        return _Said(ids[: ends[0] + 1], marks[: ends[0] + 1], False)

    def _after_anchor(self, turn: RenderedTurn) -> tuple[int, int, Encoding]:
        """Tokenize a turn after the end of its prompt; return that end's numbers of tokens and characters, and both.

        If the prompt's last token would merge with the turn's first, the turn is tokenized after a newline, so that a
        tokenizer that begins a text with a space puts none before it.
        """
        for anchor in (self._anchor(turn.prompt), "\n"):
            context, encoding = self._tokenizer.encoded(anchor), self._tokenizer.encoded(anchor + turn.said)
            n = len(context.ids)
            if encoding.ids[:n] == context.ids:
                return n, len(anchor), encoding
        return 0, 0, self._tokenizer.encoded(turn.said)

    def _is_closed(self, said: str, end: int) -> bool:
        """True if the text after the end of a turn is the one that the template writes there."""
        return (
            self._tokenizer.closing is not None
            and said[end:] == self._tokenizer.turns.closing[len(self._tokenizer.closing) :]
        )

    def _anchor(self, prompt: str) -> str:
        """End of a prompt from its last special token on, which is tokenized together with the answer."""
        tail = prompt[-_ANCHOR:]
        encoding, added = self._tokenizer.encoded(tail), self._tokenizer.added_ids
        starts = [at for token, (at, _) in zip(encoding.ids, encoding.offsets, strict=True) if token in added]
        return tail[starts[-1] :] if starts else tail[max(tail.rfind("\n"), 0) :]

    def _between(
        self, ids: Sequence[int], conversation: Messages, messages: Messages, turn: RenderedTurn, tools: Tools
    ) -> list[int]:
        """Tokenize the text between the last turn, which ends the conversation and `ids`, and this turn."""
        found = self._tokenizer.continuations.after_turn(conversation, messages, tools)
        return self._tokenizer.after(replace(found, text=found.text.removesuffix(turn.opened)), ids)
