"""Episodes that agents play: from the start of a program, or a claim, to a trajectory."""

import asyncio
from dataclasses import dataclass, field, replace

import openai
import pytest

from packages.agents.tests.sessions.programs import ASK, ProgramEnv, client_of, orchestrating, talk
from packages.agents.tests.sessions.recorder import MODEL, WIDE
from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.failures import AgentDied, AgentSilent, EpisodeLost, EpisodeTimeout
from services.orchestrator.episodes.partials import PartialRollouts
from services.orchestrator.servers.balancer import ServerLoad
from shared.clients.env import ProgramReply
from shared.errors import Unavailable
from tests.orchestrator.fakes import ScriptedEngine, spec, unreachable
from volley_agents.sessions import agents
from volley_agents.sessions.records import SessionResult


async def test_a_program_plays_an_episode(tmp_path):
    async with orchestrating(tmp_path, env := ProgramEnv()) as (recorder, runner):
        trajectory = await runner.run(spec(), TokenBudget(3))
        assert (trajectory.reward, trajectory.success, trajectory.status) == (1.0, True, "completed")
        assert (trajectory.end, trajectory.task, trajectory.ticket) == ("answered", "train/3", 1)
        assert sum(turn.role == "assistant" for turn in trajectory.turns) == 2
        assert [turn.reward for turn in trajectory.turns if turn.role == "assistant"] == [0.0, 1.0]
        assert trajectory.reward_components == {"right": 1.0}
        assert not env.open
        assert recorder.sessions.describe() == {"ended": 1}


async def dies(client):
    await talk(client, 1)
    raise RuntimeError("no more")


async def idles(client):
    await asyncio.sleep(60)


async def is_silent(client):
    return "done"


async def time_is_over(env, budget):
    """Let the attempt's deadline pass once the program runs."""
    while not env.programs:
        await asyncio.sleep(0.01)
    now = asyncio.get_running_loop().time()
    assert now < budget.timer.when() <= now + WIDE.timeout_s
    budget.timer.reschedule(now)


@pytest.mark.parametrize(("program", "failure"), [(dies, AgentDied), (is_silent, AgentSilent), (idles, EpisodeTimeout)])
async def test_a_failure_of_the_agent_is_no_reward(tmp_path, program, failure):
    env, budget = ProgramEnv(play=program), TokenBudget(3)
    async with orchestrating(tmp_path, env) as (recorder, runner):
        running = asyncio.create_task(runner.run(spec(), budget))
        if failure is EpisodeTimeout:
            await time_is_over(env, budget)
        with pytest.raises(failure) as found:
            await running
        assert found.value.transient
        assert not env.open
        assert not env.outputs
        assert recorder.sessions.describe() == {"void": 1}


async def test_an_agent_whose_time_ends_before_its_first_answer_is_told_what_to_raise(tmp_path, monkeypatch):
    async def ended(*_):
        return ProgramReply("exited", None, "it was ended after 60 s")

    env = ProgramEnv()
    monkeypatch.setattr(env, "run_program", ended)
    async with orchestrating(tmp_path, env) as (_, runner):
        with pytest.raises(AgentSilent, match="got no answer of the model: it was ended after 60 s") as found:
            await runner.run(spec(), TokenBudget(3))
    assert found.value.hint == "raise timeout_s of its class, or lower orchestrator.max_concurrent_episodes"


async def calls_for_ever(client):
    while True:
        await client.chat.completions.create(model=MODEL, messages=ASK)


async def test_an_agent_that_calls_for_ever_is_judged_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "_GRACE_S", 0.1)
    monkeypatch.setattr(agents, "_POLL_S", 0.05)
    bounds = replace(WIDE, max_turns=3)
    async with orchestrating(tmp_path, ProgramEnv(play=calls_for_ever), bounds) as (_, runner):
        trajectory = await runner.run(spec(), TokenBudget(3))
        assert (trajectory.end, trajectory.status, trajectory.reward) == ("turns", "truncated", 1.0)
        assert len(trajectory.branches) == 2


async def test_another_attempt_repeats_the_answers(tmp_path):
    texts = []

    async def once_more(client):
        texts.append(await talk(client, 2))
        if len(texts) == 1:
            raise RuntimeError("the first attempt dies")
        return ""

    async with orchestrating(tmp_path, ProgramEnv(play=once_more)) as (recorder, runner):
        budget = TokenBudget(3)
        with pytest.raises(AgentDied):
            await runner.run(spec(), budget)
        n_asked = len(recorder.engine.prompts)
        await runner.run(spec(), budget)
        assert texts[0] == texts[1]
        assert len(recorder.engine.prompts) == n_asked
        assert recorder.sessions.describe() == {"void": 1, "ended": 1}


async def test_a_server_that_dies_costs_neither_an_attempt_nor_a_call(tmp_path):
    engine = ScriptedEngine(failures=unreachable(1))
    async with orchestrating(tmp_path, ProgramEnv(), engine=engine) as (recorder, runner):
        recorder.balancer.add(ServerLoad("http://other", ScriptedEngine(), version=engine.version))
        trajectory = await runner.run(spec(), TokenBudget(3))
        assert (trajectory.attempt, trajectory.failures) == (0, {"ServiceUnreachable": 1})
        assert sum(turn.role == "assistant" for turn in trajectory.turns) == 2


async def test_a_call_that_no_server_survives_fails_and_no_attempt(tmp_path):
    seen = []

    async def reports(client):
        try:
            await talk(client, 1)
        except openai.InternalServerError as error:
            seen.append(error.code)
            raise

    engine = ScriptedEngine(failures=unreachable(99))
    async with orchestrating(tmp_path, ProgramEnv(play=reports), engine=engine) as (recorder, runner):
        budget = TokenBudget(3)
        probing = asyncio.create_task(keep_well(recorder.balancer))
        with pytest.raises(AgentDied):
            await runner.run(spec(), budget)
        await stop(probing)
        assert (seen, budget.used) == (["unavailable"], 0)


async def keep_well(balancer):
    while True:
        for server in balancer.servers:
            balancer.observe(server, server.version)
        await asyncio.sleep(0.005)


async def stop(running, partials=None):
    """End a task, as the end of its process does if there are `partials`."""
    if partials is not None:
        partials.stop()
    running.cancel()
    await asyncio.wait([running])


async def test_an_agent_goes_on_after_a_restart_of_the_orchestrator(tmp_path):
    go_on, asked = asyncio.Event(), asyncio.Event()
    clients = []

    async def waits(client):
        first = await client.chat.completions.create(model=MODEL, messages=ASK)
        asked.set()
        await go_on.wait()
        messages = [*ASK, first.choices[0].message.model_dump(), {"role": "user", "content": "next"}]
        return (await clients[0].chat.completions.create(model=MODEL, messages=messages)).choices[0].message.content

    env = ProgramEnv(play=waits)
    async with orchestrating(tmp_path, env, partials=(partials := PartialRollouts(None))) as (recorder, runner):
        running = asyncio.create_task(runner.run(spec(), TokenBudget(3)))
        await asked.wait()
        session = await recorder.sessions.at(spec())
        key, first = recorder.sessions.key_of(session), recorder.engine.outputs[0]
        await stop(running, partials)
        assert len(env.open) == 1
    async with orchestrating(tmp_path, env) as (recorder, runner):
        clients.append(client_of(recorder, key))
        go_on.set()
        await asyncio.sleep(0.05)  # the agent calls before its ticket is taken up again
        assert await recorder.sessions.open_tickets() == {1}
        trajectory = await runner.run(spec(), TokenBudget(3))
        sampled = trajectory.token_ids[trajectory.loss_mask == 1].tolist()
        assert sampled[: len(first)] == first
        assert len(sampled) > len(first)
        assert (len(env.created), len(env.programs), len(trajectory.branches)) == (1, 1, 0)
    async with orchestrating(tmp_path, env) as (_, runner):
        again = await runner.run(spec(), TokenBudget(3))  # its group was not published before the process ended
        assert again.token_ids.tolist() == trajectory.token_ids.tolist()
        assert again.reward == 1.0
        assert len(env.created) == 1


async def test_a_restart_of_the_environment_service_loses_its_agents(tmp_path):
    env = ProgramEnv(play=idles)
    async with orchestrating(tmp_path, env) as (recorder, runner):
        running = asyncio.create_task(runner.run(spec(), TokenBudget(3)))
        while not env.programs:
            await asyncio.sleep(0.01)
        await stop(running)
        env.open.clear()
        env.by_request.clear()
        with pytest.raises(EpisodeLost):
            await runner.run(spec(), TokenBudget(3))
        assert recorder.sessions.describe() == {"void": 1}


async def test_an_external_agent_claims_plays_and_rewards(tmp_path):
    env = ProgramEnv(kind="external", judged=False)
    async with orchestrating(tmp_path, env) as (recorder, runner), recorder.http() as http:
        running = asyncio.create_task(runner.run(spec(), TokenBudget(3)))
        claim = {"request_id": "worker/1", "wait_s": 5}
        made = await http.post("/sessions", json=claim)
        assert made.status_code == 201
        task = made.json()
        assert (task["env"], task["task"], task["messages"]) == ("demo", "train/3", ASK)
        assert (await http.post("/sessions", json=claim)).json() == task
        assert (await http.post("/sessions", json={"request_id": "worker/2"})).status_code == 204
        recorder.app.state.sessions.environments = lambda: ["demo@1"]
        for asked, status in (("demo", 204), ("demo@1", 204), ("demo@2", 404), ("dem", 404)):
            answer = await http.post("/sessions", json={"request_id": f"worker/{asked}", "env": asked})
            assert (asked, answer.status_code) == (asked, status)
        path = f"/sessions/{task['id']}"
        await talk(client_of(recorder, task["key"]))
        reward = {"reward": 0.5, "success": True, "components": {"mine": 0.5}}
        early = await http.post(f"{path}/reward", json=reward)
        assert early.status_code == 409
        assert (await http.post(f"{path}/end", json={})).json()["state"] == "ended"
        assert (await http.post(f"{path}/end", json={})).status_code == 200
        for _ in range(2):
            assert (await http.post(f"{path}/reward", json=reward)).status_code == 200
        assert (await http.post(f"{path}/reward", json={"reward": 1.0})).status_code == 409
        trajectory = await running
        assert (trajectory.reward, trajectory.success) == (0.5, True)
        shown = (await http.get(path)).json()
        assert (shown["state"], shown["calls"], shown["sequences"]) == ("ended", 2, 1)
        assert shown["reasons"] == {"first": 1}


async def test_an_external_agent_is_judged_by_what_it_sends_or_fails(tmp_path):
    env = ProgramEnv(kind="external")
    async with orchestrating(tmp_path, env) as (recorder, runner), recorder.http() as http:
        for end, outcome in (({"output": "42"}, 1.0), ({"failed": "out of memory"}, AgentDied)):
            running = asyncio.create_task(runner.run(spec(), TokenBudget(3)))
            task = (await http.post("/sessions", json={"request_id": str(outcome), "wait_s": 5})).json()
            await talk(client_of(recorder, task["key"]), 1)
            assert (await http.post(f"/sessions/{task['id']}/end", json=end)).status_code == 200
            other = await http.post(f"/sessions/{task['id']}/end", json={"output": "43"})
            assert other.status_code == 409
            if outcome is AgentDied:
                with pytest.raises(AgentDied, match="out of memory"):
                    await running
            else:
                assert (await running).reward == outcome
                await (await recorder.sessions.at(spec())).trained()
        assert env.outputs == ["42"]


async def test_settled_tickets_leave_counts(tmp_path):
    async with orchestrating(tmp_path, ProgramEnv()) as (recorder, runner):
        for ticket in (1, 2):
            await runner.run(spec(ticket), TokenBudget(3))
        unjudged = await recorder.begin(3)
        assert recorder.sessions.tickets() == {1, 2, 3}
        await recorder.sessions.settle(1, "trained")
        await recorder.sessions.settle(2, "filtered(zero_variance)")
        assert await recorder.sessions.settle(3, "failed") == [unjudged]
        first = (await recorder.sessions.find(recorder_id(recorder, 1))).record.id
        await recorder.sessions.prune()
        assert recorder.sessions.describe() == {"trained": 1, "void": 2}
        kept = await recorder.sessions.find(first)
        await kept.load()
        assert (kept.state, kept.result, kept.n_calls) == ("trained", SessionResult(1.0, True, {"right": 1.0}), 0)
    async with orchestrating(tmp_path, ProgramEnv()) as (recorder, _):
        await recorder.sessions.open_tickets()
        assert recorder.sessions.describe() == {"trained": 1, "void": 2}


def recorder_id(recorder, ticket):
    return next(s.record.id for s in recorder.sessions._sessions.values() if s.record.ticket == ticket)


async def test_tokens_of_undone_weights_begin_again(tmp_path):
    async with orchestrating(tmp_path, env := ProgramEnv(), engine=ScriptedEngine()) as (recorder, runner):
        first = await runner.run(spec(), TokenBudget(3))
        need = spec().need
        need.min_step = 1
        recorder.engine.version = replace(first.oldest(), step=1)
        for server in recorder.balancer.servers:
            server.version = recorder.engine.version
        again = await runner.run(replace(spec(), need=need), TokenBudget(3))
        assert (first.oldest().step, again.oldest().step, len(env.created)) == (0, 1, 2)


@pytest.mark.parametrize("judged", [True, False])
async def test_a_session_that_ended_without_a_call_before_a_restart_is_no_episode(tmp_path, judged):
    env = ProgramEnv(kind="external", judged=judged)
    async with orchestrating(tmp_path, env) as (recorder, runner):
        running = asyncio.create_task(runner.run(spec(), TokenBudget(3)))
        session = await recorder.sessions.claim(None, "worker/1", 5.0)
        await stop(running)
        await session.end()
        if not judged:
            await session.give_reward(SessionResult(1.0, True))
    async with orchestrating(tmp_path, env) as (recorder, runner):
        with pytest.raises(AgentSilent):
            await runner.run(spec(), TokenBudget(3))
        assert recorder.sessions.describe() == {"void": 1}


@pytest.mark.parametrize(
    ("asked", "is_there"), [("adder", True), ("adder@2", True), ("adder@1", False), ("add", False)]
)
async def test_a_claim_names_the_environment_with_or_without_its_version(tmp_path, asked, is_there):
    async with orchestrating(tmp_path, ProgramEnv(kind="external")) as (recorder, runner):
        running = asyncio.create_task(runner.run(replace(spec(), env="adder@2"), TokenBudget(3)))
        first = await recorder.sessions.claim(asked, "worker/1", 60.0 if is_there else 0.1)
        assert (first is not None) == is_there
        await stop(running)


async def test_a_claim_repeated_while_it_waits_gets_the_same_session(tmp_path):
    async with orchestrating(tmp_path, ProgramEnv(kind="external")) as (recorder, runner):
        claims = [asyncio.create_task(recorder.sessions.claim(None, "worker/1", 5.0)) for _ in range(2)]
        await asyncio.sleep(0)
        running = [asyncio.create_task(runner.run(spec(ticket), TokenBudget(3))) for ticket in (1, 2)]
        first, second = await asyncio.gather(*claims)
        assert first is second
        assert recorder.sessions.describe() == {"running": 2, "unclaimed": 1}
        for one in running:
            await stop(one)


async def test_a_second_stop_leaves_the_agents_episode(tmp_path):
    env = ProgramEnv(play=idles)
    async with orchestrating(tmp_path, env, partials=(partials := PartialRollouts(None))) as (_, runner):
        running = asyncio.create_task(runner.run(spec(), TokenBudget(3)))
        while not env.programs:
            await asyncio.sleep(0.01)
        await stop(running, partials)
    async with orchestrating(tmp_path, env, partials=partials) as (recorder, runner):
        env.delay_s = 60.0
        running = asyncio.create_task(runner.run(spec(), TokenBudget(3)))
        await recorder.sessions.open_tickets()
        await asyncio.sleep(0.1)
        await stop(running)
        assert len(env.open) == 1


async def test_an_episode_is_deleted_if_its_group_is_given_up(tmp_path):
    env = ProgramEnv(play=idles)
    async with orchestrating(tmp_path, env) as (_, runner):
        running = asyncio.create_task(runner.run(spec(), TokenBudget(3)))
        while not env.programs:
            await asyncio.sleep(0.01)
        await stop(running)
        assert not env.open


async def test_the_environment_keeps_an_episode_that_waits_for_a_claim(tmp_path):
    env, created = ProgramEnv(kind="external"), []
    async with orchestrating(tmp_path, env) as (recorder, runner):
        recorder.sessions.ttl_s = 0.2
        made = env.create

        async def create(*args, **kwargs):
            created.append(args)
            return await made(*args, **kwargs)

        env.create = create
        running = asyncio.create_task(runner.run(spec(), TokenBudget(3)))
        async with asyncio.timeout(30):
            while len(created) < 4:
                await asyncio.sleep(0.01)
        assert len(set(created)) == 1
        assert len(env.open) == 1
        env.by_request.clear()  # the service has lost it
        with pytest.raises(AgentDied, match="lost episode"):
            await running
        assert recorder.sessions.describe() == {"void": 1}


@dataclass
class MeetingEngine(ScriptedEngine):
    """Answers once four requests are at the engines that share `asked`."""

    asked: list[str] = field(default_factory=list)

    async def generate(self, input_ids, sampling, rid, **kwargs):
        self.asked.append(rid)
        while len(self.asked) < 4:
            await asyncio.sleep(0.01)
        return await super().generate(input_ids, sampling, rid, **kwargs)


async def test_calls_at_once_that_meet_one_failure_cost_one_attempt(tmp_path):
    async def asks_at_once(client):
        asking = [client.chat.completions.create(model=MODEL, messages=ASK) for _ in range(4)]
        return str(len(await asyncio.gather(*asking)))

    engine = MeetingEngine(failures=[Unavailable("out of order") for _ in range(4)])
    other = MeetingEngine(asked=engine.asked)
    async with orchestrating(tmp_path, ProgramEnv(play=asks_at_once), engine=engine) as (recorder, runner):
        recorder.balancer.add(ServerLoad("http://other", other, version=engine.version))
        trajectory = await runner.run(spec(), budget := TokenBudget(3))
        assert (trajectory.attempt, budget.used, len(trajectory.branches)) == (1, 1, 3)
        assert len(engine.failures) == 2


async def test_prompts_of_one_length_have_their_own_seeds(tmp_path):
    async def asks_others(client):
        for digit in "123":
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": digit}])
        return ""

    async with orchestrating(tmp_path, ProgramEnv(play=asks_others)) as (recorder, runner):
        await runner.run(spec(), TokenBudget(3))
        assert len({len(ids) for ids in recorder.engine.prompts}) == 1
        assert len({params["sampling_seed"] for params in recorder.engine.params}) == 3


async def test_an_outage_may_outlive_its_attempt():
    async with asyncio.timeout(10) as timer:
        outage = TokenBudget(3, timer=timer).outage()
        outage.__enter__()
        await asyncio.sleep(0)
    outage.__exit__(None, None, None)
    with TokenBudget(3, timer=timer).outage():
        pass


async def test_a_run_that_began_anew_has_no_sessions_of_the_earlier_one(tmp_path):
    async with orchestrating(tmp_path, env := ProgramEnv()) as (recorder, runner):
        await recorder.sessions.follow("first")
        first = await runner.run(spec(seed=1), TokenBudget(3))
    async with orchestrating(tmp_path, env) as (recorder, runner):
        await recorder.sessions.follow("first")
        again = await runner.run(spec(seed=1), TokenBudget(3))
        assert again.token_ids.tolist() == first.token_ids.tolist()
        await recorder.sessions.follow("second")
        await runner.run(spec(seed=2), TokenBudget(3))
        assert recorder.sessions.describe() == {"void": 1, "ended": 1}
        assert len(env.created) == 2
