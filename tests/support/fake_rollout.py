"""A rollout server without an engine: the wire contract, with tokens drawn from the sampling seed (or
a fixed answer).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

from shared.errors import Unavailable
from shared.schema import Limits
from shared.web.http import create_app, read_body, respond


@dataclass
class FakeRollout:
    """`answer` replaces the drawn tokens; `delay_s` is the time of one generate call; not `well` answers 503."""

    version: str | None = "e000001-s000000"
    eos_id: int = 2
    answer: list[int] | None = None
    delay_s: float = 0.0
    well: bool = True
    requests: int = 0
    aborted: list[str] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = create_app("fake-rollout", limits=Limits(), tokens=None, ready=lambda: None if self.well else "not well")

        @app.post("/generate")
        async def generate(request: Request) -> Response:
            return respond(request, await self._generate(await read_body(request)))

        @app.post("/abort_request")
        async def abort(request: Request) -> dict[str, str]:
            self.aborted.append((await read_body(request))["rid"])
            return {}

        @app.get("/weights")
        async def weights() -> dict[str, Any]:
            return {"current": self.version, "staged": None, "digest": None}

        return app

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.well:
            raise Unavailable("not well")
        self.requests += 1
        params, version = body["sampling_params"], self.version
        self.greedy.append(params["temperature"] == 0)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        ids = (self.answer or self._drawn(params["sampling_seed"]))[: params["max_new_tokens"]]
        n = len(ids)
        return {
            "output_ids": np.array(ids, np.int32),
            "meta_info": {
                "id": body["rid"],
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": n,
                "cached_tokens": 0,
                "output_token_logprobs": np.full(n, -0.5, np.float32),
                "finish_reason": {"type": "stop" if ids[-1] == self.eos_id else "length"},
                "weight_versions": [{"version": version, "start": 0, "end": n}],
            },
        }

    def _drawn(self, seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return [*rng.integers(10, 200, rng.integers(1, 8)).tolist(), self.eos_id]
