"""A counting echo environment in OpenEnv's own server: python echo_server.py PORT SESSIONS.

Runs in a Python that has OpenEnv's package and nothing of this project.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

N_STEPS = 1000


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    text: str


class RepeatingEnvironment(Environment[EchoAction, EchoObservation, State]):
    """The first observation is the seed. An episode ends after N_STEPS steps; the last has reward 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> EchoObservation:
        self._state = State(episode_id=episode_id)
        return EchoObservation(text=f"seed {seed}")

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        self._state.step_count += 1
        over = self._state.step_count >= N_STEPS or action.message == "stop"
        text = f"{self._state.step_count}: {action.message}"
        return EchoObservation(text=text, reward=float(over), done=over)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(
        RepeatingEnvironment, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=int(sys.argv[2])
    )
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
