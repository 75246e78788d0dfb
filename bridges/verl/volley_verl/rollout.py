"""Volley's rollout servers as verl's server-mode rollout: `actor_rollout_ref.rollout.name: volley`.

The servers run already, on devices of their own: verl starts none, gives them no GPU, and frees no memory of theirs. A
replica is one server, with a Ray actor that speaks its HTTP.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from volley_verl import settings, weights
from volley_verl.service import Service
from volley_verl.settings import SettingsError
from volley_verl.weights import step_of

_DROPPED = ("logprobs", "max_tokens", "max_new_tokens")
_NO_EFFECT = {"repetition_penalty": 1.0}


class VolleyServer:
    """Ray actor in front of one Volley server; its methods are those that verl calls.

    Args:
        url: of the server.
        context_length: most tokens of prompt and answer together; None: what the server's own limit is.
        routed_experts: ask for the experts of each token.
    """

    def __init__(self, url: str, context_length: int | None, response_length: int, routed_experts: bool) -> None:
        self._url, self._context, self._response = url, context_length, response_length
        self._routed = routed_experts
        self._service, self._admin = Service(url), Service(url, "admin")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """Sample a continuation of the prompt's ids.

        Args:
            sampling_params: verl's; `prompt_logprobs` (of teachers) is refused.
            request_id: unused: verl's load balancer has chosen the server by it.

        Raises:
            SettingsError: the request asks for something that the server does not do.
            ServiceError: the server failed.
        """
        if image_data or video_data or audio_data:
            raise SettingsError("Volley's servers take text only")
        ids = [int(one) for one in prompt_ids]
        body = {
            "input_ids": ids,
            "sampling_params": self._parameters(len(ids), sampling_params),
            "return_logprob": True,
        }
        if self._routed:
            body["return_routed_experts"] = True
        answer = await self._service.post("/generate", body)
        return _output(answer, bool(sampling_params.get("logprobs")))

    def _parameters(self, n_prompt: int, given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get("prompt_logprobs") is not None:
            raise SettingsError("prompt_logprobs: a Volley server is no teacher of verl; name an SGLang or vLLM server")
        asked = given.get("max_new_tokens", given.get("max_tokens", self._response))
        room = asked if self._context is None else min(asked, self._context - 1 - n_prompt)
        kept = {key: value for key, value in given.items() if key not in _DROPPED and _NO_EFFECT.get(key) != value}
        return {**kept, "max_new_tokens": max(0, room)}

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End running requests, whose answers are what they have; new ones wait for `resume_generation`."""
        await self._admin.post("/pause_generation", {"mode": "abort"})

    async def resume_generation(self) -> None:
        await self._admin.post("/continue_generation", {})

    async def clear_kv_cache(self) -> None:
        await self._admin.post("/flush_cache", {})

    async def set_global_steps(self, global_steps: int) -> None:
        """Do nothing: each answer names the versions of its tokens."""

    async def sleep(self) -> None:
        """Do nothing: the server keeps its own device's memory."""

    wake_up = release_kv_cache = resume_kv_cache = sleep

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: see the server's metrics."""

    stop_profile = start_profile


def _output(answer: Mapping[str, Any], with_logprobs: bool) -> TokenOutput:
    meta = answer["meta_info"]
    ids, rows = [int(one) for one in answer["output_ids"]], meta["output_token_logprobs"]
    steps = [step for span in meta.get("weight_versions") or () if (step := step_of(span["version"])) is not None]
    extra: dict[str, Any] = {"num_cached_tokens": meta.get("cached_tokens")}
    if steps:
        extra |= {"global_steps": steps[-1], "min_global_steps": min(steps), "max_global_steps": max(steps)}
    return TokenOutput(
        token_ids=ids,
        log_probs=[float(row[0] if isinstance(row, list) else row) for row in rows] if with_logprobs else None,
        routed_experts=_experts(meta.get("routed_experts")),
        stop_reason=meta["finish_reason"]["type"],
        extra_fields=extra,
    )


def _experts(packed: Any) -> np.ndarray | None:
    """Return int32 [positions, layers, experts a token] of the server's answer."""
    if packed is None:
        return None
    flat = np.frombuffer(base64.b64decode(packed["data"]), np.int32)
    return flat.reshape(packed["shape"])


class VolleyReplica(RolloutReplica):
    """A Volley server as a replica of verl's rollout."""

    async def init_standalone(self) -> None:
        """Reach the server, with a worker for weights on a CPU. verl's own would take a GPU."""
        self.rollout_mode = RolloutMode.STANDALONE
        name = f"volley_{self.replica_rank}{self.name_suffix}"
        self.resource_pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, name_prefix=f"pool_{name}")
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"weights_{name}",
            use_gpu=False,
        )
        self.workers = group.workers
        await self.launch_servers()

    async def init_colocated(self, resource_pool: Any) -> None:
        raise SettingsError("a Volley server shares no GPU with verl: give it a device of its own")

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        return RayClassWithInitArgs(
            cls=ray.remote(VolleyWeightsWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )

    async def launch_servers(self) -> None:
        url = settings.server_of(self.config, self.replica_rank)
        actor = ray.remote(VolleyServer).options(
            name=f"volley_server_{self.replica_rank}{self.name_suffix}",
            num_cpus=0,
            max_concurrency=self.max_concurrency,
        )
        self._server_handle = actor.remote(
            url, self.config.max_model_len, self.config.response_length, self.config.enable_rollout_routing_replay
        )
        self.servers, self._server_address = [self._server_handle], url.partition("://")[2]


class VolleyServerAdapter(BaseRollout):
    """The trainer's side of a rollout that shares its worker group (verl's hybrid engine).

    Weights go to all servers from the first process; the servers keep running and free nothing.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = 0, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank, self.is_leader_rank = replica_rank, True

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: nothing was released."""

    async def release(self) -> None:
        """Do nothing: the server keeps its own device's memory."""

    async def update_weights(self, weights_: Any, wire_format: str = "named_tensors", **about: Any) -> None:
        """Publish weights to all servers. Raises ServiceError, SettingsError."""
        if wire_format != "named_tensors":
            raise SettingsError(f"wire_format {wire_format}: Volley's servers take whole weights")
        if about.get("peft_config") is not None:
            raise SettingsError("Volley's servers take merged weights: set actor_rollout_ref.model.lora.merge=true")
        own = settings.of_rollout(self.config)
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return await weights.drain(weights_)
        if not own.get("weights_dir"):
            raise SettingsError("actor_rollout_ref.rollout.custom.volley.weights_dir is missing")
        await weights.publish(
            weights_,
            about.get("global_steps"),
            model=Path(self.model_config.local_path),
            folder=Path(own["weights_dir"]),
            servers=[str(url) for url in own.get("servers") or ()],
            shard_bytes=self.config.checkpoint_engine.update_weights_bucket_megabytes << 20,
            mode=own.get("update_mode") or "retract",
        )
        return None


class VolleyWeightsWorker(CheckpointEngineWorker):
    """Worker of a standalone replica: it tells the trainer's checkpoint engine the address of its server."""

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int) -> None:
        adapter = _NoWeights(rollout_config, model_config, None, replica_rank)
        super().__init__(rollout_config, model_config, server_adapter=adapter)
        self.checkpoint_engine.server = settings.server_of(self.rollout_config, replica_rank)


class _NoWeights(VolleyServerAdapter):
    """Takes no weights: the trainer's checkpoint engine has given them to the server."""

    async def update_weights(self, weights_: Any, wire_format: str = "named_tensors", **about: Any) -> None:
        await weights.drain(weights_)
