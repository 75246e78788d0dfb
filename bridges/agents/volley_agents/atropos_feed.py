"""Feed a trainer of Atropos with episodes of a Volley environment.

    python -m volley_agents.atropos_feed frozen_lake --env-url URL --server URL --model FOLDER --atropos http://localhost:8000

Registers as an environment with the trainer's API, plays groups with a Volley rollout server, and posts each group:
the sampled ids as they were sampled, -100 in `masks` and 1.0 in `inference_logprobs` at all other positions.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from volley_agents.sessions import until_stopped

MASKED, NO_LOGPROB = -100, 1.0
"""Atropos' marks of positions that are not trained: in `masks`, and in `inference_logprobs`."""
REGISTER_S, BUSY_S = 2.0, 1.0
_USER, _ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}

log = logging.getLogger("volley_agents")


@dataclass(frozen=True)
class Settings:
    """How episodes are played. `max_tokens` is of one message, `max_length` of a whole episode."""

    env: str
    group_size: int = 8
    temperature: float = 1.0
    max_tokens: int = 256
    max_length: int = 2048
    max_turns: int = 10
    queue: int = 8
    """Groups that wait in the trainer's queue at most."""


@dataclass
class Played:
    """Tokens of one episode. `logprobs` are at the request's temperature."""

    tokens: list[int]
    masks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    reward: float = 0.0

    def __post_init__(self) -> None:
        self.masks = [MASKED] * len(self.tokens)
        self.logprobs = [NO_LOGPROB] * len(self.tokens)

    def read(self, ids: Sequence[int]) -> None:
        """Add tokens that were not sampled."""
        self.tokens += ids
        self.masks += [MASKED] * len(ids)
        self.logprobs += [NO_LOGPROB] * len(ids)

    def sample(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.tokens += ids
        self.masks += ids
        self.logprobs += logprobs


class Player:
    """Player of episodes.

    Args:
        env: client of the environment service.
        server: client of the rollout server.
        tokenizer: the model's, of transformers, with a chat template.
    """

    def __init__(self, env: httpx.AsyncClient, server: httpx.AsyncClient, tokenizer: Any, settings: Settings) -> None:
        self._env, self._server, self._tokenizer, self._settings = env, server, tokenizer, settings

    async def group(self, split: str, index: int) -> dict[str, Any]:
        """Play the samples of one task; return Atropos' `ScoredData`."""
        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(self.episode(split, index)) for _ in range(self._settings.group_size)]
        played = [task.result() for task in playing]
        return {
            "tokens": [one.tokens for one in played],
            "masks": [one.masks for one in played],
            "scores": [one.reward for one in played],
            "inference_logprobs": [one.logprobs for one in played],
            "messages": [one.messages for one in played],
            "generation_params": {"temperature": self._settings.temperature},
        }

    async def episode(self, split: str, index: int) -> Played:
        """Play one episode to its end, or to a limit."""
        request, settings = uuid.uuid4().hex, self._settings
        task = {"env": settings.env, "split": split, "index": index, "seed": random.getrandbits(32)}
        opened = await self._post(self._env, "/episodes", {"request_id": request, **task})
        tools = opened.get("tools") or None
        played = Played(self._ids(opened["messages"], tools))
        played.messages += opened["messages"]
        path, ended = f"/episodes/{opened['episode_id']}", False
        try:
            for turn in range(settings.max_turns):
                room = settings.max_length - len(played.tokens)
                if room <= 0:
                    break
                text = await self._sampled(played, min(room, settings.max_tokens))
                message = {"role": "assistant", "content": text}
                step = await self._post(
                    self._env, f"{path}/step", {"request_id": f"{request}-{turn}", "message": message}
                )
                played.reward += step["reward"]
                played.messages += [message, *step["messages"]]
                if ended := step["terminated"] or step["truncated"]:
                    break
                played.read(self._following(played.tokens, step["messages"]))
            if not ended and (opened.get("info") or {}).get("scored_at_end"):
                end = await self._post(self._env, f"{path}/finish", {"request_id": f"{request}-finish"})
                played.reward += end["reward"]
        finally:
            await self._env.delete(path)
        return played

    async def _sampled(self, played: Played, n: int) -> str:
        sampling = {"max_new_tokens": n, "temperature": self._settings.temperature}
        asked = {"input_ids": played.tokens, "sampling_params": sampling, "return_logprob": True}
        answer = await self._post(self._server, "/generate", asked)
        ids = answer["output_ids"]
        played.sample(ids, [row[0] for row in answer["meta_info"]["output_token_logprobs"]])
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _ids(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, opens: bool = True) -> list[int]:
        found = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=opens, tokenize=True, return_dict=False
        )
        return list(found)

    def _following(self, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokenize what the template writes after an assistant's turn, which stays as it was sampled."""
        eos = self._tokenizer.eos_token_id
        whole = self._ids([_USER, _ASSISTANT, *messages])
        before = self._ids([_USER, _ASSISTANT], opens=False)
        if whole[: len(before)] != before or eos not in before:
            raise ValueError("the chat template changes earlier messages, or does not end an assistant's turn")
        ends = len(before) - 1 - before[::-1].index(eos)
        return whole[ends + 1 if tokens[-1] == eos else ends :]

    async def _post(self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, again while the service is busy or away. Raises SystemExit with the reason of a refusal."""
        pause = 0.5
        while True:
            try:
                answer = await client.post(path, json=body)
                if answer.is_success:
                    return answer.json()
                if answer.status_code not in (429, 502, 503):
                    raise SystemExit(f"{answer.url} answered {answer.status_code}: {answer.text[:500]}")
            except httpx.TransportError as error:
                log.warning("%s cannot be reached: %s", client.base_url, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10.0)


async def feed(atropos: httpx.AsyncClient, player: Player, settings: Settings, n_tasks: int, groups: int | None) -> int:
    """Post groups until the trainer has done its steps, or `groups` are posted. Return their number."""
    known = {"max_token_length": settings.max_length, "desired_name": settings.env, "weight": 1.0}
    while True:
        answer = (await atropos.post("/register-env", json={**known, "group_size": settings.group_size})).json()
        if answer["status"] == "success":
            break
        log.info("waiting for the trainer: %s", answer["status"])
        await asyncio.sleep(REGISTER_S)
    env_id, n_steps, posted = answer["env_id"], answer["num_steps"], 0
    try:
        while groups is None or posted < groups:
            status = (await atropos.request("GET", "/status-env", json={"env_id": env_id})).json()
            if status["current_step"] >= n_steps:
                break
            if status["self_queue_size"] >= settings.queue:
                await asyncio.sleep(BUSY_S)
                continue
            group = await player.group("train", posted % n_tasks)
            (await atropos.post("/scored_data", json={**group, "env_id": env_id})).raise_for_status()
            posted += 1
    finally:
        await atropos.post("/disconnect-env", json={"env_id": env_id})
    return posted


def _client(url: str, token_file: Path | None = None) -> httpx.AsyncClient:
    token = token_file.read_text(encoding="utf-8").strip() if token_file else ""
    return httpx.AsyncClient(base_url=url, timeout=600.0, headers={"Authorization": f"Bearer {token}"} if token else {})


async def _main(given: argparse.Namespace) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    settings = Settings(
        given.environment, given.group_size, given.temperature, given.max_tokens, given.max_length, given.max_turns
    )
    async with (
        _client(given.env_url, given.env_token_file) as env,
        _client(given.server, given.server_token_file) as server,
        _client(given.atropos) as atropos,
    ):
        answer = await env.post(f"/{settings.env}/num_tasks", json={"split": "train"})
        model = await server.get("/get_model_info")
        for one in (answer, model):
            one.raise_for_status()
        settings = replace(settings, max_length=min(settings.max_length, model.json()["context_length"] - 1))
        player = Player(env, server, AutoTokenizer.from_pretrained(given.model), settings)
        posted = await feed(atropos, player, settings, answer.json()["num_tasks"], given.groups)
    log.info("posted %d groups", posted)


def main() -> None:
    parser = argparse.ArgumentParser(description="Feeds a trainer of Atropos with episodes of a Volley environment.")
    parser.add_argument("environment", help="name of the environment in the environment service")
    parser.add_argument("--env-url", required=True, help="address of the environment service")
    parser.add_argument("--env-token-file", type=Path)
    parser.add_argument("--server", required=True, help="address of the rollout server")
    parser.add_argument("--server-token-file", type=Path)
    parser.add_argument("--model", required=True, help="folder of the model, for its tokenizer")
    parser.add_argument("--atropos", default="http://localhost:8000", help="address of the trainer's API (run-api)")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=256, help="of one message")
    parser.add_argument(
        "--max-length", type=int, default=2048, help="tokens of an episode, at most the server's context"
    )
    parser.add_argument("--max-turns", type=int, default=10)
    parser.add_argument("--groups", type=int, help="end after so many (default: with the trainer's last step)")
    until_stopped(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
