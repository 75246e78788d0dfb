"""Sessions are settled as the trainer's ledger says."""

import orjson

from packages.agents.tests.sessions.programs import ProgramEnv, orchestrating
from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.environments import EnvironmentCalls
from services.orchestrator.status import RunStatus
from shared.run import ledger
from shared.types import WeightVersion
from tests.orchestrator.fakes import spec
from volley_agents.sessions.settlement import SessionSettlement


class LedgerOf:
    """A trainer's ledger, of which a response has the lines from an offset on, counted in lines."""

    def __init__(self):
        self.lines = []

    async def record(self, record, offset):
        return self.lines[offset:], max(offset, len(self.lines))

    def ends(self, ticket, disposition, version=WeightVersion(1, 1)):  # noqa: B008 - frozen
        self.add(ledger.line(ticket, disposition, version))

    def add(self, line):
        self.lines.append(orjson.dumps(line).decode())


async def test_a_run_that_began_anew_is_settled_by_its_own_ledger(tmp_path):
    async with orchestrating(tmp_path, env := ProgramEnv()) as (recorder, runner):
        trainer, sessions = LedgerOf(), recorder.sessions
        settlement = SessionSettlement(sessions, trainer, EnvironmentCalls(env, RunStatus()), lambda: None)
        await sessions.follow("first")
        await runner.run(spec(1), TokenBudget(3))
        for ticket in (1, 2):
            trainer.ends(ticket, "trained")
        await settlement.settle()
        assert sessions.describe() == {"trained": 1}
        trainer.lines.clear()
        await sessions.follow("second")
        await runner.run(spec(2), TokenBudget(3))
        await settlement.settle()
        assert sessions.describe() == {"trained": 1, "ended": 1}
        trainer.ends(2, "trained")
        await settlement.settle()
        assert sessions.describe() == {"trained": 2}


async def test_a_ticket_that_a_later_trainer_undid_is_not_settled_by_its_old_line(tmp_path):
    async with orchestrating(tmp_path, env := ProgramEnv()) as (recorder, runner):
        trainer, sessions = LedgerOf(), recorder.sessions
        settlement = SessionSettlement(sessions, trainer, EnvironmentCalls(env, RunStatus()), lambda: None)
        for ticket in (1, 2):
            await runner.run(spec(ticket), TokenBudget(3))
        trainer.ends(1, "trained", WeightVersion(1, 1))
        trainer.ends(2, "trained", WeightVersion(1, 2))
        trainer.add(ledger.rollback(1, 2))
        await settlement.settle()
        assert sessions.describe() == {"trained": 1, "ended": 1}
        trainer.ends(2, "trained", WeightVersion(2, 2))
        await settlement.settle()
        assert sessions.describe() == {"trained": 2}
