"""Receiver of the tokens that a server samples for one request."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.rollout.engines.base import NewTokens, OnTokens, TopTokens


class Receiver:
    """Passes new tokens on; while weights change they are kept back. The result says which version sampled each."""

    def __init__(
        self, on_tokens: OnTokens, version: Callable[[], str | None], check: Callable[[np.ndarray], None]
    ) -> None:
        self._on_tokens, self._version, self._check = on_tokens, version, check
        self._waiting = list[NewTokens]()

    def __call__(self, ids: np.ndarray, logprobs: np.ndarray, top: TopTokens | None) -> None:
        self._check(ids)
        version = self._version()
        self._waiting.append(NewTokens(ids, logprobs, top, version or ""))
        if version is not None:
            self.finish()

    def finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        for tokens in waiting:
            self._on_tokens(tokens)
