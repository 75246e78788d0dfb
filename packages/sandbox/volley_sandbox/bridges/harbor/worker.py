"""Run task folders by Harbor's own trials, in a process of Harbor's environment, for Volley's env service.

    HARBOR_PYTHON worker.py read SETTINGS FOLDER…        # one JSON line for each task folder
    HARBOR_PYTHON worker.py serve DESCRIPTOR SETTINGS    # the worker of a service

An episode is one `Trial` of Harbor with the agent `Player`: Harbor builds or pulls the image, starts the containers,
waits for health checks, applies users, time-outs and network policies, and runs the verifier. The agent takes its
commands from the service. Requests and answers are JSON, one a line, over the socket (see volley_sandbox.wire).

Invariants
- The end of the socket ends every trial, and so removes its containers. Containers of a worker that was killed are
  removed by the next worker that sees it has ended (see `engines`), which knows them by their names.
- A reward is Harbor's verifier's, of a container that answered after it. A container that does not is `lost`.
- Tests that have used up their time count as 0. Tests that gave no reward for any other reason give none.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import trials
from engines import ENGINES, answers, left_over, logs_size, owner_in, remove, sizes
from folders import MAX_WHY, brief, read
from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.trial.hooks import TrialEvent
from shell import DISK, Lost
from trials import EPISODE, HarborTrial, Loader, Settings, container_class

PLAYER, CONTAINER, JUDGE = "trials:Player", "trials:Container", "judging:Judge"
LOOK_S = 10.0
LATE_SOLUTION = "AgentTimeoutError"
"""Harbor's error of a solution that took longer than `agent.timeout_sec`; a model's commands are limited here."""
REFUSED = 3
"""Exit code if the environment cannot be used."""


class TrialWorker:
    """Trials of one service."""

    def __init__(self, settings: Settings, writer: asyncio.StreamWriter) -> None:
        self._settings, self._writer = settings, writer
        self._starting = asyncio.Semaphore(settings.max_starting)
        self._stopping = asyncio.Semaphore(2 * settings.max_starting)
        self._judging = asyncio.Semaphore(settings.max_judging)
        self._episodes: dict[str, HarborTrial] = {}
        self._trials: dict[str, asyncio.Task[None]] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._closed: set[str] = set()
        self._folder = Path(settings.folder)
        self._owner = owner_in(self._folder)
        self._away = self._looking = False

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer requests until the socket ends; then end every trial."""
        self._send({"ready": self._owner.name})
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch())
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    request = json.loads(line)
                    if request["call"] == "close":
                        self._close(request["episode"])
                    else:
                        group.create_task(self._serve_one(request, group))
            for number in list(self._episodes):
                self._close(number)
            watch.cancel()

    def _send(self, value: dict[str, Any]) -> None:
        self._writer.write(json.dumps(value).encode() + b"\n")

    async def _serve_one(self, request: dict[str, Any], group: asyncio.TaskGroup) -> None:
        try:
            answer = {"id": request["id"], "value": await self._answer(request, group)}
        except Lost as error:
            answer = {"id": request["id"], "lost": str(error)}
        except asyncio.CancelledError:
            answer = {"id": request["id"], "lost": "the episode was closed"}
        except Exception as error:  # noqa: BLE001 - told to the service
            answer = {"id": request["id"], "lost": brief(error)}
        with contextlib.suppress(ConnectionError):
            self._send(answer)

    async def _answer(self, request: dict[str, Any], group: asyncio.TaskGroup) -> Any:
        number = request["episode"]
        if request["call"] == "start":
            return await self._start(request, group)
        episode = self._episodes.get(number)
        if episode is None:
            return self._ended(request)
        if request["call"] == "command":
            if not episode.playing:
                raise Lost(episode.lost or "the container takes no commands any more")
            answered = asyncio.get_running_loop().create_future()
            episode.commands.put_nowait((request, answered))
            try:
                return await answered
            except Lost:
                if episode.over_disk:
                    return DISK
                raise
        return await episode.next_phase(last=request["last"])

    def _ended(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request about a trial that has ended. Raises Lost."""
        found = self._results.get(request["episode"], {"lost": "the episode has ended"})
        if "lost" in found:
            raise Lost(found["lost"])
        return DISK if request["call"] == "command" and found["over_disk"] else found

    async def _start(self, request: dict[str, Any], group: asyncio.TaskGroup) -> dict[str, Any]:
        """Start a trial; return its first instruction, or its result if no agent of the service plays it."""
        number, fresh = request["episode"], request["fresh"]
        bounds = self._starting, self._stopping, self._judging
        task = Task(request["folder"])
        episode = HarborTrial(number, task, self._settings, self._folder / number, *bounds, fresh=fresh)
        self._episodes[number] = episode
        self._trials[number] = group.create_task(self._run(number, episode, request["agent"]))
        return await episode.phase

    async def _run(self, number: str, episode: HarborTrial, agent: str) -> None:
        """Run a trial from its start to the removal of its containers."""
        EPISODE.set(episode)
        try:
            async with contextlib.AsyncExitStack() as start:
                await start.enter_async_context(self._starting)
                episode.trial = trial = await self._trial(number, episode, agent)

                async def started(event: Any) -> None:
                    await start.aclose()

                trial.add_hook(TrialEvent.AGENT_START, started)
                async with asyncio.timeout(self._settings.max_lifetime_s):
                    result = await trial.run()
            answer = await asyncio.to_thread(outcome, episode, result)
            if "lost" in answer:
                await self._look_at_engine(answer["lost"])
        except TimeoutError:
            answer = {"lost": f"the container lived longer than {self._settings.max_lifetime_s:g} s"}
        except asyncio.CancelledError:
            answer = {"lost": "the episode was closed"}
        except Exception as error:  # noqa: BLE001 - told to the service
            answer = {"lost": brief(error)}
        settle(episode, answer)
        del self._episodes[number], self._trials[number]
        if number in self._closed:
            self._closed.discard(number)
        else:
            self._results[number] = answer
        await asyncio.to_thread(shutil.rmtree, episode.place, True)

    async def _trial(self, number: str, episode: HarborTrial, agent: str) -> Any:
        """Make the trial. The task's time for the agent is Harbor's for its solution; the service counts a model's."""
        played, own = agent == "player", self._settings
        config = TrialConfig(
            task=TaskConfig(path=episode.task.task_dir),
            trial_name=number,
            trials_dir=self._folder,
            agent=AgentConfig(
                name=None if played else agent,
                import_path=PLAYER if played else None,
                override_timeout_sec=own.max_lifetime_s if played else None,
            ),
            environment=EnvironmentConfig(import_path=CONTAINER, kwargs=own.options),
            verifier=VerifierConfig(import_path=JUDGE, override_timeout_sec=own.max_lifetime_s),
        )
        trial = await Loader.create(config)
        if played:
            trial.agent.episode = episode
        return trial

    def _close(self, number: str) -> None:
        if self._results.pop(number, None) is None and (task := self._trials.get(number)) is not None:
            self._closed.add(number)
            task.cancel()

    async def _look_at_engine(self, lost: str) -> None:
        """Tell the service if the engine is away, so that it starts no trials, or is there again.

        Many trials may be lost at once, and an engine may take a minute not to answer: one look is for all.
        """
        command = ENGINES.get(self._settings.environment)
        if command is None or (lost and (self._away or self._looking)):
            return
        self._looking = True
        away = not await asyncio.to_thread(answers, command)
        self._looking = False
        if away != self._away:
            self._away = away
            self._send({"away": lost if away else ""})

    async def _watch(self) -> None:
        """Remove containers that hold more than their storage, and those that no trial has any more.

        Files below /logs lie in the trial's folder. Only the engines of this machine show them.
        """
        if (command := ENGINES.get(self._settings.environment)) is None:
            return
        while True:
            if self._away:
                await self._look_at_engine("")
            for project, number in await asyncio.to_thread(left_over, command, self._owner):
                if number not in self._episodes:
                    await asyncio.to_thread(remove, command, project)
            found = await asyncio.to_thread(sizes, command, self._owner) if self._episodes else Counter[str]()
            for number, episode in list(self._episodes.items()):
                megabytes = found[number] + await asyncio.to_thread(logs_size, episode.place)
                if megabytes > episode.storage_mb and not episode.over_disk:
                    episode.over_disk = True
                    await asyncio.to_thread(remove, command, f"{number}__env")
            await asyncio.sleep(LOOK_S)


def settle(episode: HarborTrial, answer: dict[str, Any]) -> None:
    """Answer the waiting request for the phase or for a command."""
    episode.phase.add_done_callback(lambda phase: phase.cancelled() or phase.exception())
    if not episode.phase.done():
        if "lost" in answer:
            episode.phase.set_exception(Lost(answer["lost"]))
        else:
            episode.phase.set_result(answer)
    while not episode.commands.empty():
        asked = episode.commands.get_nowait()
        if asked is not None and not asked[1].done():
            asked[1].set_exception(Lost(answer.get("lost", "the trial has ended")))


def outcome(episode: HarborTrial, result: Any) -> dict[str, Any]:
    """Rewards of a trial, with the reason if they are 0 for one; why there are none; or `lost`."""
    if episode.over_disk:
        why = f"the container's files exceeded {episode.storage_mb} MiB (environment.storage_mb)"
        return {"rewards": {}, "why": why, "over_disk": True, "unjudged": False}
    failures = [one.exception_info for one in (result, *(result.step_results or [])) if one.exception_info is not None]
    why = "; ".join(brief(one.exception_message, one.exception_type) for one in failures)
    if episode.lost:
        return {"lost": why or episode.lost}
    is_late = any(one.exception_type == LATE_SOLUTION for one in failures)
    shown = {"output": printed(episode.place), "over_disk": False}
    if unjudged := episode.unjudged or (f"{why} (agent.timeout_sec)" if is_late else ""):
        return {"rewards": {}, "why": unjudged, "unjudged": True, **shown}
    if result.verifier_result is not None or episode.why:
        rewards = result.verifier_result.rewards if result.verifier_result is not None else {}
        return {"rewards": rewards, "why": episode.why, "unjudged": False, **shown}
    return {"lost": why or "the trial gave no result"}


def printed(place: Path) -> str:
    """Ends of the outputs of solution and tests. A container may have put other things than files there."""
    paths = [path for name in ("oracle.txt", "test-stdout.txt") for path in sorted(place.rglob(name))]
    return "\n".join(text for path in paths if (text := tail(path)))[-2000:]


def tail(path: Path) -> str:
    """End of a file; empty for anything else, a link too."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            file.seek(max(0, os.fstat(file.fileno()).st_size - 1000))
            return file.read(1000).decode("utf-8", "replace")
    except OSError:
        return ""


async def serve(descriptor: int, settings: Settings) -> None:
    trials.Container = container_class(settings.environment)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=2**28)
    await TrialWorker(settings, writer).serve(reader)


def preflight(settings: Settings) -> None:
    """Raise SystemExit with the reason if the environment cannot be used here."""
    try:
        named = ":" not in settings.environment
        if named and settings.environment not in EnvironmentFactory.registered_names():
            raise ValueError(f"{settings.environment!r} is none of {', '.join(EnvironmentFactory.registered_names())}")
        container_class(settings.environment).preflight(kwargs=settings.options)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the service
        print(f"{error}"[-MAX_WHY:], file=sys.stderr)
        raise SystemExit(REFUSED) from None


def main() -> None:
    if sys.argv[1] == "read":
        settings = Settings(**json.loads(sys.argv[2]))
        preflight(settings)
        for one in sys.argv[3:]:
            print(json.dumps(read(one, settings.environment)))
    else:
        asyncio.run(serve(int(sys.argv[2]), Settings(**json.loads(sys.argv[3]))))


if __name__ == "__main__":
    main()
