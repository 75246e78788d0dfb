# /// script
# requires-python = ">=3.12"
# dependencies = ["textarena==0.7.4", "numpy>=2"]
# ///
"""A game of TextArena with the model as one player, or as all of them. Others draw random moves that the game accepts.

Games that download word lists (Wordle, Hangman, …) cannot be played, because a sandbox has no network.
"""

import copy
import hashlib
import random
import re
import sys
from types import ModuleType


class Absent(ModuleType):
    """Placeholder for packages that TextArena imports for all games.

    Games that use these packages cannot be played here; without the imports an episode begins four times as fast.
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

TRIES = 16  # seeds tried until a start belongs to the split
MAX_MOVES = 500  # of the other players, in a row


class TextArena:
    """Environment of one game.

    Args:
        game: an id in TextArena's registry.
        players: number of players.
        seat: the model's number among them; "all" lets the model play against itself, in evaluations as one of them.
        opponent: moves that the other players draw from; by default all text in square brackets in what they read.
        instruction: a system message.
        train_tasks, eval_tasks: sizes of the splits.
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
        """Begin a task, which (split, index) determines; `seed` drives everything random after its start."""
        self.players = self.players or self._players()
        self.mine = [self.seat] if self.seat != "all" else [*range(self.players)]
        if self.seat == "all" and split != "train":
            self.mine = [index % self.players]
        if self.seat == "all":
            self.seats = [f"player {number}" for number in self.mine]
        for attempt in range(TRIES):
            first = self._start(_number(f"{split}/{index}/{attempt}"))
            if (_number(first) & 1) == (split != "train"):
                break
        else:  # all starts read alike; the splits differ only in the game's hidden state
            first = self._start(_number(f"{split}/{index}/0"))
        _seed(_number(f"{split}/{index}/{seed}"))
        self.instructed = set()
        return self._messages(first), self._turn()

    def step(self, text):
        state, mover = self.env.state, self.env.state.current_player_id
        done, _ = self.env.step(action=text)
        wrong = not done and state.error_count > 0 and state.current_player_id == mover
        if not done and not wrong:
            done = self._others()
        if not done:
            info = {**self._turn(), "error": "invalid_action" if wrong else None}
            return self._messages(self._news()), 0.0, False, False, info
        rewards, game_info = self.env.close()
        forfeited = any(game_info[player].get("invalid_move") for player in rewards if player not in self.mine)
        # an opponent's forfeit teaches the model nothing
        won = {player: 0.0 if forfeited else _reward(rewards.get(player, 0.0)) for player in self.mine}
        last = game_info[mover]
        info = {"reason": str(last.get("reason", "")), "forfeited": forfeited}
        info["error"] = "invalid_action" if last.get("invalid_move") else None
        if self.seat == "all":
            return "", 0.0, True, False, {**info, "rewards": {f"player {one}": reward for one, reward in won.items()}}
        return "", won[self.seat], True, False, {**info, "success": won[self.seat] >= 1}

    def _messages(self, news):
        """Put what the player whose turn it is reads into messages, the first of which is the instruction."""
        player = self.env.state.current_player_id
        begins = self.instruction and player not in self.instructed
        self.instructed.add(player)
        return [{"role": "system", "content": self.instruction}] * bool(begins) + [{"role": "user", "content": news}]

    def _turn(self):
        """Name the seat whose turn it is, if the model has several."""
        return {"seat": f"player {self.env.state.current_player_id}"} if self.seat == "all" else {}

    def _start(self, seed):
        _seed(seed)
        self.env = textarena.make(self.game)
        if self.mine[0] not in range(self.players):
            raise ValueError(f"seat is {self.seat}, and {self.game} has {self.players} players, counted from 0")
        self.env.reset(num_players=self.players, seed=seed)
        self.read = {}
        if self._others():
            raise ValueError(f"{self.game} was over before it was player {self.mine[0]}'s turn")
        return self._news()

    def _players(self):
        """Smallest number of players that the game accepts."""
        for players in (1, 2, 3, 4, 5, 6):
            try:
                textarena.make(self.game).reset(num_players=players, seed=0)
            except (AssertionError, ValueError):
                continue
            return players
        raise ValueError(f"{self.game} accepts none of 1 to 6 players; set players")

    def _news(self):
        """Text that the player has not read yet; if the game prints itself anew each time, all of it."""
        player, seen = self.env.get_observation()
        seen = seen if isinstance(seen, str) else "\n".join(str(part[1]) for part in seen)
        news = seen.removeprefix(self.read.get(player, ""))
        self.read[player] = seen
        return news.strip() or seen.strip()

    def _others(self):
        """Play until it is the model's turn. Returns True if the game is over."""
        for _ in range(MAX_MOVES):
            if self.env.state.done or self.env.state.current_player_id in self.mine:
                return self.env.state.done
            _, seen = self.env.get_observation()
            self.env.step(action=self._drawn(str(seen)))
        raise RuntimeError(
            f"{self.game}: the other players used {MAX_MOVES} moves without end; list valid moves in `opponent`"
        )

    def _drawn(self, seen):
        """Draw a move that the game accepts, tried on a copy of it."""
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


def _reward(reward):
    """Read a reward; some games put the reason for an invalid move in its place."""
    return float(reward) if isinstance(reward, (int, float)) else -1.0


def _seed(seed):
    """Seed the global generators, from which games draw; a process plays one episode."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:  # few games import it
        numpy.random.seed(seed)


def _number(text):
    return int.from_bytes(hashlib.blake2b(str(text).encode(), digest_size=4).digest(), "big") >> 1
