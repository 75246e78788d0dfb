"""The real engine's constraints on what is sampled: grammars, least lengths, penalties, biases."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer

from services.rollout.engines.base import Engine, GenerateRequest, GenerateResult, Grammar
from services.rollout.engines.base import SamplingParams as Sampling
from shared.errors import InputError
from tests.rollout.conftest import CONFIG, WEIGHTS
from tests.support import decoder_reference
from tests.support.tokenizer import FOLDER

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a random model never stops writing spaces
}
pytestmark = pytest.mark.asyncio(loop_scope="session")


def request(rid: str, prompt: list[int], n: int = 60, **sampling: Any) -> GenerateRequest:
    params = {"temperature": 1.0, "sampling_seed": 7} | sampling
    return GenerateRequest(rid, np.array(prompt, np.int32), Sampling(max_new_tokens=n, **params))


def text_of(result: GenerateResult) -> str:
    """The answer without its end token."""
    assert result.output_ids[-1] == EOS
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json")).decode(result.output_ids[:-1].tolist())


def error(asked: GenerateRequest, result: GenerateResult) -> float:
    """Largest |log p - reference| of the model's own distribution."""
    prompt, ids = asked.input_ids.tolist(), result.output_ids.tolist()
    expected = decoder_reference.score(WEIGHTS, CONFIG, prompt, ids, temperature=asked.sampling.temperature or 1.0)
    return float(np.abs(expected - result.logprobs).max())


async def test_answers_match_their_grammars(engine: Engine, prompts: list[list[int]]) -> None:
    """Beside a request without a grammar, whose tokens are those it samples alone."""
    schema, regex = Grammar("json_schema", orjson.dumps(SCHEMA).decode()), Grammar("regex", "(ab|c){3,5}x?")
    free = request("free", prompts[3], 20, ignore_eos=True)
    alone = await engine.generate(free)
    asked = [
        request("a", prompts[0], grammar=schema),
        request("b", prompts[1], grammar=schema, ignore_eos=True, temperature=0.0),
        request("c", prompts[2], grammar=regex, top_p=0.9),
    ]
    *guided, beside = await asyncio.gather(*map(engine.generate, [*asked, free]))
    for result in guided[:2]:
        found = orjson.loads(text_of(result))
        assert (type(found["ok"]), type(found["n"]), len(found)) == (bool, int, 2)
        assert 0 <= found["n"] <= 99
    assert re.fullmatch("(ab|c){3,5}x?", text_of(guided[2]))
    assert {result.finish.type for result in guided} == {"stop"}
    assert beside.output_ids.tolist() == alone.output_ids.tolist()
    assert max(map(error, [*asked, free], [*guided, beside])) <= 1e-4


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "["), Grammar("json_schema", '{"type": "objct"}'), Grammar("json_schema", "{"),
     Grammar("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
     Grammar("regex", "a" * 200_000)],
)  # fmt: skip
async def test_a_grammar_that_cannot_be_compiled_is_refused(
    engine: Engine, prompts: list[list[int]], grammar: Grammar
) -> None:
    with pytest.raises(InputError, match=grammar.kind):
        await engine.generate(request("a", prompts[0], grammar=grammar))
    assert len((await engine.generate(request("a", prompts[0], 3, ignore_eos=True))).output_ids) == 3


async def test_a_grammar_that_takes_hours_to_compile_is_refused(engine: Engine, prompts: list[list[int]]) -> None:
    """Twenty intersections, which the compiler's own limits do not count."""
    hours = "start: A\nA: " + " & ".join(f"/(.{{{i}}})*/" for i in range(2, 22))
    async with asyncio.timeout(60):
        with pytest.raises(InputError, match="to compile"):
            await engine.generate(request("bad", prompts[0], grammar=Grammar("lark", hours)))


async def test_a_request_is_cancelled_while_its_grammar_compiles(engine: Engine, prompts: list[list[int]]) -> None:
    grammar = Grammar("regex", "[a-z]{1,2000}x[0-9]{1,2000}")
    running = asyncio.ensure_future(engine.generate(request("a", prompts[0], grammar=grammar)))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    result = await engine.generate(request("a", prompts[0], 5, grammar=grammar))
    assert (result.finish.type, len(result.output_ids)) == ("length", 5)
    assert (await engine.status()).running == 0


async def test_an_answer_does_not_end_before_its_least_length(engine: Engine, prompts: list[list[int]]) -> None:
    ends = request("a", prompts[0], 12, temperature=0.0, logit_bias=((EOS, 100.0),))
    assert (await engine.generate(ends)).output_ids.tolist() == [EOS]
    result = await engine.generate(
        request("a", prompts[0], 12, temperature=0.0, logit_bias=((EOS, 100.0),), min_new_tokens=5)
    )
    assert (len(result.output_ids), result.output_ids[-1]) == (6, EOS)
    assert EOS not in result.output_ids[:-1]


async def test_penalties_are_those_of_a_float64_reference(engine: Engine, prompts: list[list[int]]) -> None:
    """Greedy answers; the bias makes the penalties matter."""
    bias = tuple((token, 6.0) for token in range(20, 24))
    for frequency, presence in ((0.0, 1.5), (0.9, -0.4)):
        params = {"frequency_penalty": frequency, "presence_penalty": presence, "logit_bias": bias}
        asked = request("a", prompts[0], 16, temperature=0.0, ignore_eos=True, **params)
        result = await engine.generate(asked)
        assert result.output_ids.tolist() == greedy(prompts[0], 16, frequency, presence, dict(bias))
        assert error(asked, result) <= 1e-4


def greedy(prompt: list[int], n: int, frequency: float, presence: float, bias: dict[int, float]) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        logits = decoder_reference.logits(WEIGHTS, CONFIG, ids)[-1].copy()
        counts = np.bincount(ids[len(prompt) :], minlength=len(logits))
        for token, value in bias.items():
            logits[token] += value
        ids.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
    return ids[len(prompt) :]


async def test_the_next_step_is_launched_before_the_results_are_known(engine: Engine, prompts: list[list[int]]) -> None:
    """A stop token costs one step more, unless constraints of the next step depend on it; a known length does not."""

    async def run(rid: str, **sampling: Any) -> tuple[list[int], int]:
        before = (await engine.status()).steps["decode"]
        result = await engine.generate(request(rid, prompts[4], 12, ignore_eos=True, **sampling))
        return result.output_ids.tolist(), (await engine.status()).steps["decode"] - before

    free, n_free = await run("free")
    at, stop = next((i, token) for i, token in enumerate(free) if i >= 3 and token not in free[:i])
    stopped, n_stopped = await run("stopped", stop_token_ids=(stop,))
    guided, n_guided = await run("guided", stop_token_ids=(stop,), min_new_tokens=1)
    assert (stopped, guided) == (free[: at + 1], free[: at + 1])
    assert (n_free, n_stopped, n_guided) == (11, at + 1, at)
