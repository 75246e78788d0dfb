"""Games of several seats: each has a conversation, tokens and a reward of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.groups import run_group
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.servers.balancer import VersionBounds
from shared.clients.env import Opening, StepReply
from shared.errors import DecodeError
from shared.seats import by_seat
from shared.types import Group, Trajectory
from tests.orchestrator.fakes import (
    BOUNDS,
    Say,
    ScriptedEngine,
    ScriptedEnv,
    balancer_of,
    dispatcher_of,
    plan,
    runner_of,
    spec,
)
from tests.orchestrator.test_partials import MemoryStore, Process, RememberingEnv
from tests.support.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_id
SEATS = ("x", "o")
WON = {"x": 1.0, "o": -1.0}


def heard(text: str, seat: str, reward: float = 0.0) -> StepReply:
    return StepReply([{"role": "user", "content": text}], reward, False, False, seat=seat)


def over(rewards: dict[str, float] | None = WON, **changed) -> StepReply:
    return StepReply([], 0.0, True, False, rewards=rewards, **changed)


@dataclass
class Game(ScriptedEnv):
    """Answers with `replies`, turn by turn, in each of its episodes."""

    replies: Sequence[StepReply] = field(default_factory=list)
    seats: Sequence[str] = SEATS
    first: str = "x"

    async def create(
        self, request_id: str, env: str, split: str, index: int, *, seed: int, snapshot: Any = None
    ) -> Opening:
        opening = await super().create(request_id, env, split, index, seed=seed)
        return replace(opening, seats=self.seats, seat=self.first)

    async def step(self, episode_id: str, request_id: str, content: str) -> StepReply:
        self.texts.append(content)
        self.open[episode_id] += 1
        return self.replies[self.open[episode_id] - 1]


class RememberingGame(RememberingEnv, Game):
    pass


def said(*texts: str) -> list[Say]:
    return [Say([*TOKENIZER.encode(text), END]) for text in texts]


def play(game: Game, engine: ScriptedEngine | None = None, bounds: TokenBounds = BOUNDS) -> Trajectory:
    budget = TokenBudget(bounds.max_attempts)
    made = asyncio.run(runner_of(game, balancer_of(engine or ScriptedEngine()), bounds).run(spec(), budget))
    made.validate()
    (decoded,) = Group.decode(Group(1, made.env, made.task, (made,)).encode()).trajectories
    assert decoded.seats == made.seats
    return made


def text_of(trajectory: Trajectory) -> str:
    return TOKENIZER.decode(trajectory.token_ids.tolist())


def rendered(*messages: tuple[str, str]) -> str:
    return TOKENIZER.decode(TOKENIZER.render_prompt([{"role": role, "content": text} for role, text in messages]))


def test_each_seat_reads_its_own_conversation_and_has_its_own_reward() -> None:
    game = Game(prompt="begin", replies=[heard("x said A", "o"), heard("o said B", "x", 0.25), over()])
    engine = ScriptedEngine(said("A", "B", "C"))
    made = play(game, engine)
    assert (made.seats, game.texts, made.status, made.end) == (("x", "o"), ["A", "B", "C"], "completed", "answered")
    seats = by_seat(made)
    end = TOKENIZER.decode([END])
    asked = [("user", "begin"), ("assistant", "A"), ("user", "o said B")]
    assert text_of(seats["x"]) == rendered(*asked) + "C" + end
    assert text_of(seats["o"]) == rendered(("user", "x said A")) + "B" + end
    assert {seat: one.reward for seat, one in seats.items()} == {"x": 1.0, "o": -0.75}
    assert [turn.reward for turn in seats["x"].turns if turn.role == "assistant"] == [0.0, 1.0]
    assert (made.reward, made.reward_components) == (0.25, {"x": 1.0, "o": -1.0})
    assert made.success
    assert not any(one.branches for one in seats.values())
    assert sum(one.n_sampled for one in seats.values()) == made.n_sampled == sum(map(len, engine.outputs))


def test_prompts_of_a_seat_continue_exactly_what_it_has_sampled() -> None:
    game = Game(replies=[heard("1", "o"), heard("2", "x"), heard("3", "o"), over()])
    engine = ScriptedEngine()
    seats = by_seat(play(game, engine))
    for number, prompt in enumerate(engine.prompts):
        whole = seats[SEATS[number % 2]].token_ids
        assert whole[: len(prompt)].tolist() == prompt.tolist()


def test_seats_that_read_the_same_sample_with_seeds_of_their_own() -> None:
    engine = ScriptedEngine()
    play(Game(prompt="same", replies=[heard("same", "o"), over()]), engine)
    assert engine.prompts[0].tolist() == engine.prompts[1].tolist()
    assert engine.params[0]["sampling_seed"] != engine.params[1]["sampling_seed"]


def test_a_seat_may_move_twice_and_another_may_begin() -> None:
    game = Game(first="o", replies=[heard("again", "o"), heard("now you", "x"), over()])
    made = play(game)
    assert made.seats == ("o", "x")
    assert [turn.role for turn in by_seat(made)["o"].turns].count("assistant") == 2


def test_a_seat_that_never_moves_has_no_tokens_and_its_reward_trains_nothing() -> None:
    made = play(Game(replies=[over()]))
    assert (made.seats, made.reward, made.reward_components) == (("x",), 1.0, {"x": 1.0})


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        ([heard("?", "z")], "turn of 'z'; its seats are x, o"),
        ([heard("?", "O")], "turn of 'O'"),
        ([StepReply([{"role": "user", "content": "?"}], 0.0, False, False)], "turn of None"),
        ([replace(heard("?", "o"), rewards=WON)], "its episode goes on"),
        ([over(None)], "rewards of none"),
        ([over({"x": 1.0})], "rewards of x; its seats are x, o"),
        ([over({**WON, "z": 0.0})], "rewards of x, o, z"),
        ([StepReply([], 0.0, False, True)], "rewards of none"),
    ],
)
def test_wrong_seats_and_rewards_fail_the_episode_and_are_never_data(replies: list[StepReply], why: str) -> None:
    with pytest.raises(DecodeError, match="demo") as raised:
        play(Game(replies=replies))
    assert why in raised.value.detail
    assert "info[" in raised.value.hint


def test_a_game_that_a_bound_of_ours_ends_has_no_rewards() -> None:
    """Neither at the last turn, nor if a seat's first prompt does not fit the context."""
    forever = [heard("go", SEATS[(n + 1) % 2]) for n in range(9)]
    by_turns = play(Game(replies=forever))
    assert (by_turns.status, by_turns.end, by_turns.reward) == ("truncated", "turns", 0.0)
    long = play(Game(replies=[heard("word " * 300, "o")]))
    assert (long.status, long.end, long.seats) == ("truncated", "context", ("x",))


def test_left_truncation_starts_another_sequence_of_the_same_seat() -> None:
    bounds = TokenBounds(80, 16, 12, 5.0, 3, drops_oldest=True)
    game = Game(replies=[*(heard("go on " * 3, SEATS[(n + 1) % 2]) for n in range(7)), over()])
    made = play(game, ScriptedEngine(said(*["A B C D E"] * 8)), bounds)
    assert made.seats == tuple(sorted(made.seats, reverse=True))
    seats = by_seat(made)
    assert all(len(one.branches) >= 1 for one in seats.values())
    assert {seat: one.reward for seat, one in seats.items()} == WON
    for one in seats.values():
        one.validate()


def test_the_groups_of_a_ticket_hold_all_seats() -> None:
    game = Game(replies=[heard("1", "o"), over()])
    group = asyncio.run(run_group(dispatcher_of(game, balancer_of(ScriptedEngine())), plan(4), 1, VersionBounds()))
    assert [one.seats for one in group.trajectories] == [SEATS] * 4
    group.validate()


@pytest.mark.parametrize("is_env_lost", [False, True])
async def test_a_killed_orchestrator_goes_on_from_the_turns_of_all_seats(is_env_lost: bool) -> None:
    replies = [heard("1", "o"), heard("2", "x"), heard("3", "o"), over()]

    async def made(process: Process) -> Group:
        return await run_group(process.dispatcher, plan(3), 1, VersionBounds(0))

    calm = await made(await Process(MemoryStore(), RememberingGame(replies=replies), ScriptedEngine()).begin())
    store, game, engine = MemoryStore(), RememberingGame(held_at=3, replies=replies), ScriptedEngine()
    first = asyncio.ensure_future(made(await Process(store, game, engine).begin()))
    async with asyncio.timeout(20):
        while len([row for row in store.turns() if row[2] == 3]) < 3:
            await asyncio.sleep(0.002)
    if is_env_lost:
        game = RememberingGame(replies=replies)
    game.go.set()
    after = ScriptedEngine()
    again = await made(await Process(store, game, after).begin())
    first.cancel()
    await asyncio.wait([first])
    assert len(after.outputs) == 3
    for one, other in zip(calm.trajectories, again.trajectories, strict=True):
        for a, b in zip(one.sequences(), other.sequences(), strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert (a.versions, a.turns) == (b.versions, b.turns)
        assert (one.seats, one.reward) == (other.seats, other.reward)
