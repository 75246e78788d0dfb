"""Generation of a TRL trainer by a Volley server."""

from __future__ import annotations

from typing import Any

from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from volley_trl.client import VolleyClient


class VolleyGeneration(VLLMGeneration):
    """TRL's generation in server mode, with a client that is given instead of made."""

    def __init__(self, client: VolleyClient, **options: Any) -> None:
        self._client = client
        super().__init__(mode="server", **options)

    def _init_vllm(self) -> None:
        if self.accelerator.is_main_process:
            self.vllm_client = self._client
        self.accelerator.wait_for_everyone()


def use_volley(trainer: GRPOTrainer, client: VolleyClient) -> None:
    """Let a trainer sample with a Volley server. Call it before `trainer.train()`.

    The trainer is constructed with `use_vllm=False`, so the package vllm is not needed. Afterwards it sends its weights
    before the first batch and after each step, and corrects with the server's log-probabilities as with vLLM's
    (`vllm_importance_sampling_correction`).

    Raises ValueError for a trainer that already samples with vLLM, or options that the server refuses.
    """
    if trainer.use_vllm:
        raise ValueError("the trainer samples with vLLM: construct it with use_vllm=False")
    if trainer.repetition_penalty != 1.0 or trainer.min_p:
        raise ValueError(
            "a Volley server samples text completions without repetition_penalty and min_p: leave them out"
        )
    args = trainer.args
    trainer.vllm_generation = VolleyGeneration(
        client,
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        logprobs=0,
        generation_kwargs=args.generation_kwargs,
    )
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    trainer._last_loaded_step = -1
