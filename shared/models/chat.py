"""Chat text to tokens and back. Tokens of earlier turns are never computed again.

A conversation grows by appending. `render_prompt` returns the first tokens. After the model's sampled ids,
`continue_after` returns only the environment's new text and the header of the next assistant turn. A template that
changes earlier messages is found out by it (see `continuation`); the conversation is then rendered whole.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Collection, Sequence
from copy import copy
from itertools import takewhile
from pathlib import Path

from tokenizers import Encoding
from tokenizers.decoders import ByteLevel

from shared.errors import ConfigError, ContextExceeded, InputError
from shared.models.continuation import Continuation, ContinuationRenderer, HistoryChanged, changed, talks
from shared.models.templates import ChatTemplates, Messages, Tools, Variables, read_templates
from shared.models.tokenizer_files import read_tokenizer
from shared.models.turns import TurnRenderer


class ChatTokenizer:
    """Tokenizer and chat template of a Hugging Face folder.

    Attributes:
        vocab_size: largest id plus one, special tokens included; some ids below may be unused.
        eos_id: token with which the template closes an assistant's turn; `eos_token` if the template writes none.
        end_ids: all tokens that end an assistant's turn: `eos_id`, `eos_token`, and those of generation_config.json and
            config.json.
        pad_id: padding of rows: `pad_token`, or `eos_token` if none is named.
        templates, turns, continuations: what the chat template writes.
        closing: end of a turn's text up to `eos_id`; None if the template writes none.
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
        self._context, self._longest = sys.maxsize, 1
        if "eos_token" not in files.special:
            raise ConfigError(f"{folder}/tokenizer_config.json names no eos_token")
        self.templates = ChatTemplates(
            read_templates(folder, files.settings, optional=not needs_template), files.special, date
        )
        if unnamed := sorted(self.templates.names & files.unnamed):
            raise ConfigError(
                f"{folder}: the chat template reads {unnamed[0]}, which tokenizer_config.json does not name",
                f"the class of the tokenizer may have a default: write {unnamed[0]} there, or null for none",
            )
        self.turns = TurnRenderer(self.templates)
        self.continuations = ContinuationRenderer(self.templates, self.turns)
        if not self.turns.writes_text:
            raise ConfigError(
                f"{folder}: the chat template does not write the text of a message",
                "it may expect images and text in parts; give a template for text",
            )
        self.writes_date = self.templates.writes_date
        eos = self._tokenizer.token_to_id(files.special["eos_token"])
        declared = files.end_ids | {eos}
        self.eos_id, self.closing, self._ending = self._turn_end(declared, eos)
        self.end_ids = declared | {self.eos_id}
        self.pad_id = self._tokenizer.token_to_id(files.special.get("pad_token") or files.special["eos_token"])
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def _turn_end(self, declared: frozenset[int], eos: int) -> tuple[int, str | None, str]:
        """Find the token that closes a turn, the text up to its end, and what the template writes before the token.

        (eos, None) and all of the text if it writes none.
        """
        try:
            closing = self.turns.closing
        except InputError:  # the caller who renders a conversation sees it
            return eos, None, ""
        encoding = self.encoded(closing)
        places = [*zip(encoding.ids, encoding.offsets, strict=True)]
        special = {i for i, one in self._tokenizer.get_added_tokens_decoder().items() if one.special}
        first = next((n for n, (token, _) in enumerate(places) if token in special | declared), len(places))
        run = [*takewhile(lambda place: place[0] in special | declared, places[first:])]
        found = [*(place for place in run if place[0] in declared), *run[-1:]]
        ending = closing[: run[0][1][0] if run else None].strip()
        return (found[0][0], closing[: found[0][1][1]], ending) if found else (eos, None, ending)

    def encode(self, text: str) -> list[int]:
        """Tokenize `text`; special tokens in it are recognised, none is added.

        Raises InputError for half of a surrogate pair, which UTF-8 cannot encode, and ContextExceeded (see `within`).
        """
        return self.encoded(text).ids

    def within(self, context_length: int) -> ChatTokenizer:
        """Copy the tokenizer with a limit: longer texts than so many of its longest tokens raise ContextExceeded.

        They are refused before they are tokenized, which takes seconds for a text of some megabytes.
        """
        made = copy(self)
        made._context = context_length
        is_bytes = isinstance(self._tokenizer.decoder, ByteLevel)  # a character of its tokens stands for one byte
        names = self._tokenizer.get_vocab(with_added_tokens=True)
        made._longest = max(len(name) if is_bytes else len(name.encode()) for name in names)
        return made

    def encoded(self, text: str) -> Encoding:
        """Tokenize `text` as `encode` does; each token with its place."""
        if (n := len(text.encode(errors="replace"))) > self._context * self._longest:
            raise ContextExceeded.of(self._context, -(-n // self._longest))
        try:
            # `encode` would hold the interpreter's lock, and stop the other threads as long as it takes
            return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
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
        return self.encode(self.templates.render(messages, tools, prompt=header))

    def continue_after(
        self,
        sampled_ids: Sequence[int],
        messages: Messages,
        conversation: Messages | None = None,
        tools: Tools = (),
    ) -> list[int]:
        """Tokenize the text after a sampled assistant turn, which stays as it was sampled.

        If the turn lacks the end that the template writes, the end is added, even after another end token. A token that
        both ends a turn and begins the next one (GLM's `<|user|>`) is not repeated.

        Args:
            conversation: messages up to the sampled one; None if the text is the same after every conversation.

        Raises HistoryChanged if the template does not only append; the conversation then has to be rendered whole.
        """
        if conversation is None:
            found = self.continuations.after_any(messages)
        else:
            found = self.continuations.after_turn(conversation, messages, tools)
        ids = self.after(found, sampled_ids)
        repeated = self.closing is None and self.is_ended(sampled_ids) and ids[:1] == [sampled_ids[-1]]
        return ids[1:] if repeated else ids

    def looks_back(self, *, calls: bool = True) -> str | None:
        """Return how the template changes earlier messages when later ones are added; None if it only appends.

        Args:
            calls: also try conversations whose messages have `tool_calls`.
        """
        for messages, tools in talks(calls=calls):
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            for i, end in zip(turns, [*turns[1:], len(messages)], strict=True):
                try:
                    self.continue_after([self.eos_id], messages[i + 1 : end], messages[: i + 1], tools)
                except HistoryChanged as error:
                    return error.detail
                except (InputError, ConfigError):  # there are no such conversations
                    break
        return None

    def after(self, found: Continuation, sampled_ids: Sequence[int]) -> list[int]:
        """Tokenize the text after an assistant's turn, without the end of the turn if the turn has it."""
        if unsaid := self._ending or ("" if self._says(found.begun) else found.begun):
            raise changed(f"it writes {unsaid!r} beside an answer that does not say so")
        encoding, last = self.encoded(found.text), sampled_ids[-1] if sampled_ids else None
        if found.n_own is not None:
            places = enumerate(zip(encoding.ids, encoding.offsets, strict=True))
            ends = [i for i, (token, (_, end)) in places if token in self.end_ids and end <= found.n_own]
            return (
                encoding.ids[ends[0] + (encoding.ids[ends[0]] == last) :]
                if ends
                else self.encode(found.text[found.n_own :])
            )
        if last != self.eos_id or self.closing is None:
            return encoding.ids
        if not found.text.startswith(self.closing):
            raise HistoryChanged("the chat template ends an earlier answer otherwise than the last one")
        return encoding.ids[encoding.ids.index(self.eos_id) + 1 :]

    @property
    def added_ids(self) -> Collection[int]:
        """Tokens beside the vocabulary of the tokenizer's model, such as the special ones."""
        return self._tokenizer.get_added_tokens_decoder().keys()

    def _says(self, begun: str) -> bool:
        """True if an answer says this before its words: it has tokens for it, as for Harmony's channels."""
        added = self.added_ids
        return any(token in added for token in self.encoded(begun).ids)

    def with_variables(self, variables: Variables) -> ChatTokenizer:
        """Copy the tokenizer with more variables for its templates."""
        made = copy(self)
        made.templates = self.templates.with_variables(variables)
        made.turns = TurnRenderer(made.templates)
        made.continuations = ContinuationRenderer(made.templates, made.turns)
        return made


def tokenizer_of_run(folder: Path, date: datetime.date | None) -> ChatTokenizer:
    """Open the tokenizer of a run. Raises ConfigError if the template writes the date and the run has none."""
    tokenizer = ChatTokenizer(folder, date)
    if date is None and tokenizer.writes_date:
        raise ConfigError(
            f"{folder}: the chat template writes the date, and the configuration has no run.date",
            "set run.date=YYYY-MM-DD, the same for every service",
        )
    return tokenizer
