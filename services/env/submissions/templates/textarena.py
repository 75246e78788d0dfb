# /// script
# requires-python = ">=3.12"
# dependencies = ["textarena==0.7.4", "numpy>=2"]
# ///
"""A game of TextArena. The model is one of its players; the others' moves are drawn from those that the game accepts.

Games that download word lists (Wordle, Hangman, …) cannot be played: a sandbox has no network.
"""

import copy
import hashlib
import random
import re
import sys
from types import ModuleType


class Absent(ModuleType):
    """In place of packages that TextArena imports for all games: those that use them cannot be played here, and without
    them an episode begins four times as fast.
    """

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *arguments, **more):
        raise RuntimeError(f"this game uses {self.__name__}, which needs the network: it cannot be played in a sandbox")


for name in ("nltk", "nltk.corpus", "openai", "requests", "websockets"):
    sys.modules[name] = Absent(name)

import textarena  # noqa: E402

TRIES = 16  # other seeds that are looked at until a start belongs to the split
MAX_MOVES = 500  # of the others, one after the other


class TextArena:
    """Args: game: an id of TextArena's registry; players: how many; seat: which of them the model is; opponent: the
    moves that the others draw from, all that stand in square brackets in what they read if it is left out; instruction:
    a system message; train_tasks, eval_tasks: sizes of the splits.
    """

    def __init__(
        self,
        game="GuessTheNumber-v0",
        players=None,
        seat=0,
        opponent=(),
        instruction="",
        train_tasks=10_000,
        eval_tasks=200,
    ):
        if game not in textarena.envs.registration.ENV_REGISTRY:
            known = (one for one in textarena.envs.registration.ENV_REGISTRY if not one.endswith(("-raw", "-train")))
            raise ValueError(f"TextArena has no game {game!r}; it has: {', '.join(known)}")
        self.splits = {"train": train_tasks, "eval": eval_tasks}
        self.game, self.players, self.seat, self.opponent = game, players, seat, list(opponent)
        self.instruction = instruction

    def reset(self, split, index, seed):
        """The start of a task is made from (split, index); `seed` decides what is random after it."""
        for attempt in range(TRIES):
            first = self._start(_number(f"{split}/{index}/{attempt}"))
            if (_number(first) & 1) == (split != "train"):
                break
        else:  # all starts read alike: the splits differ in what the game hides
            first = self._start(_number(f"{split}/{index}/0"))
        _seed(_number(f"{split}/{index}/{seed}"))
        system = [{"role": "system", "content": self.instruction}] if self.instruction else []
        return [*system, {"role": "user", "content": first}]

    def step(self, text):
        state = self.env.state
        done, _ = self.env.step(action=text)
        wrong = not done and state.error_count > 0 and state.current_player_id == self.seat
        if not done and not wrong:
            done = self._others()
        if not done:
            return self._news(), 0.0, False, False, {"error": "invalid_action" if wrong else None}
        rewards, game_info = self.env.close()
        mine = game_info[self.seat]
        forfeited = any(game_info[player].get("invalid_move") for player in rewards if player != self.seat)
        reward = rewards[self.seat]
        if not isinstance(reward, (int, float)):  # some games say why a move was invalid in the reward's place
            reward = -1.0
        reward = 0.0 if forfeited else float(reward)  # nobody learns from an opponent that cannot play
        info = {"success": reward >= 1, "reason": str(mine.get("reason", "")), "forfeited": forfeited}
        return "", reward, True, False, {**info, "error": "invalid_action" if mine.get("invalid_move") else None}

    def _start(self, seed):
        _seed(seed)
        self.env = textarena.make(self.game)
        players = self.players or self._players()
        if not 0 <= self.seat < players:
            raise ValueError(f"seat is {self.seat}, and {self.game} has {players} players, counted from 0")
        self.env.reset(num_players=players, seed=seed)
        self.read = ""
        if self._others():
            raise ValueError(f"{self.game} was over before it was player {self.seat}'s turn")
        return self._news()

    def _players(self):
        """The least number that the game takes."""
        for players in (1, 2, 3, 4, 5, 6):
            try:
                textarena.make(self.game).reset(num_players=players, seed=0)
            except (AssertionError, ValueError):
                continue
            return players
        raise ValueError(f"players has to be set: {self.game} takes none of 1 to 6")

    def _news(self):
        """What the model has not read yet; a game that shows itself anew each time is shown whole."""
        _, seen = self.env.get_observation()
        seen = seen if isinstance(seen, str) else "\n".join(str(part[1]) for part in seen)
        news = seen.removeprefix(self.read)
        self.read = seen
        return news.strip() or seen.strip()

    def _others(self):
        """Plays until it is the model's turn; whether the game is over."""
        for _ in range(MAX_MOVES):
            if self.env.state.done or self.env.state.current_player_id == self.seat:
                return self.env.state.done
            _, seen = self.env.get_observation()
            self.env.step(action=self._drawn(str(seen)))
        raise RuntimeError(f"{self.game}: the others' moves lead nowhere; name moves that it accepts in `opponent`")

    def _drawn(self, seen):
        """A move that the game accepts, found by trying them on a copy of it."""
        moves = self.opponent or list(dict.fromkeys(re.findall(r"\[[^\[\]\n]{1,40}\]", seen)))
        random.shuffle(moves)
        drawn, before = random.getstate(), self.env.state
        for move in moves:
            trial = copy.deepcopy(self.env)
            trial.step(action=move)
            random.setstate(drawn)
            if not trial.state.game_info[before.current_player_id].get("invalid_move") and trial.state.error_count == 0:
                return move
        return moves[0] if moves else "[pass]"


def _seed(seed):
    """The games draw from the global generators; a process plays one episode."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:  # few games use it
        numpy.random.seed(seed)


def _number(text):
    return int.from_bytes(hashlib.blake2b(str(text).encode(), digest_size=4).digest(), "big") >> 1
