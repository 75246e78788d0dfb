"""Gymnasium environments by id, with discrete actions and observations as text.

The conversation, its budgets and its action protocol are those of the games (`text_game.py`); rewards are the
environment's. gymnasium is imported with the first episode, in the thread that needs it.

A task is a start: the seed of `reset` is a hash of (id, split, index) whose lowest bit is the split, and a start
belongs to the split given by the hash of its first observation, like a layout. The episode's seed drives everything
random after the start.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue, model_validator

from services.env.environments.games.layouts import MAX_DISTINCT, DrawnLayout, Effort, Layouts, identity_form, seed_of
from services.env.environments.games.text_game import (
    GameConfig,
    GameEpisode,
    MoveOutcome,
    instructions,
    play,
    protocol_of,
)
from services.env.episode_types import EVAL, MAX_REWARD, TRAIN, Demonstration, check_task
from shared.errors import InputError, NotFound
from volley_environments.gymnasium.tabular import GreedyPolicy

if TYPE_CHECKING:
    import gymnasium

_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")
_COLOURED = re.compile(r"\x1b\[(\d+)(?:;\d+)*m([^\x1b]*)\x1b\[0m")
_NESTED = 2
"""Levels of nested colours: the letter's and the background's."""

_SEEDS = 2**31
_DRAW_EFFORT = 500
_MAX_TEXT = 20_000


class GymnasiumConfig(GameConfig):
    """Settings of a gymnasium environment.

    `id` and `make` are the arguments of `gymnasium.make`. `actions` names the actions 0, 1, …; by default a model
    writes the numbers. `rules` is the text before the first observation. `observation: render` shows the environment's
    text rendering, `space` the observation itself, `auto` the rendering if there is one.

    An episode is won if it terminates with a reward above `success_above`. With `distinct_starts: false` splits differ
    only in their seeds, for environments with few starts or one.
    """

    id: str = Field(default="Taxi-v4", pattern=r"^[\w./-]+$", max_length=100)
    make: dict[str, JsonValue] = Field(default={})
    actions: tuple[str, ...] = Field(default=(), max_length=100)
    rules: str = Field(default="", max_length=_MAX_TEXT)
    observation: Literal["auto", "render", "space"] = "auto"
    success_above: float = Field(default=0.0, ge=-MAX_REWARD, le=MAX_REWARD)
    distinct_starts: bool = True
    max_turns: int = Field(default=20, ge=1, le=100)
    max_actions: int = Field(default=100, ge=1, le=1000)
    eval_tasks: int = Field(default=50, ge=1, le=MAX_DISTINCT)

    @model_validator(mode="after")
    def _writable(self) -> GymnasiumConfig:
        if len({name.lower() for name in self.actions}) < len(self.actions):
            raise ValueError("actions must be different words")
        if any(not re.fullmatch(r"[^\s,|<>]{1,40}", name) for name in self.actions):
            raise ValueError("actions must be single words, without commas, bars and angle brackets")
        if "render_mode" in self.make:
            raise ValueError("make must not set render_mode; use observation instead")
        return self


@dataclass(frozen=True, slots=True)
class Start:
    """Result of `reset` with a seed; `text` is its first observation."""

    seed: int
    text: str


@dataclass(slots=True)
class GymnasiumGame:
    """A gymnasium environment in play. `drawn` shows its rendering, otherwise `observed` is shown."""

    env: gymnasium.Env[Any, Any]
    observed: Any
    drawn: bool
    names: Sequence[str]
    success_above: float

    def render(self) -> str:
        return _plain(str(self.env.render()))[:_MAX_TEXT] if self.drawn else _written(self.observed)

    def act(self, action: str) -> MoveOutcome:
        first = int(getattr(self.env.action_space, "start", 0))
        self.observed, reward, over, _, _ = self.env.step(first + self.names.index(action))
        return MoveOutcome({"reward": float(reward)}, bool(over), bool(over) and float(reward) > self.success_above)

    def plan(self) -> Sequence[str] | None:
        """Return None: no plan is known for environments in general; see `Gymnasium.demonstration`."""
        return None


class Gymnasium:
    """Environment of one gymnasium id.

    At the first task, raises InputError if gymnasium does not have it, or it cannot be played in text.
    """

    splits = (TRAIN, EVAL)

    def __init__(self, config: GymnasiumConfig) -> None:
        self.config = config
        self._name = f"gymnasium/{config.id}"
        self._policy: GreedyPolicy | None = None
        self._scout: GymnasiumGame | None = None
        self._planning, self._scouting = threading.Lock(), threading.Lock()
        self._starts = Layouts(
            self._name,
            self._start,
            lambda start: (start.text,),
            config.counts,
            distinct_train=config.distinct_train,
            advice="set distinct_starts to false, for splits that differ in their seeds alone",
            form=identity_form,
        )

    def num_tasks(self, split: str) -> int:
        return self._starts.count(split)

    def task(self, split: str, index: int) -> str:
        return f"{split}/{index}@{self._drawn(split, index).digest}"

    def reset(self, split: str, index: int, seed: int) -> GameEpisode:
        return self._episode(self._drawn(split, index).layout, seed)

    def demonstration(self, split: str, index: int) -> Demonstration:
        """Play the best policy, if the environment has a transition table `P` (toy_text); else raise NotFound."""
        start = self._drawn(split, index).layout
        episode = self._episode(start, 0)
        assert isinstance(episode.game, GymnasiumGame)
        inner: Any = episode.game.env
        if not hasattr(inner, "P") or not hasattr(inner, "s"):
            raise NotFound(f"{self._name} has no demonstrations", "only environments with a transition table have them")
        with self._planning:
            policy = self._policy = self._policy or GreedyPolicy(inner.P)
        names = episode.game.names
        return play(episode, lambda: [names[action] for action in policy.path(int(inner.s))])

    def _drawn(self, split: str, index: int) -> DrawnLayout[Start]:
        if self.config.distinct_starts:
            return self._starts.get(split, index)
        check_task(self._name, self._starts.counts, split, index)
        seed = seed_of(self._name, split, index, 0)
        return DrawnLayout(self._start(seed, Effort()), seed, f"{seed % _SEEDS:08x}")

    def _start(self, seed: int, effort: Effort) -> Start:
        """Make a start. All share one environment, because some are slow to build."""
        effort.spend(_DRAW_EFFORT)
        with self._scouting:
            scout = self._scout = self._scout or self._game()
            return Start(seed % _SEEDS, _started(scout, seed % _SEEDS).render())

    def _episode(self, start: Start, seed: int) -> GameEpisode:
        from gymnasium.utils import seeding

        game = _started(self._game(), start.seed)
        game.env.np_random = seeding.np_random(seed)[0]
        protocol = protocol_of(game.names, self.config)
        rules = self.config.rules or f"You act in {self.config.id}."
        return GameEpisode(game, self.config, protocol, instructions(rules, self.config, protocol))

    def _game(self) -> GymnasiumGame:
        """Build a new environment without gymnasium's step limit, not yet reset. Raises InputError."""
        import gymnasium

        config = self.config
        drawn, scout = config.observation == "render", self._scout
        settings: dict[str, Any] = dict(config.make)
        try:
            if config.observation == "auto":
                probe = scout.env if scout else gymnasium.make(config.id, disable_env_checker=True, **settings)
                drawn = "ansi" in probe.metadata.get("render_modes", ())
            if drawn:
                settings["render_mode"] = "ansi"
            env = gymnasium.make(config.id, disable_env_checker=True, **settings).unwrapped
        except (gymnasium.error.Error, TypeError, ValueError, AttributeError, ImportError) as error:
            raise InputError(f"gymnasium cannot make {config.id} with {config.make}: {_plain(str(error))}") from error
        if not isinstance(env.action_space, gymnasium.spaces.Discrete):
            raise InputError(
                f"{config.id} has actions of {env.action_space}", "choose an environment with discrete actions"
            )
        if not drawn and isinstance(env.observation_space, gymnasium.spaces.Box):
            raise InputError(
                f"{config.id} observes {env.observation_space}",
                "choose an environment with text or discrete observations",
            )
        n = int(env.action_space.n)
        if config.actions and len(config.actions) != n:
            raise InputError(f"{config.id} has {n} actions, and actions names {len(config.actions)}")
        names = config.actions or tuple(str(i) for i in range(n))
        return GymnasiumGame(env, None, drawn, names, config.success_above)


def _started(game: GymnasiumGame, seed: int) -> GymnasiumGame:
    game.observed, _ = game.env.reset(seed=seed)
    return game


def _plain(text: str) -> str:
    """Rendered text without terminal codes; a coloured part becomes {colour:part}, because colours mark the player."""

    def mark(found: re.Match[str]) -> str:
        colour = int(found[1]) % 10
        return f"{{{_COLOURS[colour]}:{found[2]}}}" if colour < len(_COLOURS) else found[2]

    for _ in range(_NESTED):
        text = _COLOURED.sub(mark, text)
    return text.strip("\n")


def _written(observed: Any) -> str:
    """Text unchanged; numbers and tuples of them as Python writes them, without numpy's types."""
    plain = observed.tolist() if hasattr(observed, "tolist") else observed
    return str(plain if not isinstance(plain, tuple) else tuple(_scalar(part) for part in plain))[:_MAX_TEXT]


def _scalar(part: Any) -> Any:
    return part.tolist() if hasattr(part, "tolist") else part
