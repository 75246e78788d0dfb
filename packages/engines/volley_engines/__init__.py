"""Engines that are servers of other projects, SGLang and vLLM, which run already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shared.engine_kinds import Capability, EngineKind

if TYPE_CHECKING:  # the schema asks for this description
    from shared.schema import RunConfig

_CAPABILITIES: tuple[Capability, ...] = ("exact_ids", "spans", "in_flight_update", "probe")


def _findings_of_vllm(config: RunConfig) -> Iterator[str]:
    temperature = config.rollout.sampling.temperature
    if temperature != 1:
        yield (
            f"rollout.sampling.temperature={temperature:g} needs a vLLM server that was started with"
            " --logprobs-mode processed_logprobs"
        )


SGLANG = EngineKind("volley_engines.opening:open_sglang", _CAPABILITIES, is_external=True)
VLLM = EngineKind("volley_engines.opening:open_vllm", _CAPABILITIES, is_external=True, findings=_findings_of_vllm)
