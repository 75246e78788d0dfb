"""Chat text to tokens and back. Tokens of earlier turns are never computed again.

A conversation grows by appending. `render_prompt` returns the first tokens. After the model's sampled ids,
`continue_after` returns only the environment's new text and the header of the next assistant turn. It renders the
template with a marker in place of the assistant's words, so these are never rendered or tokenized again.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tokenizers import Encoding

from shared.errors import ConfigError, InputError
from shared.models.masks import mark_spans, transfer_marks
from shared.models.templates import ChatTemplates, Messages, Tools, Variables, read_templates
from shared.models.tokenizer_files import read_tokenizer
from shared.models.turns import CallForm, Turn, TurnRenderer

_ANCHOR = 200  # characters


@dataclass(frozen=True, slots=True)
class _Said:
    """A tokenized assistant's turn, with its end.

    Attributes:
        marks: 1 for each id that is learned.
        tail: text after the end; None if the template writes no end.
        whole: text of the conversation up to there.
    """

    ids: list[int]
    marks: list[int]
    tail: str | None
    whole: str


class ChatTokenizer:
    """Tokenizer and chat template of a Hugging Face folder.

    Attributes:
        vocab_size: largest id plus one, special tokens included; some ids below may be unused.
        eos_id: token with which the template closes an assistant's turn; `eos_token` if the template writes none.
        end_ids: all tokens that end an assistant's turn: `eos_id`, `eos_token`, and those of generation_config.json and
            config.json.
        pad_id: padding of rows: `pad_token`, or `eos_token` if none is named.
        writes_date: the chat template writes the date.
        note: a sentence if transformers 5 reads the folder's tokenizer differently.
    """

    def __init__(self, folder: Path, date: datetime.date | None = None, *, needs_template: bool = True) -> None:
        """Read the folder. Raises ConfigError naming the missing file or key.

        Args:
            date: of the run, for templates that write one; None: today's, in UTC.
            needs_template: False accepts a folder without a chat template; rendering raises InputError then.
        """
        files = read_tokenizer(folder)
        self._tokenizer, self.note = files.tokenizer, files.note
        if "eos_token" not in files.special:
            raise ConfigError(f"{folder}/tokenizer_config.json names no eos_token")
        self._template = ChatTemplates(
            read_templates(folder, files.settings, optional=not needs_template), files.special, date
        )
        if unnamed := sorted(self._template.names & files.unnamed):
            raise ConfigError(
                f"{folder}: the chat template reads {unnamed[0]}, which tokenizer_config.json does not name",
                f"the class of the tokenizer may have a default: write {unnamed[0]} there, or null for none",
            )
        self._turns = TurnRenderer(self._template)
        if not self._turns.writes_text:
            raise ConfigError(
                f"{folder}: the chat template does not write the text of a message",
                "it may expect images and text in parts; give a template for text",
            )
        self.writes_date = self._template.writes_date
        eos = self._tokenizer.token_to_id(files.special["eos_token"])
        declared = files.end_ids | {eos}
        self.eos_id, self._closing = self._turn_end(declared, eos)
        self.end_ids = declared | {self.eos_id}
        self.pad_id = self._tokenizer.token_to_id(files.special.get("pad_token") or files.special["eos_token"])
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def _turn_end(self, declared: frozenset[int], eos: int) -> tuple[int, str | None]:
        """Find the token that closes a turn, and the text up to its end; (eos, None) if the template writes none."""
        try:
            closing = self._turns.closing
        except InputError:  # the caller who renders a conversation sees it
            return eos, None
        encoding = self._encoded(closing)
        places = [*zip(encoding.ids, encoding.offsets, strict=True)]
        special = {i for i, one in self._tokenizer.get_added_tokens_decoder().items() if one.special}
        first = next((n for n, (token, _) in enumerate(places) if token in special | declared), len(places))
        run = [*takewhile(lambda place: place[0] in special | declared, places[first:])]
        found = [*(place for place in run if place[0] in declared), *run[-1:]]
        return (found[0][0], closing[: found[0][1][1]]) if found else (eos, None)

    def encode(self, text: str) -> list[int]:
        """Tokenize `text`; special tokens in it are recognised, none is added.

        Raises InputError for half of a surrogate pair, which UTF-8 cannot encode.
        """
        return self._encoded(text).ids

    def _encoded(self, text: str) -> Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError("there is half of a surrogate pair in the text: it is not valid Unicode") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str:
        """Decode one token, for display."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def is_ended(self, sampled_ids: Sequence[int]) -> bool:
        """True if sampled ids end an assistant's turn."""
        return bool(sampled_ids) and sampled_ids[-1] in self.end_ids

    def message_text(self, sampled_ids: Sequence[int]) -> str:
        """Decode sampled ids without the end tokens and padding after them."""
        n = len(sampled_ids)
        while n and (sampled_ids[n - 1] in self.end_ids or sampled_ids[n - 1] == self.pad_id):
            n -= 1
        return self.decode(sampled_ids[:n])

    def render_prompt(self, messages: Messages, tools: Tools = (), *, header: bool = True) -> list[int]:
        """Tokenize a conversation, with the header of the next assistant turn. Raises InputError.

        Args:
            header: False leaves that header out.
        """
        return self.encode(self._template.render(messages, tools, prompt=header))

    def call_form(self, messages: Messages, tools: Tools) -> CallForm:
        """Return the text of a call in the next answer. Raises InputError if the template writes no calls."""
        return self._turns.call_form(messages, tools)

    def render_unfinished(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Tokenize a conversation without the end of its last message, for the model to continue. Raises InputError."""
        return self.encode(self._template.render_unfinished(messages, tools))

    def render_continuation(self, messages: Messages, *, ended: bool) -> list[int]:
        """Tokenize the text after an assistant turn: its missing end, `messages`, and the next assistant header.

        Args:
            ended: the sampled ids already close the turn with `eos_id`.
        """
        return self._after(self._continuation(messages), ended=ended)

    def continue_after(self, sampled_ids: Sequence[int], messages: Messages) -> list[int]:
        """Tokenize the text after a sampled assistant turn, which stays as it was sampled.

        If the turn lacks the end that the template writes, the end is added, even after another end token. A token that
        both ends a turn and begins the next one (GLM's `<|user|>`) is not repeated.
        """
        ids = self.render_continuation(messages, ended=sampled_ids[-1:] == [self.eos_id])
        repeated = self._closing is None and self.is_ended(sampled_ids) and ids[:1] == [sampled_ids[-1]]
        return ids[1:] if repeated else ids

    def _continuation(self, messages: Messages) -> str:
        text = self._turns.before_next(messages)
        if text is None:
            raise ConfigError("the chat template does not write the content of an assistant's message")
        return text

    def _after(self, text: str, *, ended: bool) -> list[int]:
        """Tokenize the text after an assistant's words, without the end of the turn if the turn has `ended`."""
        encoding = self._encoded(text)
        if not ended or self._closing is None or not text.startswith(self._closing):
            return encoding.ids
        return encoding.ids[encoding.ids.index(self.eos_id) + 1 :]

    def leaves_out(self, messages: Messages, tools: Tools) -> bool:
        """True if the template ignores the `tools` in what comes before the first answer. Raises InputError."""
        before = [*takewhile(lambda message: message["role"] != "assistant", messages)] or messages
        return bool(tools) and self._template.render(before, tools) == self._template.render(before)

    def reads_variable(self, name: str) -> bool:
        """True if a chat template reads the variable."""
        return name in self._template.names

    def check_variables(self, variables: Variables) -> None:
        """Raises InputError naming a variable that no chat template reads."""
        self._template.check_variables(variables)

    def with_variables(self, variables: Variables) -> ChatTokenizer:
        """Copy the tokenizer with more variables for its templates."""
        made = copy(self)
        made._template = self._template.with_variables(variables)
        made._turns = TurnRenderer(made._template)
        return made

    def render_demonstration(
        self, messages: Messages, tools: Tools = (), learned: Sequence[bool] | None = None
    ) -> tuple[list[int], list[int]]:
        """Compute ids and loss mask of a finished conversation, exactly as a rollout of it is recorded.

        The mask is 1 on the assistant's tokens. If the template has `{% generation %}` blocks, it is 1 only on those
        that transformers marks in the whole conversation.

        Args:
            learned: for each message, True if an assistant's tokens may have mask 1; None: True for all.
        """
        if not messages or messages[-1]["role"] != "assistant" or messages[0]["role"] == "assistant":
            raise InputError("a demonstration must end with an assistant message")
        counts = [True] * len(messages) if learned is None else learned
        ids, marks, turns = list[int](), list[int](), list[tuple[int, range]]()
        last, at = None, 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            turn = self._turns.turn(messages[:i], message, tools)
            before, said = self._between(last, messages[:at], messages[at:i], turn, tools), self._said(turn)
            if last is not None and last.tail is None and before[:1] and before[0] in self.end_ids:
                ids[-1] = before.pop(0)  # the next turn's header ends this one
            ids += before + said.ids
            marks += [0] * len(before) + said.marks
            turns.append((i, range(len(ids) - len(said.ids), len(ids))))
            last, at = said, i + 1
        text, spans = self._template.render_marked(messages, tools)
        if spans is not None:
            whole = self._encoded(text)
            marks = transfer_marks(ids, marks, [turn for _, turn in turns], whole.ids, mark_spans(whole, spans))
        mask = [0] * len(ids)
        for i, turn in turns:
            mask[turn.start : turn.stop] = [mark * bool(counts[i]) for mark in marks[turn.start : turn.stop]]
        if any(counts[i] for i, _ in turns) and not any(mask):
            raise InputError("the chat template marks nothing that the assistant says with {% generation %}")
        return ids, mask

    def _said(self, turn: Turn) -> _Said:
        """Tokenize a turn. Raises InputError for an end token inside it, because no rollout continues after one."""
        n, start, encoding = self._after_anchor(turn)
        ids = encoding.ids[n:]
        ends = [i for i, token in enumerate(ids) if token in self.end_ids]
        after = encoding.offsets[n + ends[0]][1] - start if ends else len(turn.said)
        if turn.said[after:].strip() and not self._is_closed(turn.said, after):
            raise InputError(
                f"the assistant says {self.token(ids[ends[0]])}, which ends a turn: no rollout goes on after it",
                "leave it out; the chat template writes it at the end",
            )
        marks = [1] * len(ids)
        if turn.spans is not None:
            marks = mark_spans(encoding, [(begin + start, end + start) for begin, end in turn.spans])[n:]
        if not ends:
            return _Said([*ids, self.eos_id], [*marks, 1], None, turn.whole)
        return _Said(ids[: ends[0] + 1], marks[: ends[0] + 1], turn.said[after:], turn.whole)

    def _after_anchor(self, turn: Turn) -> tuple[int, int, Encoding]:
        """Tokenize a turn after the end of its prompt; return that end's numbers of tokens and characters, and both.

        If the prompt's last token would merge with the turn's first, the turn is tokenized after a newline, so that a
        tokenizer that begins a text with a space puts none before it.
        """
        for anchor in (self._anchor(turn.prompt), "\n"):
            context, encoding = self._encoded(anchor), self._encoded(anchor + turn.said)
            n = len(context.ids)
            if encoding.ids[:n] == context.ids:
                return n, len(anchor), encoding
        return 0, 0, self._encoded(turn.said)

    def _is_closed(self, said: str, end: int) -> bool:
        """True if the text after the end of a turn is the one that the template writes there."""
        return self._closing is not None and said[end:] == self._turns.closing[len(self._closing) :]

    def _anchor(self, prompt: str) -> str:
        """End of a prompt from its last special token on, which is tokenized together with the answer."""
        tail = prompt[-_ANCHOR:]
        encoding, added = self._encoded(tail), self._tokenizer.get_added_tokens_decoder()
        starts = [at for token, (at, _) in zip(encoding.ids, encoding.offsets, strict=True) if token in added]
        return tail[starts[-1] :] if starts else tail[max(tail.rfind("\n"), 0) :]

    def _between(self, last: _Said | None, before: Messages, messages: Messages, turn: Turn, tools: Tools) -> list[int]:
        """Tokenize the text between the last turn and this one; for the first turn, the whole prompt."""
        if last is None:
            self._turns.check_written(before, messages, tools)
            return self.encode(turn.prompt)
        if turn.prompt.startswith(last.whole):
            self._turns.check_written(before, messages, tools, after=last.whole)
            end = self.token(last.ids[-1])
            ids = self.encode(end + (last.tail or "") + turn.prompt[len(last.whole) :])
            if ids[0] == last.ids[-1]:
                return ids[1:]
        text = self._continuation(messages)
        return self._after(text.removesuffix(turn.opened), ended=True)


def tokenizer_of_run(folder: Path, date: datetime.date | None) -> ChatTokenizer:
    """Open the tokenizer of a run. Raises ConfigError if the template writes the date and the run has none."""
    tokenizer = ChatTokenizer(folder, date)
    if date is None and tokenizer.writes_date:
        raise ConfigError(
            f"{folder}: the chat template writes the date, and the configuration has no run.date",
            "set run.date=YYYY-MM-DD, the same for every service",
        )
    return tokenizer
