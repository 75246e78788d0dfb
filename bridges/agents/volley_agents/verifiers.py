"""Play an environment of the package `verifiers` (0.4, `verifiers.v1`) in the sessions of a Volley run.

    python -m volley_agents.verifiers TASKSET --write-tasks tasks.py     # then: volley train … data.env=tasks.py
    python -m volley_agents.verifiers TASKSET --orchestrator http://127.0.0.1:8103

The package's own environment, harness, tools and rewards run here, unchanged. Its client calls the session's address,
where the model being trained answers and the run records every token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from importlib import metadata
from typing import Any

from volley_agents.sessions import (
    LIMITS,
    AgentFailed,
    Outcome,
    Session,
    add_arguments,
    run_of,
    split,
    task_index,
    tasks_file,
    until_stopped,
    work,
)

SUPPORTED = ("0.4",)
NEEDED = ("ModelContext", "EvalClientConfig", "load_environment", "resolve_env_config")


def load(taskset: str, settings: dict[str, Any]) -> Any:
    """Load an environment by the id of its taskset. Raises SystemExit naming what is missing."""
    vf = _package()
    data = {**settings, "taskset": {**settings.get("taskset", {}), "id": taskset}}
    try:
        return vf.load_environment(vf.resolve_env_config(data))
    except Exception as error:
        raise SystemExit(f"{taskset} cannot be loaded: {type(error).__name__}: {error}") from error


def _package() -> Any:
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        version = None
    if version is not None and version.startswith(SUPPORTED):
        import verifiers.v1 as vf

        if not (missing := [name for name in NEEDED if not hasattr(vf, name)]):
            return vf
        version = f"{version}, which lacks {', '.join(missing)}"
    found = f"verifiers {version} is installed" if version else "verifiers is not installed"
    raise SystemExit(f"{found}; this worker needs 0.4: uv pip install 'verifiers>=0.4,<0.5'")


class Player:
    """Player of a taskset's tasks.

    Args:
        env: an environment of verifiers; its `serving()` is open while episodes are played.
        tasks: its tasks, the held-out ones first.
    """

    def __init__(self, env: Any, tasks: list[Any], n_eval: int) -> None:
        self._vf, self._env, self._tasks, self._n_eval = _package(), env, tasks, n_eval

    async def play(self, session: Session) -> Outcome:
        """Play one task with the session's model. Raises AgentFailed."""
        task = self._tasks[task_index(session.place, self._n_eval)]
        variable = f"VOLLEY_SESSION_{session.id}"
        os.environ[variable] = session.key  # the package reads keys from the environment
        try:
            client = self._vf.EvalClientConfig(base_url=session.base_url, api_key_var=variable)
            (slot,) = self._env.slots(task)
            episode = await self._env.run_slot(slot, self._vf.ModelContext(model=session.model, client=client))
        finally:
            del os.environ[variable]
        return outcome_of(episode)


def outcome_of(episode: Any) -> Outcome:
    """Read the reward of an episode: the mean over the traces of agents that are trained.

    An episode that ran into the run's limit of calls or tokens has the reward that it had by then. Raises AgentFailed
    for every other error.
    """
    traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    limited = any(limit in error.message for error in errors for limit in LIMITS)
    if (not episode.ok and not limited) or not traces:
        told = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise AgentFailed(told or "the episode has no trace of an agent that is trained")
    components = dict[str, float]()
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                components[name] = components.get(name, 0.0) + float(reward.value) / len(traces)
    return Outcome(sum(float(trace.reward) for trace in traces) / len(traces), components=components)


async def _serve(given: argparse.Namespace, env: Any, tasks: list[Any]) -> None:
    run, player = run_of(given), Player(env, tasks, given.eval_tasks)
    try:
        async with env.serving():
            await work(run, player.play, given.parallel)
    finally:
        await run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Plays an environment of verifiers in the sessions of a Volley run.")
    parser.add_argument("taskset", help="id of a taskset: an installed package, or a module in this folder")
    parser.add_argument("--settings", type=json.loads, default={}, help="the environment's configuration, as JSON")
    parser.add_argument("--max-tasks", type=int, default=10_000, help="take at most so many tasks (default: 10000)")
    add_arguments(parser)
    given = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    env = load(given.taskset, given.settings)
    tasks = list(itertools.islice(env.taskset, given.max_tasks))
    sizes = split(len(tasks), given.eval_tasks, given.taskset)
    if given.write_tasks:
        given.write_tasks.write_text(tasks_file(given.taskset, *sizes), encoding="utf-8")
        return
    until_stopped(_serve(given, env, tasks))


if __name__ == "__main__":
    main()
