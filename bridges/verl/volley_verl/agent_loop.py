"""verl's agent loop that plays episodes of Volley's environment service.

The model continues exactly the tokens that it sampled; only the environment's messages and the next header are added
(see `continuation`). Sampled tokens have mask 1 and the server's log-probability; all others have 0 and 0.0.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from volley_verl import settings
from volley_verl.continuation import Continuation
from volley_verl.episode import Episode, Reply, Task, stable_seed
from volley_verl.service import Service
from volley_verl.settings import AGENT


class PromptTooLong(ValueError):
    """A task's first prompt leaves no room to answer."""


@dataclass
class _Record:
    """Tokens of an episode so far: `ids` with the prompt; mask and log-probabilities of what follows it."""

    ids: list[int]
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generate_s: float = 0.0
    environment_s: float = 0.0
    num_preempted: int = -1
    steps: list[int] = field(default_factory=list)
    routed_experts: Any = None
    cut: bool = False


@register(AGENT)
class EnvironmentAgentLoop(AgentLoopBase):
    """Plays the episode of a dataset row until the environment, a limit of turns or a limit of tokens ends it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollout = self.rollout_config
        own = settings.of_rollout(rollout)
        self._env_url = settings.env_url(self.data_config)
        self._prompt_length, self._response_length = rollout.prompt_length, rollout.response_length
        self._context = rollout.get("max_model_len") or self._prompt_length + self._response_length
        self._turn_length = own.get("max_response_length") or self._response_length
        self._max_turns = rollout.multi_turn.max_assistant_turns or 10**9
        declared = end_ids(self.config.actor_rollout_ref.model.path, self.tokenizer.eos_token_id)
        self._continuation = Continuation(self.tokenizer, declared, self.apply_chat_template_kwargs)
        self._end_ids = self._continuation.end_ids

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play one episode.

        Args:
            row: a row of `CustomEnvironmentDataset`.

        Raises:
            PromptTooLong: the first prompt leaves no room to answer.
            ServiceError: the environment service failed; the sample has no reward then.
        """
        task = Task.of_row(row["extra_info"], self._seed(row))
        async with Service(self._env_url) as service, Episode(service, task) as episode:
            record = self._begin(episode)
            n_prompt = len(record.ids)
            await self._play(episode, record, sampling_params)
        return self._output(episode, record, n_prompt)

    def _seed(self, row: Mapping[str, Any]) -> int | None:
        if not self.rollout_config.get("full_determinism"):
            return None
        about = row["extra_info"]
        sample = row.get("session_id", row.get("priority", 0))
        return stable_seed(self.rollout_config.seed, about["env"], about["split"], about["index"], sample)

    def _begin(self, episode: Episode) -> _Record:
        messages = [dict(message) for message in episode.messages]
        ids = self.continuous_token_builder.build_initial_tokens(messages, tools=list(episode.tools) or None)
        if len(ids) > self._prompt_length or len(ids) >= self._context - 1:
            raise PromptTooLong(
                f"the prompt of {episode.task.env}/{episode.task.split}/{episode.task.index} has {len(ids)} tokens: "
                f"data.max_prompt_length is {self._prompt_length}, the context {self._context}"
            )
        return _Record(list(ids))

    async def _play(self, episode: Episode, record: _Record, sampling_params: Mapping[str, Any]) -> None:
        request_id = uuid4().hex
        while True:
            sampled = await self._sample(record, sampling_params, request_id)
            began = time.monotonic()
            reply = await episode.step(self._text(sampled))
            record.environment_s += time.monotonic() - began
            ended = bool(sampled) and sampled[-1] in self._end_ids
            record.cut = not ended or reply.truncated
            if reply.ended:
                return
            if len(episode.turns) >= self._max_turns or not self._continue(record, sampled, reply):
                record.cut = True
                began = time.monotonic()
                await episode.finish()
                record.environment_s += time.monotonic() - began
                return

    def _room(self, record: _Record) -> int:
        return min(self._context - 1 - len(record.ids), self._response_length - len(record.mask))

    async def _sample(self, record: _Record, sampling_params: Mapping[str, Any], request_id: str) -> list[int]:
        """Sample one turn and record it; return its ids."""
        parameters = {
            **sampling_params,
            "max_new_tokens": min(self._turn_length, self._room(record)),
            "stop_token_ids": sorted(self._end_ids),
        }
        began = time.monotonic()
        output = await self.server_manager.generate(
            request_id=request_id, prompt_ids=list(record.ids), sampling_params=parameters
        )
        record.generate_s += time.monotonic() - began
        sampled, logprobs = list(output.token_ids), output.log_probs
        if sampling_params.get("logprobs") and (logprobs is None or len(logprobs) != len(sampled)):
            raise ValueError(f"the server gave {len(logprobs or ())} log-probabilities for {len(sampled)} tokens")
        record.ids += sampled
        record.mask += [1] * len(sampled)
        record.logprobs += logprobs if logprobs is not None else [0.0] * len(sampled)
        if output.num_preempted is not None:
            record.num_preempted = max(0, record.num_preempted) + output.num_preempted
        steps = (output.extra_fields.get("min_global_steps"), output.extra_fields.get("max_global_steps"))
        record.steps += [int(step) for step in steps if step is not None]
        record.routed_experts = output.routed_experts
        return sampled

    def _text(self, sampled: Sequence[int]) -> str:
        """Decode a turn without the end tokens and padding after it."""
        n, ignored = len(sampled), {*self._end_ids, self.tokenizer.pad_token_id}
        while n and sampled[n - 1] in ignored:
            n -= 1
        return self.tokenizer.decode(sampled[:n], skip_special_tokens=False)

    def _continue(self, record: _Record, sampled: Sequence[int], reply: Reply) -> bool:
        """Add the environment's messages and the next header; False if they leave no room to answer."""
        ids = self._continuation.after(sampled, reply.messages)
        if len(ids) >= self._room(record):
            return False
        record.ids += ids
        record.mask += [0] * len(ids)
        record.logprobs += [0.0] * len(ids)
        return True

    def _output(self, episode: Episode, record: _Record, n_prompt: int) -> AgentLoopOutput:
        rewards = [reply.reward for reply in episode.replies]
        extra: dict[str, Any] = {
            "turn_scores": rewards,
            "tool_rewards": [],
            "reward_extra_info": {"acc": float(episode.success), "truncated": float(record.cut)},
            "volley_seed": episode.task.seed,
            "volley_turns": list(episode.turns),
            "min_global_steps": min(record.steps, default=None),
            "max_global_steps": max(record.steps, default=None),
        }
        return AgentLoopOutput(
            prompt_ids=record.ids[:n_prompt],
            response_ids=record.ids[n_prompt:],
            response_mask=record.mask,
            response_logprobs=record.logprobs,
            reward_score=episode.reward,
            num_turns=2 * len(episode.turns),
            routed_experts=record.routed_experts,
            metrics={
                "generate_sequences": record.generate_s,
                "tool_calls": record.environment_s,
                "num_preempted": record.num_preempted,
            },
            extra_fields=extra,
        )


@functools.cache
def end_ids(model_path: str, eos_id: int) -> frozenset[int]:
    """Return all tokens that end a turn: the tokenizer's, and those of generation_config.json and config.json."""
    found = {int(eos_id)}
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if file.exists():
            named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            found |= {int(one) for one in (named if isinstance(named, list) else [named]) if one is not None}
    return frozenset(found)
