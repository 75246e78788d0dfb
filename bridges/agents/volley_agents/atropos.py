"""Play an environment of Atropos in the sessions of a Volley run.

    python -m volley_agents.atropos my_env.py:MyEnv --write-tasks tasks.py --group-size 8
    python -m volley_agents.atropos my_env.py:MyEnv --orchestrator http://127.0.0.1:8103 --group-size 8

The environment runs unchanged, with a server of ours: of the n answers that it asks for, each is sampled in another
session of one ticket, and a later call goes on in the session whose conversation it begins with. The environment
chooses the items; a ticket of the run stands for the next one. Its scores are the rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.completion import Completion

from volley_agents.sessions import (
    AgentFailed,
    Outcome,
    Session,
    add_arguments,
    run_of,
    tasks_file,
    until_stopped,
    work,
)

MASKED = -100
GROUP_S = 30.0
"""Seconds to wait for the other sessions of a ticket; a repeated attempt comes alone."""
TIMEOUT_S = 1200.0
_KEPT = ("max_tokens", "stop", "tools", "tool_choice", "chat_template_kwargs")
"""Fields of a call that a session honours; the run's sampling decides the others."""


@dataclass
class Member:
    """One session of a group: what it has sampled, and the conversations that it knows."""

    session: Session
    used: bool = False
    sampled: list[int] = field(default_factory=list)
    known: list[list[Any]] = field(default_factory=list)


class Group:
    """Sessions of one ticket, among which an environment's calls are divided."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.members = [Member(session) for session in sessions]

    def pick(self, prompt: list[Any], n: int) -> list[Member]:
        """Choose the sessions of n answers to a prompt. Raises AgentFailed if there are too few."""
        if n == 1:
            lengths = {
                i: max((len(one) for one in member.known if prompt[: len(one)] == one), default=0)
                for i, member in enumerate(self.members)
            }
            best = max(lengths, key=lengths.__getitem__)
            if lengths[best]:
                return [self.members[best]]
        free = [member for member in self.members if not member.used][:n]
        if len(free) < n:
            raise AgentFailed(f"{n} answers were asked for, and {len(free)} sessions of the group are unused")
        for member in free:
            member.used = True
        return free


GROUP: contextvars.ContextVar[Group] = contextvars.ContextVar("group")


class SessionServer(APIServer):
    """Server of Atropos whose answers come from the sessions of the present group."""

    def __init__(self) -> None:
        super().__init__(APIServerConfig(model_name="volley", base_url="", health_check=False))
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.server_healthy = True

    async def _chat_completion_wrapper(self, **asked: Any) -> ChatCompletion:
        messages = [dict(message) for message in asked["messages"]]
        found = await self._ask("chat/completions", {"messages": messages}, messages, asked)
        for member, answer in found:
            member.known.append([*messages, answer["choices"][0]["message"]])
        return ChatCompletion.model_validate(_joined(found))

    async def _completion_wrapper(self, **asked: Any) -> Completion:
        prompt = asked["prompt"]
        found = await self._ask("completions", {"prompt": prompt, "logprobs": 0}, list(prompt), asked)
        for member, answer in found:
            text = answer["choices"][0]["text"]
            member.known.append(list(prompt + text))
        return Completion.model_validate(_joined(found))

    async def _tokens_and_logprobs_completion_wrapper(self, **asked: Any) -> tuple[list, list, list, list]:
        prompt = asked["input_ids"] if asked.get("input_ids") is not None else asked["prompt"]
        body = {"prompt": prompt, "logprobs": 0, "return_token_ids": True}
        found = await self._ask("completions", body, list(prompt), asked)
        choices = [answer["choices"][0] for _, answer in found]
        ids = list(choices[0]["prompt_token_ids"])
        for (member, _), choice in zip(found, choices, strict=True):
            member.known.append([*ids, *choice["token_ids"]])
        return (
            ids,
            [choice["token_ids"] for choice in choices],
            [choice["logprobs"]["token_logprobs"] for choice in choices],
            [choice["finish_reason"] for choice in choices],
        )

    async def _get_logprobs_wrapper(self, **_: Any) -> dict[str, Any]:
        raise AgentFailed("a session gives no log-probabilities of a prompt")

    async def _ask(
        self, path: str, body: Mapping[str, Any], prompt: list[Any], asked: Mapping[str, Any]
    ) -> list[tuple[Member, dict[str, Any]]]:
        """Ask each of n sessions once. Raises AgentFailed."""
        kept = {name: asked[name] for name in _KEPT if asked.get(name) is not None}
        if (limit := asked.get("max_completion_tokens") or asked.get("max_new_tokens")) is not None:
            kept["max_tokens"] = limit
        members = GROUP.get().pick(prompt, asked.get("n") or 1)
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(self._call(one, path, {**kept, **body})) for one in members]
        return [(member, call.result()) for member, call in zip(members, calls, strict=True)]

    async def _call(self, member: Member, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {member.session.key}"}
        answer = await self._http.post(f"{member.session.base_url}/{path}", json=body, headers=headers)
        if answer.is_error:
            raise AgentFailed(f"the session answered {answer.status_code}: {answer.text[:300]}")
        found = answer.json()
        member.sampled += found["choices"][0]["token_ids"]
        return found


def _joined(found: Sequence[tuple[Member, dict[str, Any]]]) -> dict[str, Any]:
    """Join the answers of several sessions to one with n choices."""
    choices = [{**answer["choices"][0], "index": i} for i, (_, answer) in enumerate(found)]
    return {**found[0][1], "choices": choices}


def rewards(group: Group, scored: Any) -> list[float]:
    """Return the reward of each session: its score, 0 where the environment kept none.

    Scores belong to the session that sampled the same tokens; those of an environment that tokenizes texts itself
    belong to the sessions in their order. Raises AgentFailed if neither can be told.
    """
    rows = [
        ([token for token, mask in zip(tokens, masks, strict=True) if mask != MASKED], float(score))
        for one in (scored if isinstance(scored, list) else [scored])
        if one
        for tokens, masks, score in zip(one["tokens"], one["masks"], one["scores"], strict=True)
    ]
    found: dict[int, float] = {}
    for ids, score in rows:
        match = next((i for i, one in enumerate(group.members) if i not in found and one.sampled == ids), None)
        if match is not None:
            found[match] = score
    if len(found) < len(rows):
        if len(rows) != len(group.members):
            raise AgentFailed(f"{len(rows)} scores are of other tokens than the {len(group.members)} sessions sampled")
        found = {i: score for i, (_, score) in enumerate(rows)}
    return [found.get(i, 0.0) for i in range(len(group.members))]


class Player:
    """Player of an environment's items, one for each group of sessions. Args: group_size: sessions of a ticket."""

    def __init__(self, env: Any, group_size: int) -> None:
        self._env, self._size = env, group_size
        self._waiting: dict[int, list[tuple[Session, asyncio.Future[float]]]] = {}

    async def play(self, session: Session) -> Outcome:
        """Wait for the other sessions of the ticket; the last one plays them all. Raises AgentFailed.

        In an evaluation all answers come from the one session, and the reward is their mean.
        """
        if not session.ticket:
            found = await self._scores([session] * self._size)
            return Outcome(sum(found) / len(found))
        reward: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(session.ticket, [])
        waiting.append((session, reward))
        if len(waiting) < self._size:
            await asyncio.wait([reward], timeout=GROUP_S)
        if self._waiting.get(session.ticket) is waiting:
            await self._group(self._waiting.pop(session.ticket))
        return Outcome(await reward)

    async def _group(self, waiting: Sequence[tuple[Session, asyncio.Future[float]]]) -> None:
        """Play an item with these sessions, and set their rewards."""
        try:
            found = await self._scores([session for session, _ in waiting])
        except AgentFailed as error:
            for _, reward in waiting:
                reward.set_exception(AgentFailed(str(error)))
        else:
            for (_, reward), value in zip(waiting, found, strict=True):
                reward.set_result(value)

    async def _scores(self, sessions: Sequence[Session]) -> list[float]:
        """Play the environment's next item; return the reward of each session. Raises AgentFailed."""
        group = Group(sessions)
        GROUP.set(group)
        try:
            item = await self._env.get_next_item()
            scored, _ = await self._env.collect_trajectories(item)
            return rewards(group, await self._env.postprocess_histories(scored) if scored else scored)
        except Exception as error:
            raise AgentFailed(f"{type(error).__name__}: {error}") from error


def load(place: str, tokenizer: str | None, group_size: int) -> Any:
    """Make the environment of FILE:CLASS. Raises SystemExit."""
    file, _, name = place.partition(":")
    try:
        made = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert made is not None
        assert made.loader is not None
        module = importlib.util.module_from_spec(made)
        sys.modules[made.name] = module
        made.loader.exec_module(module)
        kind = getattr(module, name)
        config, _ = kind.config_init()
        changed: dict[str, Any] = {"group_size": group_size, "use_wandb": False}
        config = config.model_copy(update=changed | ({"tokenizer_name": tokenizer} if tokenizer else {}))
        env = kind(
            config, [APIServerConfig(model_name="volley", base_url="http://none", api_key="none", health_check=False)]
        )
    except Exception as error:
        raise SystemExit(f"{place} cannot be loaded: {type(error).__name__}: {error}") from error
    env.server.servers = [SessionServer()]
    return env


async def _serve(given: argparse.Namespace, env: Any) -> None:
    run = run_of(given)
    try:
        await env.setup()
        await work(run, Player(env, given.group_size).play, given.parallel * given.group_size)
    finally:
        await run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Plays an environment of Atropos in the sessions of a Volley run.")
    parser.add_argument("environment", metavar="FILE:CLASS")
    parser.add_argument("--group-size", type=int, default=8, help="the run's grpo_config.num_generations")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="the model's folder (default: the environment's own)")
    parser.add_argument("--tasks", type=int, default=10_000, help="items of an epoch, for --write-tasks")
    add_arguments(parser)
    given = parser.parse_args()
    if given.write_tasks:
        given.write_tasks.write_text(tasks_file(given.environment, given.tasks, given.eval_tasks), encoding="utf-8")
        return
    until_stopped(_serve(given, load(given.environment, given.tokenizer, given.group_size)))


if __name__ == "__main__":
    main()
