"""Games in which others play a seat: each is asked with what its seat has read and said so far.

To the policy such a game is one whose environment plays that seat. The seat has no tokens, and its rewards train
nothing. An answer is stored before it is played, so an episode that is played again meets the same moves.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.env.backend import LiveEpisode, SeatedEpisode
from services.env.episode_types import Demonstration, Message, StepResult, assistant
from shared.errors import Busy, VolleyError
from shared.process import telemetry
from shared.text import well_formed
from volley_sandbox.backends.submitted import SubmittedBackend
from volley_sandbox.players.section import PlayersSection, SeatPlayer
from volley_sandbox.rewards.judge import completion
from volley_sandbox.rewards.servers import Answer, AskedServer, Question
from volley_sandbox.rewards.store import RewardStore

_log = telemetry.Log("players")
_MOST_OPENINGS = 8
"""Most games that are begun until the policy has a turn: a player may end a game with its first move."""


@dataclass(frozen=True, slots=True)
class PlayedBackend:
    """A submitted environment whose seats others may play. Args: players: by seat; servers: by name."""

    inner: SubmittedBackend
    players: Mapping[str, SeatPlayer]
    servers: Mapping[str, AskedServer]
    unknown: set[str] = field(default_factory=set[str])

    async def splits(self) -> tuple[str, ...]:
        return await self.inner.splits()

    async def num_tasks(self, split: str) -> int:
        return await self.inner.num_tasks(split)

    async def task(self, split: str, index: int) -> str:
        return await self.inner.task(split, index)

    async def demonstration(self, split: str, index: int) -> Demonstration:
        return await self.inner.demonstration(split, index)

    def stuck_reason(self) -> str | None:
        return self.inner.stuck_reason()

    async def reset(self, split: str, index: int, seed: int) -> LiveEpisode:
        """Begin a game. Raises as the environment, and as `AskedServer.ask`."""
        seat = self._seat(split, index)
        for number in range(_MOST_OPENINGS):
            episode = await self.inner.reset(split, index, seed)
            if not isinstance(episode, SeatedEpisode) or seat not in episode.seats:
                self._note(seat, episode)
                return episode
            player = self.players[seat]
            game = PlayedEpisode(episode, seat, player, self.servers[player.server], f"{seed}/{number}")
            try:
                if await game.begin():
                    return game
            except BaseException:
                await asyncio.shield(game.close())
                raise
            await game.close()
        raise VolleyError(f"the player of {seat} ended {_MOST_OPENINGS} games of {split}/{index} with its first move")

    def _note(self, seat: str, episode: LiveEpisode) -> None:
        """Log once that a task lacks a seat that has a player."""
        if seat and seat not in self.unknown:
            self.unknown.add(seat)
            known = list(episode.seats) if isinstance(episode, SeatedEpisode) else []
            _log.warning("a seat with a player is not in the task", seat=seat, task=episode.task, seats=known)

    def _seat(self, split: str, index: int) -> str:
        """Return the seat that has a player in this task; "" if none has. All episodes of a group have the same."""
        at = random.Random(f"{split}/{index}").random()
        for seat, player in self.players.items():
            if (at := at - player.share) < 0:
                return seat
        return ""


@dataclass(slots=True)
class PlayedEpisode:
    """A game with one seat's player. `heard` is that seat's conversation, `opening` what the policy reads first."""

    inner: Any  # a LiveEpisode that is a SeatedEpisode
    player_seat: str
    player: SeatPlayer
    server: AskedServer
    seed: str
    heard: list[Message] = field(default_factory=list[Message])
    opening: tuple[Message, ...] = ()
    seat: str = ""

    @property
    def task(self) -> str:
        return self.inner.task

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.inner.tools

    @property
    def database(self) -> str | None:
        return self.inner.database

    @property
    def seats(self) -> Sequence[str]:
        return [seat for seat in self.inner.seats if seat != self.player_seat]

    async def begin(self) -> bool:
        """Play until the turn is the policy's; return False if the game is over before."""
        self.opening, self.seat = self.inner.opening, self.inner.seat
        if self.seat == self.player_seat:
            result = await self._played(self.opening)
            self.opening, self.seat = result.messages, str(result.info.extra.get("seat", ""))
            return not result.over
        return True

    async def step(self, message: Message) -> StepResult:
        """Play the policy's move, and those of the player after it. Rewards of the player's moves are left out."""
        own = result = await self.inner.step(message)
        if not own.over and own.info.extra.get("seat") == self.player_seat:
            result = await self._played(own.messages)
        extra = dict(result.info.extra)
        if isinstance(rewards := extra.get("rewards"), Mapping):
            extra["rewards"] = {seat: reward for seat, reward in rewards.items() if seat != self.player_seat}
        return replace(result, reward=own.reward, info=replace(own.info, success=result.info.success, extra=extra))

    async def close(self) -> None:
        await self.inner.close()

    async def _played(self, messages: Sequence[Message]) -> StepResult:
        """Let the player answer until the turn is another seat's, or the game is over."""
        while True:
            self.heard += messages
            said = assistant(await self._answer())
            self.heard.append(said)
            result: StepResult = await self.inner.step(said)
            if result.over or result.info.extra.get("seat") != self.player_seat:
                return result
            messages = result.messages

    async def _answer(self) -> str:
        """Ask the player for its move. Raises RewardFailed, RewardRefused, StorageUnavailable."""
        seed = random.Random(f"{self.seed}/{len(self.heard)}").getrandbits(31)
        body = {"model": self.player.model, "messages": list(self.heard), "max_tokens": 512, "seed": seed}
        body = {key: value for key, value in {**body, **self.player.request}.items() if value is not None}
        while True:
            try:
                return await self.server.ask(Question("/chat/completions", body, _said, self.player.version))
            except Busy as error:
                await asyncio.sleep(error.retry_after_s)


def _said(answer: Any) -> Answer:
    """Read a chat completion; a move may be empty, or cut. Raises ValueError."""
    made = completion(answer)
    return made._replace(judgement=well_formed(made.judgement), unusable="")


type WithPlayers = Callable[[str, SubmittedBackend], SubmittedBackend | PlayedBackend]
"""Adds the players of an environment of this full name to its backend."""


@asynccontextmanager
async def open_players(
    section: PlayersSection | None, folder: Path, ca_file: Path | None = None
) -> AsyncIterator[WithPlayers]:
    """Open the servers of the players and the stored answers in `folder`. Raises ConfigError, StorageUnavailable."""
    if section is None or not section.games:
        yield lambda _, backend: backend
        return
    servers = dict[str, AskedServer]()

    def with_players(name: str, backend: SubmittedBackend) -> SubmittedBackend | PlayedBackend:
        players = section.of(name)
        return PlayedBackend(backend, players, servers) if players else backend

    async with AsyncExitStack() as stack:
        store = stack.enter_context(await asyncio.to_thread(RewardStore, folder / "players.sqlite3"))
        for name, settings in section.servers.items():
            key = f"services.env.players.servers.{name}"
            server = AskedServer(name, settings, store, ca_file, key, what="player's server")
            servers[name] = await stack.enter_async_context(server)
        yield with_players
