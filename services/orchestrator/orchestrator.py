"""The run as a whole: its parts, its worker, and its description for the routes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from services.orchestrator.agents import AgentRecorder
from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.groups import GroupPlan, run_group
from services.orchestrator.episodes.partials import PartialRollouts
from services.orchestrator.episodes.teaching import GroupTeaching
from services.orchestrator.evaluation.evaluator import EvalPlan, Evaluator, HeldOutTasks
from services.orchestrator.evaluation.records import as_rows
from services.orchestrator.judges import GroupJudges
from services.orchestrator.mixture.log import MixtureLog
from services.orchestrator.mixture.mixture import ConfiguredMixture, RunMixture
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.handover import RecordHandover
from services.orchestrator.schedule.policy import EveryGroup, GenerationPolicy
from services.orchestrator.schedule.run_schedule import RunSchedule, wait_for_offers, wait_for_tasks
from services.orchestrator.schedule.ticket_loop import RunGroup, TicketLoop
from services.orchestrator.servers.balancer import Balancer, VersionBounds
from services.orchestrator.servers.holding import ServerHolds
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.status import RunStatus
from shared import packages
from shared.clients.env import EnvClient
from shared.errors import RuleFailed, VolleyError, first_error
from shared.models.chat import ChatTokenizer
from shared.own_rules import MENDING
from shared.process import host_memory, telemetry, tracing
from shared.process.sinks import MetricsFanout
from shared.queue.queue import TicketQueue
from shared.run.folder import RunFolder
from shared.run.mixture import SplitSizes
from shared.run.shares import weights_of
from shared.types import Group

_PAUSED = "paused"
_log = telemetry.Log("run")


@dataclass
class Orchestrator:
    """One run. `schedule` and `mixture` are None until the environment service has answered.

    `recorder` records agents, if a package for it is installed; `judges` grade complete groups, if the run has any;
    `privileged` is that of `GroupPlan`.
    """

    settings: OrchestratorSettings
    queue: TicketQueue
    environments: EnvClient
    tokenizer: ChatTokenizer
    balancer: Balancer
    status: RunStatus
    gate: ReservationGate
    dispatcher: Dispatcher
    handover: RecordHandover
    policy: GenerationPolicy = field(default_factory=EveryGroup)
    partials: PartialRollouts = field(default_factory=lambda: PartialRollouts(None))
    sinks: MetricsFanout = field(default_factory=MetricsFanout)
    recorder: AgentRecorder | None = None
    judges: GroupJudges | None = None
    privileged: Callable[[str], GroupTeaching | None] = lambda _: None
    schedule: RunSchedule | None = None
    evaluator: Evaluator | None = None
    mixture: RunMixture | None = None

    async def work(self) -> None:
        """Worker: follow the run to its end.

        An error that it cannot recover from becomes the state `failed` at the routes.
        """
        failure: VolleyError | None = None
        try:
            await self._follow()
        except* VolleyError as errors:
            failure = first_error(errors)
        if failure is None:
            self.status.end("finished")
            _log.info("run finished", run=self.settings.run)
        else:
            more = f"; {MENDING}" if isinstance(failure, RuleFailed) else ""
            self.status.end("failed", f"{failure}{more}")
            _log.error("run failed", run=self.settings.run, error=type(failure).__name__, detail=str(failure))

    def pause(self) -> None:
        """Start no new groups; finish and publish those in progress."""
        self.status.paused = True
        self.gate.close(_PAUSED)

    def resume(self) -> None:
        self.status.paused = False
        self.gate.release(_PAUSED)

    def environments_played(self) -> Collection[str]:
        """Return the names of all environments that the run has ever played; none before they are known."""
        return self.mixture.sizes.keys() if self.mixture else ()

    def last_evaluated(self) -> int | None:
        """Return the last step whose evaluation is complete: the main environment is measured last."""
        records = self.evaluator.records if self.evaluator else []
        return max((record.step for record in records if record.env is None), default=None)

    def describe(self) -> dict[str, Any]:
        """Return the answer of GET /runs/{name}.

        `chain` says what waits for what, as far as the orchestrator can see.
        """
        facts = self._facts()
        diagnosed: Callable[[dict[str, Any]], dict[str, Any]] | None = packages.part("diagnosis.run", required=False)
        return {**facts, "chain": ()} if diagnosed is None else diagnosed(facts)

    def _facts(self) -> dict[str, Any]:
        status, no_server = self.status, self.balancer.why_unroutable()
        state, reason = status.state(no_server)
        queue = self.schedule.state if self.schedule else None
        return {
            "name": self.settings.run,
            "state": state,
            "reason": reason,
            "step": queue.version if queue else None,
            "epoch": queue.epoch if queue else None,
            "max_steps": self.settings.max_steps,
            "groups_per_step": self.settings.terms.batch,
            "queue": dataclasses.asdict(queue) if queue else None,
            "held": self.schedule.n_leased if self.schedule else 0,
            "episodes_running": status.running,
            "sessions": self.recorder.describe() if self.recorder else {},
            "episodes_limit": self.dispatcher.limit,
            "evaluating_step": status.evaluating_step,
            "evaluated": status.evaluated,
            "waiting": dataclasses.asdict(status.waiting)
            if status.waiting and status.running == 0 and status.evaluating_step is None
            else None,
            "refused": status.refused,
            "waits": {**status.waits, **({"server": n} if (n := self.balancer.n_waiting) else {})},
            "waits_env": status.env_waits,
            "warnings": [*status.warnings, *(f"{url} {why}" for url, why in self.balancer.refusals().items())],
            "disk": status.disk,
            "host_memory": host_memory.report(),
            "quiet_s": round(status.quiet_s(), 1),
            "groups_published": status.published,
            "groups_failed": status.failed_groups,
            "last_failure": status.last_failure,
            "tokens_per_s": round(status.tokens_per_s(), 1),
            "staleness": status.staleness,
            "mean_episode_s": status.mean_episode_s(),
            "no_server": no_server,
            "servers": self.balancer.describe(),
            "mixture": self.mixture.describe() if self.mixture else [],
            "evaluations": as_rows(self.evaluator.records) if self.evaluator else [],
        }

    async def _follow(self) -> None:
        settings = self.settings
        sizes = {env: await wait_for_tasks(self.environments, env, self.status) for env in settings.members}
        folder = RunFolder(settings.folder)
        if self.recorder is not None:
            await self.recorder.give_back(self.queue)
        await self.handover.restore()
        self.mixture = mixture = RunMixture(
            ConfiguredMixture(settings.env, settings.members, settings.seed, settings.curriculum),
            sizes,
            await asyncio.to_thread(MixtureLog, folder.mixture, weights_of(settings.members), self._n_issued),
            self.environments,
            self.status,
        )
        self.evaluator = self._evaluator(sizes[settings.env], mixture)
        offers = await wait_for_offers(self.environments, self.status)
        for env in settings.members:
            self.evaluator.check_data(env, offers.get(env))
        self.schedule = RunSchedule(
            self.queue,
            self.balancer,
            self.status,
            self.gate,
            self._ticket_loop(mixture),
            self.evaluator,
            max_steps=settings.max_steps,
            on_epoch=self._on_epoch,
            holds=ServerHolds(self.balancer, share) if (share := settings.generation.eval_share) else None,
        )
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(mixture.watch())
            await self.schedule.follow()
            watching.cancel()
        await self.handover.finish()
        if self.recorder is not None:
            try:
                await self.recorder.settle()
            except VolleyError as error:
                _log.warning("sessions of the last step are not settled", reason=str(error))

    async def _on_epoch(self, run_id: str) -> None:
        """Prepare for a new epoch. At this process's start, tickets of stored episodes are issued again at once."""
        tracing.follow(self.settings.run, run_id)
        await self.handover.follow(run_id)
        if self.recorder is not None:
            await self.recorder.follow(run_id)
        for ticket in await self.partials.begin(run_id, (await self.queue.state()).low):
            await self.queue.renew(ticket, 0)

    async def _n_issued(self) -> int:
        return (await self.queue.state()).issued

    def _ticket_loop(self, mixture: RunMixture) -> TicketLoop:
        settings = self.settings
        plan = GroupPlan(
            "train",
            settings.group_size,
            settings.seed,
            settings.sampling,
            mixture.task_of,
            settings.routing_replay,
            self.judges,
            self.privileged,
        )
        return TicketLoop(
            self.queue,
            self.gate,
            self.status,
            settings.terms,
            n_groups=settings.n_groups,
            run_group=self._group_maker(plan),
            mixture=mixture,
            policy=self.policy,
            partials=self.partials,
        )

    def _group_maker(self, plan: GroupPlan) -> RunGroup:
        async def generate(ticket: int, need: VersionBounds) -> Group:
            async def void(why: str) -> Group:
                return plan.void(await plan.task_of(ticket), ticket, why, "straggler")

            return await self.policy.generate(
                ticket, lambda barrier: run_group(self.dispatcher, plan, ticket, need, barrier), void
            )

        return generate

    def _evaluator(self, sizes: SplitSizes, mixture: RunMixture) -> Evaluator:
        settings = self.settings
        plan = EvalPlan(
            settings.env,
            min(settings.n_eval_tasks, sizes.n_eval),
            settings.seed,
            settings.eval_every,
            settings.max_steps,
        )

        def others() -> list[HeldOutTasks]:
            return [HeldOutTasks(env, min(settings.n_eval_tasks, n)) for env, n in mixture.evaluated().items()]

        return Evaluator(
            self.dispatcher, self.status, self.tokenizer, plan, settings.folder, others, mixture.offer, self.sinks
        )
