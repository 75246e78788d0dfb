"""The wire format of groups against JSON (orjson) of the same group, and against a plain copy of its arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from shared.types import Group, Trajectory, Turn, VersionSpan
from tools.bench.result import BenchResult, emit, seconds_per_call

N_SIBLINGS, N_TOKENS, PROMPT = 8, 32_768, 1_024


def main() -> None:
    group = make_group(np.random.default_rng(0))
    data, record = group.encode(), as_json(group)
    text, arrays = orjson.dumps(record), [a for t in group.trajectories for a in (t.token_ids, t.logprobs, t.loss_mask)]
    n_tokens, copy_s = N_SIBLINGS * N_TOKENS, seconds_per_call(lambda: b"".join(a.tobytes() for a in arrays))
    encode_s, decode_s = seconds_per_call(group.encode), seconds_per_call(lambda: Group.decode(data))
    json_encode_s, json_decode_s = (
        seconds_per_call(lambda: orjson.dumps(as_json(group))),
        seconds_per_call(lambda: orjson.loads(text)),
    )
    rate = n_tokens / 1e6
    emit(
        {
            "codec_size_vs_json": BenchResult(len(data) / n_tokens, "B/token", len(text) / n_tokens),
            "codec_encode_vs_json": BenchResult(rate / encode_s, "M token/s", rate / json_encode_s),
            "codec_decode_vs_json": BenchResult(rate / decode_s, "M token/s", rate / json_decode_s),
            "codec_encode_vs_copy": BenchResult(len(data) / encode_s / 1e9, "GB/s", len(data) / copy_s / 1e9),
        }
    )


def make_group(rng: np.random.Generator) -> Group:
    """Eight siblings of 32,768 tokens, of which all but 1,024 are sampled."""
    return Group(
        1, "bench", "bench/0", tuple(_trajectory(rng, sample_index) for sample_index in range(N_SIBLINGS)), None
    )


def _trajectory(rng: np.random.Generator, sample_index: int) -> Trajectory:
    mask = np.ones(N_TOKENS, np.uint8)
    mask[:PROMPT] = 0
    return Trajectory(
        ticket=1,
        sample_index=sample_index,
        attempt=0,
        env="bench",
        task="bench/0",
        prompt_len=PROMPT,
        token_ids=rng.integers(0, 150_000, N_TOKENS, np.int32),
        loss_mask=mask,
        logprobs=-rng.random(N_TOKENS, np.float32) * mask,
        versions=(VersionSpan("e000001-s000000", PROMPT, N_TOKENS),),
        turns=(Turn(0, PROMPT, "user"), Turn(PROMPT, N_TOKENS, "assistant", 1.0)),
        reward=1.0,
        reward_components={"answer": 1.0},
        success=True,
        status="completed",
        timings={"total_s": 1.0},
    )


def as_json(group: Group) -> list[dict[str, Any]]:
    return [
        {"token_ids": t.token_ids.tolist(), "logprobs": t.logprobs.tolist(), "loss_mask": t.loss_mask.tolist()}
        for t in group.trajectories
    ]


if __name__ == "__main__":
    main()
