"""Requests in the engine's process, made from messages and turned back into messages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from sgl_jax.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sgl_jax.srt.sampling.sampling_params import SamplingParams as EngineSampling

from services.rollout.engines.sglang_jax.link import Message
from services.rollout.engines.sglang_jax.scheduling.inputs import SamplingRows
from services.rollout.engines.sglang_jax.scheduling.routing import RoutingPool
from services.rollout.engines.sglang_jax.scheduling.step import StepOutput
from shared.routing import to_wire

_ALL = np.iinfo(np.int32).max
_WORD = 0xFFFFFFFF


type GuideOf = Callable[[Message, set[int], Any], Any]
"""Makes a request's constraints (`volley_serving.constraints.guides.Guide`) of its message, the tokens that end it and
the matcher of its grammar; None if it asks for none.
"""


def no_guide(_message: Message, _stops: set[int], _matcher: Any) -> None:
    """Return no constraints: no package brings them, and none are asked for (`EngineInfo.options`)."""


class RolloutReq(Req):
    """sglang-jax's request, with its seed and the versions of its tokens.

    Invariant: `spans` [version, count] sum to the number of output tokens after every step. The key under which its
    prefix is cached names the weight version, so no request ever reads keys and values of other weights.
    """

    def __init__(
        self, message: Message, model_config: Any, version: str, matcher: Any = None, guide_of: GuideOf = no_guide
    ) -> None:
        ignore_eos, stops = message["ignore_eos"] and matcher is None, message["stop_token_ids"]
        sampling = EngineSampling(
            max_new_tokens=message["max_new_tokens"],
            stop_token_ids=stops,
            ignore_eos=ignore_eos and not stops,  # the engine's own flag ignores stop_token_ids as well
            temperature=1.0,
        )
        super().__init__(
            message["rid"],
            "",
            message["input_ids"].tolist(),
            sampling,
            return_output_logprob_only=True,
            dp_rank=0,
            eos_token_ids=None if ignore_eos else model_config.hf_eos_token_id,
            vocab_size=model_config.vocab_size,
            extra_key=version,
        )
        # Never None: log-probabilities are always returned.
        self.output_token_logprobs_val: list[float] = []  # pyrefly: ignore[bad-override-mutable-attribute]
        seed = message["sampling_seed"]
        seed = secrets.randbits(64) if seed is None else seed
        self.seed = (seed >> 32 & _WORD, seed & _WORD)
        self.guide = guide_of(message, {*stops, *(() if ignore_eos else model_config.hf_eos_token_id or ())}, matcher)
        self.min_p: float = message["min_p"]
        self.temperature: float = message["temperature"]
        self.top_p: float = message["top_p"]
        self.top_k: int = message["top_k"] if message["top_k"] > 0 else _ALL
        self.streamed: bool = message["streamed"]
        self.n_top: int = message["top_logprobs"]
        self._top: list[tuple[np.ndarray, np.ndarray]] = []
        self._sampled_top: tuple[np.ndarray, np.ndarray] | None = None
        self.prompt: bytes = message["input_ids"].tobytes()
        self.may_follow = True
        """True until it has waited for another request to compute the same prompt."""
        self.spans: list[tuple[str, int]] = []
        self._labelled = 0
        self._times = [time.monotonic()]
        """When it arrived, when its first step was launched, and when that had sampled its first token."""
        self._routed_to: int | None = message["routed_from"]
        """The first position whose experts are wanted and not known."""
        self._routed: list[np.ndarray] = []

    def ends_with_next(self) -> bool:
        """Return whether the next token certainly is the last."""
        return self.to_finish is not None or len(self.output_ids) + 1 >= self.sampling_params.max_new_tokens

    def fill_row(self, rows: SamplingRows, i: int, *, unknown: bool) -> None:
        """Fill its row of a step; `unknown`: the step before samples a token that `output_ids` does not hold yet."""
        if len(self._times) == 1:
            self._times.append(time.monotonic())
        rows.temperature_B[i], rows.top_p_B[i], rows.top_k_B[i] = self.temperature, self.top_p, self.top_k
        rows.seed_B2[i], rows.index_B[i] = self.seed, len(self.output_ids) + unknown
        rows.min_p_B[i] = self.min_p
        rows.with_top |= self.n_top > 0
        if self.guide is not None:
            rows.guide(i, self.guide.biases(), self.guide.mask())

    def keep_top(self, output: StepOutput[np.ndarray], i: int) -> None:
        """Remember the most likely tokens of the step that samples the next token, row i, if they are wanted."""
        if self.n_top and output.top_ids_BN is not None and output.top_logprobs_BN is not None:
            self._sampled_top = output.top_ids_BN[i, : self.n_top], output.top_logprobs_BN[i, : self.n_top]

    def label(self, version: str) -> int:
        """Label the token since the last call, if there is one, with `version`. Returns their number."""
        new = len(self.output_ids) - self._labelled
        if not new:
            return 0
        self._labelled += new
        if len(self._times) == 2:
            self._times.append(time.monotonic())
        if self.guide is not None and (error := self.guide.accept(self.output_ids[-new:])) and not self.finished():
            self.to_finish = FINISH_ABORT(f"the grammar cannot be followed: {error}")
        if self._sampled_top is not None:
            self._top.append(self._sampled_top)
            self._sampled_top = None
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + new)
        else:
            self.spans.append((version, new))
        return new

    def route(self, pool: RoutingPool, slots: np.ndarray) -> None:
        """Store the experts of its positions, in `slots` int [n], if they are wanted and not stored yet.

        Positions that later weights compute again keep their first experts.
        """
        if self._routed_to is not None and self._routed_to < len(slots):
            self._routed.append(pool.of(slots[self._routed_to :]))
            self._routed_to = len(slots)

    def new(self, n: int, version: str) -> Message:
        """Build the message of the last n tokens."""
        return _top(self._top[-n:]) | {
            "rid": self.rid,
            "output_ids": np.array(self.output_ids[-n:], np.int32),
            "logprobs": np.array(self.output_token_logprobs_val[-n:], np.float32),
            "version": version,
        }

    def result(self) -> Message:
        routed = {"routed_experts": to_wire(np.concatenate(self._routed))} if self._routed else {}
        return (
            routed
            | _top(self._top)
            | {
                "rid": self.rid,
                "output_ids": np.array(self.output_ids, np.int32),
                "logprobs": np.array(self.output_token_logprobs_val, np.float32),
                "finish": _finish(self.finished_reason),
                "spans": self.spans,
                "prompt_tokens": len(self.origin_input_ids),
                "cached_tokens": self.cached_tokens,
                "waited": [after - before for before, after in pairwise(self._times)],
            }
        )


def _top(rows: list[tuple[np.ndarray, np.ndarray]]) -> Message:
    if not rows:
        return {}
    return {
        "top_ids": np.concatenate([ids for ids, _ in rows]),
        "top_logprobs": np.concatenate([logprobs for _, logprobs in rows]),
    }


def _finish(reason: Any) -> Message:
    if isinstance(reason, FINISH_ABORT):
        return {"type": "abort", "message": str(reason.message)}
    if isinstance(reason, FINISH_LENGTH):
        return {"type": "length", "length": reason.length}
    return {"type": "stop", "matched": getattr(reason, "matched", None)}


def dropped(rid: str) -> Message:
    """Build the result of a request that sglang-jax dropped without its tokens."""
    nothing = {"output_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32), "spans": []}
    finish = {"type": "abort", "message": "ended before its prompt was processed"}
    return {"rid": rid, **nothing, "finish": finish, "prompt_tokens": 0, "cached_tokens": 0}
