"""Episodes that agents play: start or find the agent, wait for its end, have it judged, and collect its turns.

The agent's calls arrive by HTTP (see `routes`). A session survives this process: its ticket comes back, the environment
service answers the same request ids with the same episode, and the agent goes on. An agent that dies, never calls, or
does not end in time is an infrastructure failure. One that has used up its calls is judged as it stands.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Protocol

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.environments import EnvironmentCalls
from services.orchestrator.episodes.failures import AgentDied, AgentSilent, EpisodeLost
from services.orchestrator.episodes.turn import SamplingSpec, TurnSampler
from shared.clients.env import Opening, ProgramReply, StepReply
from shared.errors import VolleyError
from shared.outcomes import End
from shared.process import telemetry
from shared.types import Trajectory, WeightVersion
from volley_agents.sessions import metrics
from volley_agents.sessions.records import SessionResult
from volley_agents.sessions.session import AgentSession, RunningSample
from volley_agents.sessions.sessions import Sessions
from volley_agents.sessions.trajectories import tokens_of

_log = telemetry.Log("agents")
_POLL_S = 10.0
_GRACE_S = 10.0
"""Time that an agent has for its end after it has used up its calls, in seconds."""


class AgentEnvironments(Protocol):
    """`EnvClient` methods that agents need."""

    async def run_program(
        self, episode_id: str, request_id: str, base_url: str, api_key: str, model: str
    ) -> ProgramReply: ...

    async def program(self, episode_id: str, wait_s: float = 0.0) -> ProgramReply: ...

    async def finish(self, episode_id: str, request_id: str, output: str | None = None) -> StepReply: ...


class SessionAgents:
    """`Agents` of the episode runner.

    Args:
        base_url: address of this orchestrator's `/v1`, as the environment service reaches it.
    """

    def __init__(
        self,
        sessions: Sessions,
        environments: AgentEnvironments,
        calls: EnvironmentCalls,
        sampler: TurnSampler,
        base_url: str,
        model: str,
    ) -> None:
        self._sessions, self._environments, self._calls, self._sampler = sessions, environments, calls, sampler
        self._base_url, self._model = base_url, model

    async def resume(self, spec: SamplingSpec, budget: TokenBudget) -> Trajectory | str | None:
        """Return a sample's trajectory from an earlier process, or the request id of its episode."""
        session = await self._sessions.at(spec)
        if session is None:
            return None
        await session.load()
        versions = {span.version for node in session.tree.nodes.values() for span in node.versions}
        if not all(self._sampler.is_usable(WeightVersion.parse(version), spec.need) for version in versions):
            await session.void("weights that sampled its tokens are undone or too old")
            await self._calls.delete(session.record.episode_id)
            return None
        if session.result is not None and session.n_calls:
            return _trajectory(session, spec, budget)
        return session.record.request_id

    async def run(self, spec: SamplingSpec, budget: TokenBudget, opening: Opening, request_id: str) -> Trajectory:
        """Play one episode. Raises AgentDied, AgentSilent, EpisodeLost, and the environment's failures."""
        session = await self._sessions.at(spec)
        if session is None:
            session = await self._sessions.begin(spec, opening, request_id)
        try:
            if session.record.episode_id != opening.episode_id:
                raise EpisodeLost(f"the environment lost episode {session.record.episode_id}, and its agent")
            await session.load()
            with session.running(RunningSample(spec, budget)):
                await self._play(session, spec, budget, opening)
        except asyncio.CancelledError:
            if budget.timer is not None and budget.timer.expired():
                await session.void("it did not end in time")
            raise
        except VolleyError as error:
            await session.void(f"{type(error).__name__}: {error.detail[:500]}")
            metrics.SESSIONS.labels("void").inc()
            raise
        metrics.SESSIONS.labels("ended").inc()
        return _trajectory(session, spec, budget)

    async def _play(self, session: AgentSession, spec: SamplingSpec, budget: TokenBudget, opening: Opening) -> None:
        """Return when the session has its result."""
        reply: ProgramReply | None = None
        if session.state == "running":
            if opening.agent == "program":
                _limit_time(session, budget)
                reply = await self._program(session, spec, budget)
            else:
                with budget.outage():
                    await self._offer(session, spec)
                _limit_time(session, budget)
                await self._external(session)
            if session.state == "void":
                raise AgentDied(f"the agent of {opening.task} gave up: {session.reason}")
        if not session.n_calls:
            raise _silent(opening.task, reply)
        await session.end()
        if session.result is not None:
            return
        if not opening.judged:
            while session.result is None and session.state == "ended":
                await session.change()
            return
        env, id_, request_id = self._environments, session.record.episode_id, session.record.request_id
        output = session.output if opening.agent == "external" else None
        judged = await self._calls.call(spec, budget, id_, lambda: env.finish(id_, f"{request_id}-finish", output))
        await session.give_reward(_result(session, judged, reply))

    async def _program(self, session: AgentSession, spec: SamplingSpec, budget: TokenBudget) -> ProgramReply:
        """Start the program and wait for its end, or for that of its calls. Raises AgentDied."""
        env, id_, key = self._environments, session.record.episode_id, self._sessions.key_of(session)
        request_id = session.record.request_id
        reply = await self._calls.call(
            spec,
            budget,
            id_,
            lambda: env.run_program(id_, request_id, self._base_url, key, self._model),
        )
        while reply.state == "running" and session.state == "running" and not _is_used_up(session):
            reply = await self._calls.call(spec, budget, id_, lambda: env.program(id_, _POLL_S))
        if reply.state == "failed" and session.limit is None:
            raise AgentDied(f"the agent of {session.record.task} failed: {reply.detail}")
        return reply

    async def _offer(self, session: AgentSession, spec: SamplingSpec) -> None:
        """Offer the session until an agent claims it; it is void if the environment loses its episode meanwhile."""
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self._keep_episode(session, spec))
            await self._sessions.offer(session)
            keeping.cancel()

    async def _keep_episode(self, session: AgentSession, spec: SamplingSpec) -> None:
        while True:
            await asyncio.sleep(self._sessions.ttl_s / 2)
            try:
                await self._calls.renew(spec, session.record.request_id, session.record.episode_id)
            except EpisodeLost as error:
                await session.void(error.detail)
            except VolleyError as error:
                _log.debug("episode not renewed", reason=str(error))

    async def _external(self, session: AgentSession) -> None:
        """Wait until the agent has ended its session, or used up its calls."""
        while session.state == "running" and not _is_used_up(session):
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await session.change()


def _limit_time(session: AgentSession, budget: TokenBudget) -> None:
    """Set the attempt's deadline to the session's, which an earlier process may have set."""
    if budget.timer is not None:
        left_s = max(1.0, session.expires - time.time())
        budget.timer.reschedule(asyncio.get_running_loop().time() + left_s)


def _is_used_up(session: AgentSession) -> bool:
    """True if the agent has tried to continue after its last call, and has had time to end."""
    return session.limit == "turns" and time.monotonic() - session.limit_at > _GRACE_S


def _silent(task: str, reply: ProgramReply | None) -> AgentSilent:
    """Make the error of an agent without an answered call."""
    if reply is None:
        return AgentSilent(f"the agent of {task} ended without a call")
    if reply.exit_code is None and reply.detail:
        hint = "raise timeout_s of its class, or lower orchestrator.max_concurrent_episodes"
        return AgentSilent(f"the agent of {task} got no answer of the model: {reply.detail}", hint)
    return AgentSilent(f"the agent of {task} ended without a call", f"it printed: {reply.output[-500:] or 'nothing'}")


def _result(session: AgentSession, judged: StepReply, reply: ProgramReply | None) -> SessionResult:
    end: End = judged.fault or "answered"
    if session.limit == "turns" or (session.limit and reply is not None and reply.state == "failed"):
        end = session.limit
    return SessionResult(
        judged.reward,
        judged.success,
        dict(judged.reward_components),
        "truncated" if end in ("turns", "context") else "completed",
        end,
    )


def _trajectory(session: AgentSession, spec: SamplingSpec, budget: TokenBudget) -> Trajectory:
    """Collect the turns of a session that has its result. Raises AgentDied if it was given up instead."""
    result, record = session.result, session.record
    if result is None:
        raise AgentDied(f"session {record.id} was given up: {session.reason}")
    tokens = tokens_of(session.tree, result.reward)
    n_cut = sum(node.finish == "length" for node in session.tree.nodes.values())
    return Trajectory(
        ticket=spec.ticket,
        sample_index=spec.sample_index,
        attempt=budget.used,
        env=spec.env,
        task=record.task,
        prompt_len=tokens.prompt_len,
        token_ids=tokens.trunk.token_ids,
        loss_mask=tokens.trunk.loss_mask,
        logprobs=tokens.trunk.logprobs,
        versions=tokens.trunk.versions,
        turns=tokens.trunk.turns,
        reward=result.reward,
        success=result.success,
        status=result.status,
        reward_components=result.components,
        timings={"generate_s": session.generate_s, "total_s": max(0.0, time.time() - record.opened)},
        end=result.end,
        faults={"length": n_cut} if n_cut else {},
        failures=dict(budget.failures),
        routed_experts=tokens.trunk.routed_experts,
        branches=tokens.branches,
    )
