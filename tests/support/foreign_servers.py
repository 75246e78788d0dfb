"""SGLang's and vLLM's HTTP interfaces around `NumpyEngine`: the routes that Volley uses.

Requests are checked by models of the published schemas (SGLang 0.5.23: `managers/io_struct.py`,
`sampling/sampling_params.py`; vLLM 0.32 and 0.33: `entrypoints/scale_out/token_in_token_out/protocol.py`,
`entrypoints/rl/online/api_router.py`), of which they hold the fields that Volley sends; any other field is refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from tests.support.numpy_engine import Drawn, NumpyEngine, spans


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SglangSampling(Closed):
    max_new_tokens: int = 128
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    sampling_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)


class GenerateReqInput(Closed):
    rid: str = "none"
    input_ids: list[int] = Field(min_length=1)
    sampling_params: SglangSampling
    return_logprob: Literal[True]
    logprob_start_len: int
    top_logprobs_num: int
    stream: bool = False


class UpdateWeightFromDisk(Closed):
    model_path: str
    weight_version: str
    flush_cache: bool


class AbortReq(Closed):
    rid: str


class PauseGeneration(Closed):
    mode: Literal["abort", "retract", "in_place"]


class VllmSampling(Closed):
    max_tokens: int = Field(16, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = Field(None, le=20)
    prompt_logprobs: int | None = None
    detokenize: bool = True


class GenerateRequest(Closed):
    request_id: str
    token_ids: list[int] = Field(min_length=1)
    sampling_params: VllmSampling
    stream: bool = False


class Faults(BaseModel):
    """`short_logprobs` leaves one log-probability out; `no_spans` names no version of each token; a `busy` server does
    not answer on its health, on which it was asked `n_health` times.
    """

    short_logprobs: bool = False
    no_spans: bool = False
    sick: bool = False
    busy: bool = False
    n_health: int = 0


async def _health(faults: Faults) -> Response:
    faults.n_health += 1
    while faults.busy:
        await asyncio.sleep(0.01)
    return Response(status_code=503 if faults.sick else 200)


def sglang_app(engine: NumpyEngine, faults: Faults, context_length: int = 256) -> FastAPI:
    app = FastAPI()

    def info() -> dict[str, Any]:
        return {"model_path": str(engine.folder), "is_generation": True, "weight_version": engine.version}

    @app.get("/health")
    async def health() -> Response:
        return await _health(faults)

    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return info()

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {"version": "0.5.23", "context_length": context_length, "max_total_num_tokens": 4096}

    @app.post("/generate")
    async def generate(body: GenerateReqInput) -> Response:
        if body.sampling_params.max_new_tokens == 0:
            return JSONResponse(_sglang_scored(engine, body))
        sampling, drawn = body.sampling_params, list[Drawn]()
        stops = set[int]() if sampling.ignore_eos else {*sampling.stop_token_ids}
        draws = engine.sample(
            body.rid, body.input_ids, sampling.max_new_tokens, sampling.temperature, sampling.sampling_seed, stops,
            body.top_logprobs_num,
        )  # fmt: skip
        if not body.stream:
            drawn += [one async for one in draws]
            return JSONResponse(_sglang_answer(body, drawn, faults, engine, stops, ended=True))

        async def events() -> AsyncIterator[bytes]:
            async for one in draws:
                drawn.append(one)
                made = _sglang_answer(body, drawn, faults, engine, stops, ended=False)
                yield b"data: " + json.dumps(made).encode() + b"\n\n"
            made = _sglang_answer(body, drawn, faults, engine, stops, ended=True)
            yield b"data: " + json.dumps(made).encode() + b"\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/abort_request")
    async def abort_request(body: AbortReq) -> Response:
        engine.aborted |= {body.rid} & engine.running
        return Response()

    @app.post("/pause_generation")
    async def pause_generation(body: PauseGeneration) -> dict[str, str]:
        await engine.pause(body.mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def continue_generation() -> dict[str, str]:
        engine.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        engine.n_flushes += 1
        return Response("Cache flushed.\n")

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateWeightFromDisk) -> JSONResponse:
        reason = await engine.load(body.model_path)
        if reason is None:
            engine.version = body.weight_version
            engine.n_flushes += body.flush_cache
        message = reason or "Succeeded to update model weights."
        content = {"success": reason is None, "message": message, "num_paused_requests": 0}
        return JSONResponse(content, 200 if reason is None else 400)

    return app


def _rows(drawn: list[Drawn], faults: Faults) -> list[list[Any]]:
    rows: list[list[Any]] = [[one.logprob, one.token, None] for one in drawn]
    return rows[:-1] if faults.short_logprobs else rows


def _sglang_answer(
    body: GenerateReqInput, drawn: list[Drawn], faults: Faults, engine: NumpyEngine, stops: set[int], *, ended: bool
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": body.rid,
        "finish_reason": None,
        "prompt_tokens": len(body.input_ids),
        "completion_tokens": len(drawn),
        "cached_tokens": 0,
        "weight_version": engine.version,
        "output_token_logprobs": _rows(drawn, faults),
    }
    if body.top_logprobs_num:
        meta["output_top_logprobs"] = [[[p, token, None] for token, p in one.top] for one in drawn]
    if ended:
        meta["finish_reason"] = _reason(drawn, body.sampling_params.max_new_tokens, stops)
        if not faults.no_spans:
            meta["weight_versions"] = spans(drawn)
    return {"text": "", "output_ids": [one.token for one in drawn], "meta_info": meta}


def _reason(drawn: list[Drawn], limit: int, stops: set[int]) -> dict[str, Any]:
    if drawn and drawn[-1].token in stops:
        return {"type": "stop", "matched": drawn[-1].token}
    if len(drawn) == limit:
        return {"type": "length", "length": limit}
    return {"type": "abort", "message": "Abort in waiting queue"}


def _sglang_scored(engine: NumpyEngine, body: GenerateReqInput) -> dict[str, Any]:
    ids, table = body.input_ids, engine.table(body.input_ids)
    rows = [[None, ids[0], None], *([float(table[at, one]), one, None] for at, one in enumerate(ids[1:]))]
    best = [table[at].argsort()[::-1][: body.top_logprobs_num].tolist() for at in range(len(ids) - 1)]
    tops = [None, *([[float(table[at, one]), one, None] for one in row] for at, row in enumerate(best))]
    meta = {"prompt_tokens": len(ids), "weight_version": engine.version, "input_token_logprobs": rows}
    return {"text": "", "output_ids": [], "meta_info": {**meta, "input_top_logprobs": tops}}


def vllm_app(engine: NumpyEngine, faults: Faults, context_length: int = 256) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> Response:
        return await _health(faults)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": "0.33.0"}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": engine.version}

    @app.get("/server_info")
    async def server_info(config_format: str = "text") -> dict[str, Any]:
        assert config_format == "json"
        model = {"max_model_len": context_length, "logprobs_mode": "raw_logprobs"}
        cache = {"num_gpu_blocks": 64, "block_size": 16}
        return {"vllm_config": {"model_config": model, "scheduler_config": {"max_num_seqs": 8}, "cache_config": cache}}

    @app.post("/inference/v1/generate")
    async def generate(body: GenerateRequest) -> Response:
        sampling, drawn = body.sampling_params, list[Drawn]()
        draws = engine.sample(
            f"generate-tokens-{body.request_id}", body.token_ids, sampling.max_tokens, sampling.temperature,
            sampling.seed, {*sampling.stop_token_ids}, max(0, (sampling.logprobs or 0) - 1),
        )  # fmt: skip
        if not body.stream:
            drawn += [one async for one in draws]
            choice = _vllm_choice(body, drawn, drawn, faults, ended=True)
            made: dict[str, Any] = {"request_id": "x", "choices": [choice], "prompt_logprobs": None}
            if sampling.prompt_logprobs is not None:
                made["prompt_logprobs"] = _vllm_prompt(engine, body.token_ids, sampling.prompt_logprobs)
            return JSONResponse(made)

        async def events() -> AsyncIterator[bytes]:
            async for one in draws:
                drawn.append(one)
                made = {"choices": [_vllm_choice(body, [one], drawn, faults, ended=False)]}
                yield b"data: " + json.dumps(made).encode() + b"\n\n"
            last = {"choices": [_vllm_choice(body, [], drawn, faults, ended=True)]}
            yield b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/abort_requests")
    async def abort_requests(request: Request) -> dict[str, Any]:
        names = {*(await request.json())["request_ids"]}
        engine.aborted |= names & engine.running
        return {"status": "aborted", "aborted": len(names)}

    @app.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] = "abort") -> dict[str, str]:
        await engine.pause(mode)
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        engine.resume()
        return {"status": "resumed"}

    @app.post("/collective_rpc")
    async def collective_rpc(request: Request) -> JSONResponse:
        body = await request.json()
        assert body["method"] == "reload_weights"
        reason = await engine.load(body["kwargs"]["weights_path"])
        if reason is not None:
            error = {"message": f"Call to collective_rpc method failed: {reason}", "type": "InternalServerError"}
            return JSONResponse({"error": {**error, "param": None, "code": 500}}, 500)
        return JSONResponse({"results": [None]})

    @app.post("/update_weight_version")
    async def update_weight_version(request: Request) -> dict[str, Any]:
        engine.version = (await request.json())["new_version"]
        return {"success": True, "new_version": engine.version}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> dict[str, bool]:
        engine.n_flushes += 1
        return {"success": reset_running_requests or not engine.running}

    return app


def _vllm_choice(
    body: GenerateRequest, new: list[Drawn], drawn: list[Drawn], faults: Faults, *, ended: bool
) -> dict[str, Any]:
    sampling = body.sampling_params
    content = [
        {
            "token_id": one.token,
            "logprob": one.logprob,
            "rank": 1,
            "top_logprobs": [{"token_id": token, "logprob": p} for token, p in [(one.token, one.logprob), *one.top]],
        }
        for one in new
    ]
    kept = content[:-1] if faults.short_logprobs else content
    reason = _reason(drawn, sampling.max_tokens, {*sampling.stop_token_ids})
    return {
        "index": 0,
        "finish_reason": reason["type"] if ended else None,
        "stop_reason": reason.get("matched") if ended else None,
        "token_ids": [one.token for one in new],
        "logprobs": None if sampling.logprobs is None else {"content": kept},
        "weight_versions": spans(drawn) if ended and not faults.no_spans else None,
    }


def _vllm_prompt(engine: NumpyEngine, ids: list[int], k: int) -> list[Any]:
    table, rows = engine.table(ids), list[Any]()
    for at, token in enumerate(ids[1:]):
        known = {token, *table[at].argsort()[::-1][:k].tolist()}
        rows.append({str(one): {"logprob": float(table[at, one]), "rank": 1, "decoded_token": None} for one in known})
    return [None, *rows]


def main(kind: str, port: str, folder: str) -> None:
    """Serve on loopback until killed: python -m tests.support.foreign_servers KIND PORT FOLDER."""
    app = {"sglang": sglang_app, "vllm": vllm_app}[kind](NumpyEngine(Path(folder)), Faults(), 512)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
