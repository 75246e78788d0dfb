"""Rewards of Volley's environments in verl, as reward function and as reward manager.

The agent loop of this package returns each episode's reward, so verl asks neither. They are for verl's own agent loops
(the answer of one turn), and for judging recorded episodes again: the turns are played in a new episode with the same
seed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from volley_verl import settings
from volley_verl.episode import Task, play
from volley_verl.service import Service
from volley_verl.settings import BACKEND


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    env_url: str | None = None,
    **_: Any,
) -> dict[str, float]:
    """Score an answer, or the turns of an episode: verl's `reward.custom_reward_function`.

    Args:
        ground_truth: the task as ENV/SPLIT/INDEX, for rows whose `extra_info` does not name it.
        extra_info: of a row; with `volley_turns` and `volley_seed` of the agent loop, the whole episode is played.
        env_url: `reward.custom_reward_function.reward_kwargs.env_url`; None takes VOLLEY_ENV_URL.

    Raises:
        ServiceError: the environment service failed; the answer has no score then.
    """
    turns = extra_info.get("volley_turns")
    task = _task(extra_info, ground_truth)
    return await score(env_url or settings.env_url({}), task, [solution_str] if turns is None else turns)


async def score(url: str, task: Task, turns: Sequence[str]) -> dict[str, float]:
    """Play turns in a new episode; return `score`, its reward, and `acc`, 1.0 if the task is solved."""
    async with Service(url) as service:
        episode = await play(service, task, turns)
    return {"score": episode.reward, "acc": float(episode.success)}


@register(BACKEND)
class EnvironmentRewardWrapper(RewardManagerBase):
    """Reward manager that plays the response in the environment service: `reward.reward_manager.name: volley`.

    Another function of `reward.custom_reward_function` is asked instead, if one is configured.
    """

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any = None, **_: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        self._configured = config.reward.custom_reward_function.get("path") is not None
        self._url = settings.env_url(config.data)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one row, of whose outputs the last counts. Raises ServiceError.

        Returns:
            reward_score and reward_extra_info, as verl's other reward managers.
        """
        row = data[-1]
        length = row.batch["responses"].shape[-1]
        n_valid = int(row.batch["attention_mask"][-length:].sum())
        text = self.tokenizer.decode(row.batch["responses"][:n_valid], skip_special_tokens=True)
        about = {**row.non_tensor_batch.get("extra_info", {}), **(row.non_tensor_batch.get("tool_extra_fields") or {})}
        truth = row.non_tensor_batch["reward_model"]["ground_truth"]
        if self._configured:
            made = self.compute_score(
                data_source=row.non_tensor_batch["data_source"],
                solution_str=text,
                ground_truth=truth,
                extra_info=about,
            )
            result = await made if inspect.isawaitable(made) else made
        else:
            turns = about.get("volley_turns")
            result = await score(self._url, _task(about, truth), [text] if turns is None else turns)
        found = result if isinstance(result, dict) else {"score": result, "acc": result}
        return {"reward_score": found["score"], "reward_extra_info": found}


def _task(about: Mapping[str, Any], ground_truth: str) -> Task:
    if "env" not in about:
        env, split, index = str(ground_truth).rsplit("/", 2)
        about = {**about, "env": env, "split": split, "index": int(index)}
    return Task.of_row(about, about.get("volley_seed"))
