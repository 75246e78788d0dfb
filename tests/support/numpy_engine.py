"""An inference server's engine in numpy: it samples from a real model in float64, and pauses, aborts and reloads as
SGLang and vLLM do. Faults are set from outside.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from tests.support.decoder_reference import log_softmax, logits


class Drawn(NamedTuple):
    """A sampled token with its log-probability, its weight version, and the most likely tokens."""

    token: int
    logprob: float
    version: str
    top: list[tuple[int, float]]


@dataclass
class NumpyEngine:
    """Args:
    folder: the model that the server was started with.
    hold_at: number of tokens after which a request waits until this is None, or the request is aborted.
    refuse_loads: loads to refuse; each leaves half of the new tensors behind, as a real one that fails in between.
    load_s: how long a load takes.
    stay: acknowledges loads, and keeps its arrays.
    """

    folder: Path
    hold_at: int | None = None
    refuse_loads: int = 0
    load_s: float = 0.0
    stay: bool = False
    version: str = "default"
    n_loads: int = 0
    n_flushes: int = 0
    aborted: set[str] = field(default_factory=set[str])
    running: set[str] = field(default_factory=set[str])
    held: set[str] = field(default_factory=set[str])
    pauses: list[str] = field(default_factory=list[str])
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self.weights = load_file(self.folder / "model.safetensors")
        self._open.set()

    def table(self, ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """float64 [n, V]: log-probabilities of the token after each position."""
        return log_softmax(logits(self.weights, self.config, ids), temperature or 1.0)

    async def sample(
        self, name: str, ids: list[int], n: int, temperature: float, seed: int | None, stops: set[int], k: int
    ) -> AsyncIterator[Drawn]:
        """Yield tokens until a stop, the limit or an abort."""
        self.running.add(name)
        held, draws = list(ids), np.random.default_rng(seed)
        try:
            for i in range(n):
                await asyncio.sleep(0)
                while self.hold_at == i and name not in self.aborted:
                    self.held.add(name)
                    await asyncio.sleep(0.002)
                await self._open.wait()
                if name in self.aborted:
                    return
                row = self.table(held, temperature)[-1]
                token = int(row.argmax()) if not temperature else int(draws.choice(len(row), p=np.exp(row)))
                best = np.argsort(-row)[:k].tolist()
                held.append(token)
                yield Drawn(token, float(row[token]), self.version, [(one, float(row[one])) for one in best])
                if token in stops:
                    return
        finally:
            for names in (self.running, self.held, self.aborted):
                names.discard(name)

    async def pause(self, mode: str) -> None:
        self.pauses.append(mode)
        if mode == "abort":
            self.aborted |= self.running
            while self.running:
                await asyncio.sleep(0.002)
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def load(self, folder: str) -> str | None:
        """Load the tensors of a folder; return the reason of a failure."""
        await asyncio.sleep(self.load_s)
        try:
            found = load_file(Path(folder) / "model.safetensors")
        except Exception as error:  # noqa: BLE001 - whatever safetensors raises
            return f"Failed to get weights iterator: {error}."
        self.n_loads += 1
        if self.refuse_loads:
            self.refuse_loads -= 1
            half = sorted(found)[: len(found) // 2]
            self.weights = {**self.weights, **{name: found[name] for name in half}}
            return "Failed to update weights: out of memory."
        if not self.stay:
            self.weights = found
        return None


def spans(drawn: list[Drawn]) -> list[dict[str, Any]]:
    """Contiguous spans of versions, as both servers name them."""
    found: list[dict[str, Any]] = []
    for at, one in enumerate(drawn):
        if found and found[-1]["version"] == one.version:
            found[-1]["end"] = at + 1
        else:
            found.append({"version": one.version, "start": at, "end": at + 1})
    return found
