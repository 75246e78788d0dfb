"""Conversation of a grid game: budgets of turns and actions, action protocol, rewards, demonstrations.

A game implements only its rules (`Game`); this module determines, for all games, what a model reads and what it is
rewarded for. Invariant: the reward of a step is the sum of its reward components.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.env.environments.games import grl
from services.env.environments.games.actions import ActionProtocol, Style
from services.env.environments.games.layouts import MAX_DISTINCT, Layouts
from services.env.episode_types import (
    EVAL,
    MAX_REWARD,
    TRAIN,
    Demonstration,
    Info,
    Message,
    StepResult,
    assistant,
    user,
)

type Talk = Literal["chat", "bare"]

_MAX_TEXT = 20_000
_GRL_TURN = "Turn {turn_number}\n{state}\n{actions_remaining} actions left."


class GameConfig(BaseModel):
    """Settings that all games share.

    `talk: bare` sends only the board, for models too small to read instructions. `distinct_train` draws every training
    layout once (evaluation layouts always are), which balances easy and hard ones; layouts are then drawn in order.

    `prompt` replaces the instructions; `turn_prompt` is the text of a turn, in which {turn_number}, {actions_remaining}
    and {state} are filled in. With `protocol: grl`, answers are read and counted as GRL's agents do, with a thought
    before them if `think` is set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    talk: Talk = "chat"
    protocol: Style = "answer"
    think: bool = True
    system_prompt: str = Field(default="", max_length=_MAX_TEXT)
    prompt: str = Field(default="", max_length=_MAX_TEXT)
    turn_prompt: str = Field(default="", max_length=_MAX_TEXT)
    max_turns: int = Field(default=6, ge=1, le=100)
    max_actions_per_turn: int = Field(default=5, ge=1, le=100)
    max_actions: int = Field(default=10, ge=1, le=1000)
    demo_actions_per_turn: int = Field(default=5, ge=1, le=100)
    format_penalty: float = Field(default=-0.1, ge=-MAX_REWARD, le=0)
    train_tasks: int = Field(default=100_000, ge=1, le=2**31)
    eval_tasks: int = Field(default=256, ge=1, le=MAX_DISTINCT)
    distinct_train: bool = False

    @model_validator(mode="after")
    def _drawable(self) -> GameConfig:
        if self.distinct_train and self.train_tasks > MAX_DISTINCT:
            raise ValueError(f"distinct_train allows at most train_tasks={MAX_DISTINCT}, not {self.train_tasks}")
        return self

    @property
    def budget(self) -> int:
        """Most actions of one episode."""
        return min(self.max_actions, self.max_turns * self.max_actions_per_turn)

    @property
    def counts(self) -> dict[str, int]:
        """Tasks by split."""
        return {TRAIN: self.train_tasks, EVAL: self.eval_tasks}


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """Result of one action: reward by component, `over` if the game has ended, `won` if it is won.

    `legal`: the action could be carried out.
    """

    rewards: Mapping[str, float]
    over: bool
    won: bool
    legal: bool = True


class Game(Protocol):
    """Rules of one board in play."""

    def render(self) -> str:
        """The board as text."""
        ...

    def act(self, action: str) -> MoveOutcome:
        """Play a legal action by name. Not called once the game is `over`."""
        ...

    def plan(self) -> Sequence[str] | None:
        """A shortest sequence of actions that wins without random events, or None."""
        ...


@dataclass(slots=True)
class PlayedTurn:
    """Actions played in a turn, their rewards by component, and their sum in order.

    `legal`: all actions of the turn were played, and none was impossible.
    """

    actions: list[str] = field(default_factory=list[str])
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    total: float = 0.0
    won: bool = False
    over: bool = False
    legal: bool = True

    def add(self, action: str, outcome: MoveOutcome) -> None:
        self.actions.append(action)
        for name, reward in outcome.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + reward
        self.total += sum(outcome.rewards.values())
        self.won, self.over, self.legal = outcome.won, outcome.over, self.legal and outcome.legal

    def reward_text(self) -> str:
        """The sum as GRL writes it, which adds up integers where all rewards are."""
        is_whole = all(float(reward).is_integer() for reward in self.rewards.values())
        return str(int(self.total) if is_whole else self.total)


@dataclass(slots=True)
class GameEpisode:
    """A game played through messages. `intro` is the text before the first board (empty with `talk: bare`)."""

    game: Game
    config: GameConfig
    protocol: ActionProtocol
    intro: str = ""
    turns: int = 0
    played: int = 0
    tools: Sequence[Mapping[str, Any]] = field(default=())

    @property
    def opening(self) -> tuple[Message, ...]:
        asked = user(self.intro + self._turn())
        if not self.config.system_prompt:
            return (asked,)
        return {"role": "system", "content": self.config.system_prompt}, asked

    def step(self, message: Message) -> StepResult:
        reply = self.protocol.read(message["content"])
        self.turns += 1
        turn = self._play(reply.actions)
        fault = reply.fault or ("invalid_action" if self._follows_grl and not turn.legal else None)
        penalty: dict[str, float] = {} if fault is None else {"format": self.config.format_penalty}
        rewards = penalty | turn.rewards
        spent = self.turns >= self.config.max_turns or self.played >= self.config.max_actions
        notice = self._notice(turn, is_read=fault is None, ended=turn.over or spent)
        return StepResult(
            messages=(user(notice + self._turn()),),
            reward=math.fsum(rewards.values()),
            terminated=turn.over,
            truncated=spent and not turn.over,
            info=Info(rewards, turn.won, fault, {"actions": turn.actions, "actions_left": self._actions_left}),
        )

    @property
    def _follows_grl(self) -> bool:
        return self.protocol.style == "grl"

    @property
    def _actions_left(self) -> int:
        return max(0, self.config.max_actions - self.played)

    def _turn(self) -> str:
        template = self.config.turn_prompt or (_GRL_TURN if self._follows_grl else "")
        if not template:
            return self.game.render()
        return grl.fill(template, self.turns + 1, self._actions_left, self.game.render())

    def _play(self, actions: Sequence[str]) -> PlayedTurn:
        """Play until the actions, the budget or the game end. GRL lets a turn exceed the budget."""
        turn = PlayedTurn()
        for action in actions if self._follows_grl else actions[: self._actions_left]:
            turn.add(action, self.game.act(action))
            self.played += 1
            if turn.over:
                break
        if self.protocol.raw:  # GRL counts the words of a turn, played or not
            self.played += len(actions) - len(turn.actions)
            turn.legal &= len(turn.actions) == len(actions)
        return turn

    def _notice(self, turn: PlayedTurn, *, is_read: bool, ended: bool) -> str:
        if self._follows_grl:
            return f"Reward: \n{turn.reward_text()}\n "
        if self.config.talk == "bare" or ended or self.config.turn_prompt:
            return ""
        left = f"{self.config.max_turns - self.turns} turns and {self._actions_left} actions left.\n"
        if is_read:
            return left
        return f"Not a valid answer; write {self.protocol.write(self.protocol.names[:2])}.\n{left}"


@dataclass(frozen=True, slots=True)
class GameEnvironment[C: GameConfig, L]:
    """Base of environments with drawn layouts; subclasses add `reset` and `demonstration`."""

    config: C
    layouts: Layouts[L]
    protocol: ActionProtocol
    splits: tuple[str, ...] = (TRAIN, EVAL)

    def num_tasks(self, split: str) -> int:
        return self.layouts.count(split)

    def task(self, split: str, index: int) -> str:
        return f"{split}/{index}@{self.layouts.get(split, index).digest}"

    def make_episode(self, game: Game, rules: str, n_named: int | None = None) -> GameEpisode:
        """An episode of `game` with its instructions; for `n_named` see `instructions`."""
        intro = instructions(rules, self.config, self.protocol, n_named)
        return GameEpisode(game, self.config, self.protocol, intro)


def instructions(rules: str, config: GameConfig, protocol: ActionProtocol, n_named: int | None = None) -> str:
    """Text before the first board: the rules, then the protocol and the budget.

    Args:
        n_named: number of actions to list, if they are self-explanatory; by default all.
    """
    if config.talk == "bare":
        return ""
    if config.prompt:
        return f"{config.prompt}\n"
    example = protocol.write(protocol.names[:2])
    named = protocol.names[:n_named]
    more = ", …" if len(named) < len(protocol.names) else ""
    return (
        f"{rules}\nActions: {', '.join(named)}{more}. Answer with up to "
        f"{config.max_actions_per_turn} actions a turn, "
        f"like {example}. You have {config.max_turns} turns and {config.max_actions} actions.\n"
    )


def demonstrate(episode: GameEpisode) -> Demonstration:
    """Play `episode` along the game's plan, computed once because the game is not random."""
    planned = episode.game.plan() or ()
    return play(episode, lambda: planned[episode.played :])


def play(episode: GameEpisode, choose: Callable[[], Sequence[str] | None]) -> Demonstration:
    """Play `episode` by the actions that `choose` returns each turn."""
    messages = list(episode.opening)
    while wanted := choose():
        chunk = wanted[: _chunk(len(wanted), episode)]
        messages.append(assistant(episode.protocol.write(chunk)))
        result = episode.step(messages[-1])
        if result.over:
            return Demonstration(tuple(messages), result.info.success)
        messages.extend(result.messages)
    return Demonstration(tuple(messages), False)


def _chunk(left: int, episode: GameEpisode) -> int:
    """Number of actions of the next turn: as configured, or more if the turns would not suffice."""
    turns = episode.config.max_turns - episode.turns
    return min(episode.config.max_actions_per_turn, max(episode.config.demo_actions_per_turn, -(-left // turns)))


def protocol_of(names: Sequence[str], config: GameConfig, first: int = 0, *, raw: bool = False) -> ActionProtocol:
    """Action protocol of the settings. Args: first, raw: see `ActionProtocol`."""
    return ActionProtocol(tuple(names), config.protocol, config.max_actions_per_turn, config.think, first, raw)
