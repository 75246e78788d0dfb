"""Text after a sampled turn: the turn's end, the environment's messages, the next header, as the template writes them.

The template is rendered with a marker in place of the assistant's words, so that these are never rendered or tokenized
again. verl 0.9.1 has builders of its own for this, by `model_type`; for others it renders messages after a user's, and
so loses what the template writes between an assistant's turn and the next (SmolLM2's newline), or fails (Gemma 3).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_MARKER = "\u0001assistant\u0001"
_QUESTION = {"role": "user", "content": "?"}
_TAG = re.compile("</?think>")


class NotWritten(ValueError):
    """The chat template does not write an assistant's words, fails on the conversation, or changes earlier messages."""


class Continuation:
    """Continues sampled turns with one tokenizer and its chat template.

    Args:
        tokenizer: a fast tokenizer of transformers, with a chat template.
        end_ids: tokens that end a turn, of the tokenizer and the model.
        variables: further variables of the template.

    Attributes:
        eos_id: the token with which the template closes an assistant's turn.
        end_ids: `end_ids` and `eos_id`.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], variables: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._variables = tokenizer, dict(variables or {})
        self._appends = dict[tuple[str, ...], bool]()
        self.eos_id, self._closing, self._ending = self._turn_end(end_ids)
        self.end_ids = frozenset({*end_ids, self.eos_id})

    def after(self, sampled: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokenize what follows a sampled turn. A turn without the end that the template writes gets it.

        A token that both ends a turn and begins the next one (GLM's `<|user|>`) is not repeated. Raises NotWritten.
        """
        text = self._render(messages, prompt=True)
        self._check_written(messages)
        self._check_appends(messages)
        ids = self._encode(text)["input_ids"]
        last = sampled[-1] if len(sampled) else None
        if self._closing is None:
            return ids[1:] if last in self.end_ids and ids[:1] == [last] else ids
        if last == self.eos_id and text.startswith(self._closing):
            return ids[ids.index(self.eos_id) + 1 :]
        return ids

    def _check_appends(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise NotWritten if the template writes earlier messages otherwise once there are later ones.

        An episode of verl is one sequence, so a conversation that is written anew has no place in it.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._appends:
            self._appends[roles] = self._is_kept(messages)
        if not self._appends[roles]:
            raise NotWritten(
                "the chat template changes earlier messages when later ones are added: train on one answer"
            )

    def _is_kept(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """True if a conversation with these messages after two long answers begins as its parts."""
        said = {"role": "assistant", "content": _MARKER + "word " * 2000 + _MARKER}
        if self._ending:
            return False
        parts = [[_QUESTION], [_QUESTION, said, *messages], [_QUESTION, said, *messages, said, *messages]]
        asked, ended = ([self._text(part, prompt=prompt) for part in parts] for prompt in (True, False))
        starts = [_common(*texts) for texts in zip(asked, ended, strict=True)]
        tails = [text.rpartition(_MARKER)[2] for text in asked[1:]]
        whole = asked[-1]
        begun = [_begun(asked[0], text) for text in (self._text([_QUESTION, said], prompt=False), whole)]
        if begun[1] and (not self._says(begun[1]) or begun[0] not in ("", begun[1])):
            return False
        return all(map(whole.startswith, starts)) and whole.count(said["content"]) == 2 and tails[0] == tails[1]

    def _says(self, begun: str) -> bool:
        """True if an answer says this before its words: it has tokens for it, as for Harmony's channels."""
        return any(token in self._tokenizer.added_tokens_decoder for token in self._encode(begun)["input_ids"])

    def _text(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [*map(dict, messages)], tokenize=False, add_generation_prompt=prompt, **self._variables
            )
        except Exception as error:
            raise NotWritten(f"the chat template fails on the environment's messages: {error}") from error

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        text = self._text([_QUESTION, {"role": "assistant", "content": _MARKER}, *messages], prompt=prompt)
        _, found, after = text.partition(_MARKER)
        if not found:
            raise NotWritten("the chat template does not write an assistant's words")
        return after

    def _check_written(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise NotWritten naming the role of a message that the template leaves out."""
        probed = [{**message, "content": f"probe{i}end"} for i, message in enumerate(messages)]
        try:
            text = self._render(probed, prompt=True).lower()
        except NotWritten:  # the template reads the texts of messages
            return
        for message in probed:
            if message["content"] not in text:
                raise NotWritten(f"the chat template leaves out the environment's messages of role {message['role']}")

    def _turn_end(self, declared: Collection[int]) -> tuple[int, str | None, str]:
        """Find the token that closes a turn, the text up to its end, and what the template writes before the token.

        The text is None if it writes none.
        """
        text = self._render((), prompt=False)
        encoded = self._encode(text, return_offsets_mapping=True)
        added = self._tokenizer.added_tokens_decoder
        ends = {*declared, *(token for token, one in added.items() if one.special)}
        places = list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))
        first = next((n for n, (token, _) in enumerate(places) if token in ends), len(places))
        last = next((n for n in range(first, len(places)) if places[n][0] not in ends), len(places))
        run = places[first:last]
        found = [place for place in run if place[0] in declared] or run[-1:]
        ending = text[: run[0][1][0] if run else None].strip()
        if not found:
            return int(self._tokenizer.eos_token_id), None, ending
        return found[0][0], text[: found[0][1][1]], ending

    def _encode(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, add_special_tokens=False, **options)


def _begun(prompt: str, text: str) -> str:
    """Return the text between the prompt and the words, apart from the tags of reasoning."""
    prompt, text = (_TAG.sub("", one) for one in (prompt, text))
    return text[len(_common(prompt, text)) :].partition(_MARKER)[0].strip()


def _common(one: str, other: str) -> str:
    """Longest common beginning of two texts."""
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:n]
