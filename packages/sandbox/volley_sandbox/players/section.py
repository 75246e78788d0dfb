"""Section `services.env.players` of the configuration: others who play seats of games against the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, JsonValue, model_validator

from shared.reward_schema import Name, RewardServer
from shared.section import PackageSection, Section
from shared.types import MAX_SEAT

_SET_BY_GAME = {"messages", "model", "stream", "n", "seed"}


class SeatPlayer(Section):
    """A model on a server of `services.env.players.servers`, which plays a seat in a `share` of the tasks.

    `request` adds fields to the request, such as `temperature`, and removes those that it sets to null. A new `version`
    ignores stored answers.
    """

    server: Name
    model: Annotated[str, Field(min_length=1, max_length=256)] = "policy"
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    request: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    version: Annotated[str, Field(max_length=64)] = ""

    @model_validator(mode="after")
    def _sendable(self) -> SeatPlayer:
        if taken := _SET_BY_GAME & self.request.keys():
            raise ValueError(f"request cannot set {', '.join(sorted(taken))}")
        return self


class PlayersSection(PackageSection):
    """Players of seats in environments that have some: an older version of the policy, or any other model.

    `games` has the players of an environment by seat. In each task at most one seat has one; the policy plays the
    others. `servers` are OpenAI-compatible servers, such as `volley serve RUN@VERSION`.
    """

    reason = "an opponent decides what is learned"
    servers: dict[Name, RewardServer] = Field(default_factory=dict[str, RewardServer])
    games: dict[str, dict[Annotated[str, Field(min_length=1, max_length=MAX_SEAT)], SeatPlayer]] = Field(
        default_factory=dict[str, dict[str, SeatPlayer]]
    )

    @model_validator(mode="after")
    def _consistent(self) -> PlayersSection:
        for env, players in self.games.items():
            for seat, player in players.items():
                if player.server not in self.servers:
                    raise ValueError(
                        f"services.env.players.games.{env}.{seat}.server={player.server} is none of"
                        " services.env.players.servers"
                    )
            if (total := sum(player.share for player in players.values())) > 1:
                raise ValueError(f"services.env.players.games.{env}: the shares of its seats add up to {total:g} > 1")
        return self

    def findings(self, config: Any) -> Iterator[str]:
        for env in self.games.keys() - {name for one in config.data.environments for name in _names(one)}:
            yield f"services.env.players.games.{env} has no effect: the run plays {', '.join(config.data.environments)}"

    def of(self, env: str) -> dict[str, SeatPlayer]:
        """Return the players of an environment by seat; NAME@VERSION has those of NAME unless it has its own.

        An environment that the configuration names by a file NAME.py is NAME-DIGEST@1.
        """
        return next((self.games[name] for name in _names(env) if name in self.games), {})


def _names(env: str) -> tuple[str, str, str]:
    bare = env.partition("@")[0]
    return env, bare, bare.rpartition("-")[0]
