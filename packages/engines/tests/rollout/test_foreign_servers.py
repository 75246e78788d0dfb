"""Rollout servers in front of SGLang's and vLLM's servers: exact tokens, weights, restarts and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from packages.engines.tests.rollout.support import (
    CONFIG,
    PROMPT,
    V1,
    V2,
    V3,
    Foreign,
    Kind,
    asking,
    committed,
    each_kind,
    in_front,
    running,
    same_for_each,
    weights,
)
from services.rollout.app import open_rollout
from services.rollout.engines.base import GenerateResult, NewTokens
from services.rollout.settings import from_config
from services.rollout.weights import updater
from shared.config import validate
from shared.errors import ConfigError, Conflict, EngineDied, Unavailable, VolleyError, WeightsError
from shared.process.ports import free_port
from shared.types import VersionSpan
from tests.support import models
from tests.support.decoder_reference import score
from tests.support.models import Probe
from volley_engines import engine as http_engine
from volley_engines.engine import HttpEngine


@each_kind
async def test_tokens_are_exact_and_have_the_log_probabilities_of_the_committed_weights(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await engine.stage(staged := weights(tmp_path, V1, 1))
        live = (await engine.commit(V1, "retract")).live
        assert staged.probe_logprobs is not None
        assert live.logprobs == pytest.approx(staged.probe_logprobs, abs=1e-5)
        answer = await engine.generate(replace(asking(ignore_eos=True, sampling_seed=2**64 - 1), top_logprobs=3))
        expected = score(models.random_weights(CONFIG, 1), CONFIG, PROMPT.tolist(), answer.output_ids.tolist())
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)
        assert answer.versions == (VersionSpan(V1, 0, 8),)
        assert (answer.finish.type, answer.finish.length, answer.prompt_tokens) == ("length", 8, 3)
        assert answer.top is not None
        assert answer.top.ids.shape == (8, 3)
        assert (answer.top.logprobs[:, 0] >= answer.logprobs - 1e-6).all()
        scored = await engine.score(np.concatenate([PROMPT, answer.output_ids]), 2)
        assert scored.logprobs[2:] == pytest.approx(answer.logprobs, abs=1e-5)
        assert scored.top is not None
        assert scored.top.ids.shape == (10, 2)


@each_kind
async def test_a_stream_gives_the_same_tokens_one_by_one(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        seen = list[NewTokens]()
        streamed = await engine.generate(replace(asking(), top_logprobs=2), seen.append)
        whole = await engine.generate(replace(asking(), top_logprobs=2))
        assert len(seen) > 1
        for answer in (whole.output_ids, np.concatenate([one.output_ids for one in seen])):
            assert answer.tolist() == streamed.output_ids.tolist()
        assert np.concatenate([one.logprobs for one in seen]) == pytest.approx(whole.logprobs)
        assert streamed.versions == whole.versions


@same_for_each
async def test_stop_tokens_end_an_answer_and_are_part_of_it(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        free = await engine.generate(asking(ignore_eos=True))
        stop = int(free.output_ids[3])
        ended = await engine.generate(asking(stop_token_ids=(stop,)))
        n = free.output_ids.tolist().index(stop) + 1
        assert ended.output_ids.tolist() == free.output_ids[:n].tolist()
        assert (ended.finish.type, ended.finish.matched) == ("stop", stop)


@each_kind
async def test_running_requests_go_on_with_new_weights_and_each_token_names_its_own(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        await engine.stage(weights(tmp_path, V2, 2))
        asked = await held(foreign, engine, 7)
        assert (await engine.commit(V2, "retract")).continued == 1
        foreign.engine.hold_at = None
        answer = await asked
        first, second = answer.versions
        assert (first, second) == (VersionSpan(V1, 0, 7), VersionSpan(V2, 7, 40))
        expected = score(models.random_weights(CONFIG, 2), CONFIG, PROMPT.tolist(), answer.output_ids.tolist())
        assert answer.logprobs[second.start :] == pytest.approx(expected[second.start :], abs=1e-5)


@same_for_each
async def test_an_abort_keeps_the_tokens_that_were_sampled(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        asked = await held(foreign, engine, 7)
        assert (await engine.abort("other"), await engine.abort("a")) == (0, 1)
        answer = await asked
        assert (answer.finish.type, len(answer.output_ids)) == ("abort", 7)
        cancelled = await held(foreign, engine, 7)
        cancelled.cancel()
        with suppress(asyncio.CancelledError):
            await cancelled
        await until(lambda: not foreign.engine.running)


@same_for_each
async def test_an_answer_with_fewer_log_probabilities_than_tokens_is_refused(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        foreign.faults.short_logprobs = True
        with pytest.raises(Unavailable):
            await engine.generate(asking())
        foreign.faults.short_logprobs = False
        assert len((await engine.generate(asking())).output_ids)


@each_kind
async def test_a_refused_load_leaves_the_weights_before_serving(tmp_path: Path, kind: Kind):
    """The server leaves mixed weights behind: those before are loaded again."""
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        foreign.engine.refuse_loads = 1
        await engine.stage(weights(tmp_path, V2, 2))
        with pytest.raises(WeightsError):
            await engine.commit(V2, "retract")
        assert (await engine.audit()).version == V1
        answer = await engine.generate(asking())
        expected = score(models.random_weights(CONFIG, 1), CONFIG, PROMPT.tolist(), answer.output_ids.tolist())
        assert answer.versions[0].version == V1
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)
        with pytest.raises(Conflict):
            await engine.commit(V3, "retract")


@same_for_each
async def test_nothing_is_answered_while_the_weights_are_unknown(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        foreign.engine.refuse_loads = 2
        await engine.stage(weights(tmp_path, V2, 2))
        with pytest.raises(WeightsError):
            await engine.commit(V2, "retract")
        assert (await engine.audit()).version not in (V1, V2)
        with pytest.raises(Unavailable):
            await engine.generate(asking())
        await committed(engine, tmp_path, V3, 3)
        assert (await engine.generate(asking())).versions[0].version == V3


@same_for_each
async def test_weights_that_were_not_loaded_again_are_found(tmp_path: Path, kind: Kind):
    """After a refused load the server acknowledges the load of those before, and keeps its mixed ones."""
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        foreign.engine.refuse_loads, foreign.engine.stay = 1, True
        await engine.stage(weights(tmp_path, V2, 2))
        with pytest.raises(WeightsError):
            await engine.commit(V2, "retract")
        with pytest.raises(Unavailable):
            await engine.generate(asking())


@same_for_each
async def test_answers_of_a_restarted_server_are_refused(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        await committed(engine, tmp_path, V1, 1)
        asked = await held(foreign, engine, 7)
        await foreign.stop()
        with pytest.raises((EngineDied, Unavailable)):
            await asked
        with pytest.raises(VolleyError):
            await engine.generate(asking())
        await foreign.start()
        with pytest.raises(Unavailable):
            await engine.generate(asking())
        await committed(engine, tmp_path, V2, 2)
        assert (await engine.generate(asking())).versions[0].version == V2


@same_for_each
async def test_a_server_that_keeps_its_arrays_is_found_by_the_probe(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        foreign.engine.stay = True
        staged = weights(tmp_path, V1, 1)
        await engine.stage(staged)
        live = (await engine.commit(V1, "retract")).live
        assert live.version == V1
        assert live.logprobs is not None
        assert staged.probe_logprobs is not None
        assert np.abs(live.logprobs - staged.probe_logprobs).max() > 0.1


@same_for_each
async def test_an_answer_without_spans_is_refused_if_weights_changed_meanwhile(tmp_path: Path, kind: Kind):
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine:
        foreign.faults.no_spans = True
        await engine.stage(replace(weights(tmp_path, V1, 1), probe_ids=None))
        await engine.commit(V1, "retract")
        assert (await engine.generate(asking())).versions[0].version == V1
        asked = await held(foreign, engine, 7)
        await engine.stage(replace(weights(tmp_path, V2, 2), probe_ids=None))
        await engine.commit(V2, "retract")
        foreign.engine.hold_at = None
        with pytest.raises(Unavailable):
            await asked


@same_for_each
async def test_a_server_with_a_shorter_context_is_refused(tmp_path: Path, kind: Kind):
    models.write_hf(tmp_path / "model", CONFIG, models.random_weights(CONFIG, 0))
    foreign = Foreign(kind, tmp_path / "model", free_port(), context_length=32)
    await foreign.start()
    try:
        with pytest.raises(ConfigError) as refused:
            async with in_front(foreign):
                pass
        assert "rollout.engine.context_length" in refused.value.detail
    finally:
        await foreign.stop()


@same_for_each
async def test_a_sick_server_is_silent_and_a_busy_one_is_not(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_engine, "PERIOD_S", 0.05)
    async with running(kind, tmp_path) as foreign, in_front(foreign) as engine, asyncio.TaskGroup() as group:
        group.create_task(engine.wait_closed())
        foreign.faults.busy, n_before = True, foreign.faults.n_health
        await until(lambda: foreign.faults.n_health > n_before)
        await asyncio.sleep(0.2)
        assert engine.silent_s == 0
        foreign.faults.busy, foreign.faults.sick = False, True
        await until(lambda: engine.silent_s >= 0.3)
        foreign.faults.sick = False
        await until(lambda: not engine.silent_s)
        await engine.close()


@same_for_each
async def test_the_service_tells_a_restarted_server_its_weights_again(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
):
    """Ready, not ready while the server is gone, and ready with the same version when it is back."""
    monkeypatch.setattr(http_engine, "PERIOD_S", 0.05)
    monkeypatch.setattr(updater, "REPORT_S", 0.05)
    monkeypatch.setattr(updater, "POLL_S", 0.05)
    async with running(kind, tmp_path) as foreign:
        tree = {
            "model": {"path": str(foreign.folder)},
            "data": {"env": "x"},
            "run": {"name": "test", "dir": str(tmp_path)},
            "rollout": {"engine": {"kind": kind, "url": foreign.url, "context_length": 64}},
        }
        settings = replace(from_config(validate(tree).config), trainer_url=None, redis_url=None)
        assert settings.weights_root is not None
        found = models.random_weights(CONFIG, 1)
        ids = list(range(3, 19))
        probe = Probe(tuple(ids), tuple(score(found, CONFIG, ids[:1], ids[1:]).tolist()))
        models.write_checkpoint(settings.weights_root, V1, CONFIG, found, probe=probe)
        async with open_rollout(settings) as service, asyncio.TaskGroup() as group:
            workers = [group.create_task(worker()) for worker in service.workers]
            transport = httpx.ASGITransport(service.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                await until_ready(http, 200)
                await foreign.stop()
                await until_ready(http, 503)
                await foreign.start()
                await until_ready(http, 200)
                answer = await generated(http)
                assert answer["meta_info"]["weight_version"] == V1
                assert foreign.engine.n_loads == 1
            for worker in workers:
                worker.cancel()


async def held(foreign: Foreign, engine: HttpEngine, n: int) -> asyncio.Future[GenerateResult]:
    """A request of 40 tokens that waits in the server after n of them."""
    foreign.engine.hold_at = n
    asked = asyncio.ensure_future(engine.generate(asking(40, ignore_eos=True)))
    await until(lambda: foreign.engine.held)
    return asked


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def generated(http: httpx.AsyncClient) -> dict[str, Any]:
    """Answer of a service that may not have seen yet that its server has lost the weights: it then refuses."""
    body = {"input_ids": PROMPT.tolist(), "sampling_params": {"max_new_tokens": 4}}
    async with asyncio.timeout(60):
        while (answer := await http.post("/generate", json=body)).status_code == 503:
            await asyncio.sleep(0.02)
    return answer.json()


async def until_ready(http: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(60):
        while (await http.get("/ready")).status_code != status:
            await asyncio.sleep(0.02)
