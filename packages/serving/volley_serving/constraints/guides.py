"""Constraints on which tokens a request may sample: grammars, forbidden stops, biases and penalties.

They change the draw alone. The recorded log-probability is that of the model's own distribution, as with top-p and
top-k, because a trainer computes that one again.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from services.rollout.engines.sglang_jax.link import Message
from shared.errors import InputError, VolleyError
from volley_serving.constraints.grammar_trial import CPU_S, compiles_in_time

_MAKERS = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}
_NAMES = {"json_schema": "json_schema", "regex": "regex", "lark": "JSON schema of the format or of a tool"}
_CACHED = 64
_MAX_GRAMMAR = 100_000


class Guide:
    """Constraints of one request. `stops` end it; `matcher` holds the state of its grammar, if it has one."""

    def __init__(self, message: Message, stops: set[int], matcher: Any) -> None:
        self._stops = stops
        self._least: int = message["min_new_tokens"]
        self._frequency: float = message["frequency_penalty"]
        self._presence: float = message["presence_penalty"]
        self._bias = {int(token): float(bias) for token, bias in message["logit_bias"]}
        self._counts: Counter[int] = Counter()
        self._matcher = matcher
        self._n = 0

    def biases(self) -> dict[int, float]:
        """Return what to add to the logits of the next token, by token."""
        found = dict(self._bias)
        if self._frequency or self._presence:
            for token, count in self._counts.items():
                found[token] = found.get(token, 0.0) - self._frequency * count - self._presence
        if self._n < self._least and not (self._matcher is not None and self._matcher.is_stopped()):
            found |= dict.fromkeys(self._stops, -np.inf)
        return found

    def mask(self) -> np.ndarray | None:
        """Return which tokens the grammar allows next, one bit each: uint32[words]; None without a grammar."""
        if self._matcher is None:
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_accepting():
            mask = mask.copy()
            for stop in self._stops:
                mask[stop // 32] |= np.uint32(1 << stop % 32)
        return mask

    def accept(self, tokens: Sequence[int]) -> str:
        """Advance by sampled tokens. Returns an error of the grammar, or an empty string."""
        self._n += len(tokens)
        if self._frequency or self._presence:
            self._counts.update(tokens)
        if self._matcher is None:
            return ""
        self._matcher.consume_tokens([token for token in tokens if token not in self._stops])
        return _one_line(self._matcher.get_error())


def guide_of(message: Message, stops: set[int], matcher: Any) -> Guide | None:
    """Return the constraints that a request asks for; None for none."""
    asked = ("min_new_tokens", "frequency_penalty", "presence_penalty", "logit_bias")
    return Guide(message, stops, matcher) if matcher is not None or any(message[name] for name in asked) else None


class Grammars:
    """Compiles grammars in threads of its own, so that steps go on meanwhile.

    Args:
        tokenizer: the model's tokenizer.json; None refuses every grammar.
        eos_token: a token that ends an answer.
    """

    def __init__(self, tokenizer: str | None, vocab_size: int, eos_token: int | None) -> None:
        self._file, self._vocab_size, self._eos = tokenizer, vocab_size, eos_token
        self._tokenizer: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, "grammar")

    def compile(self, grammar: Message, done: Callable[[Any, VolleyError | None], None]) -> None:
        """Compile in a thread, which calls `done` with a matcher at its start, or with the error."""

        def work() -> None:
            try:
                matcher = self.matcher(grammar["kind"], grammar["text"])
            except Exception as error:  # noqa: BLE001 - whatever fails here concerns this request, not the engine
                cause = error if isinstance(error, VolleyError) else InputError(f"the grammar cannot be used: {error}")
                done(None, cause)
            else:
                done(matcher, None)

        self._threads.submit(work)

    def matcher(self, kind: str, text: str) -> Any:
        """Return a matcher at its start. Raises InputError for a grammar that cannot be compiled."""
        if self._file is None or not Path(self._file).is_file():
            raise InputError(
                "grammars need a tokenizer.json, which this model's folder does not have",
                "remove the grammar from the request",
            )
        if len(text) > _MAX_GRAMMAR:
            raise InputError(f"the {kind} has {len(text)} characters, but at most {_MAX_GRAMMAR} are allowed")
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._file, n_vocab=self._vocab_size, eos_token=self._eos)
            found = self._compiled.pop((kind, text), None)
        found = found or self._compile(kind, text)
        with self._lock:
            self._compiled[kind, text] = found
            while len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
            return found.deep_copy()

    def _compile(self, kind: str, text: str) -> Any:
        try:
            grammar = _MAKERS[kind](text)
            if not compiles_in_time(grammar):
                raise InputError(
                    f"the {_NAMES[kind]} takes more than {CPU_S} s or 2 GiB to compile", "use a simpler one"
                )
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # finds that nothing can match
        except ValueError as error:
            raise InputError(f"the {_NAMES[kind]} cannot be compiled: {error}") from error
        if matcher.is_error():
            raise InputError(f"the {_NAMES[kind]} cannot be compiled: {_one_line(matcher.get_error())}")
        return matcher


def _one_line(error: str) -> str:
    """Shorten an error of llguidance, without the parser's state."""
    said = " ".join(error.partition("<state>")[0].split())[:300]
    return "no text matches it" if said.startswith("NoExtension") else said
