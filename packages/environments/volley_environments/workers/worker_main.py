"""Worker process that runs built-in environments and their episodes.

    python -m volley_environments.workers.worker_main DESCRIPTOR THREADS DEADLINE_S MAX_WAITING DIGESTS

Requests and answers travel through the socket of that descriptor (see `wire`), many at once. The process ends, with all
of its episodes, when the socket is closed or when an environment's calls hang in all of its threads.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import orjson

from services.env.backend import LiveEpisode
from services.env.environments.kinds import kinds
from services.env.threads import InThreads, ThreadRunner
from shared.errors import NotFound, VolleyError, problem
from shared.process import telemetry
from shared.process.parent import end_with_parent
from volley_environments import problem_files
from volley_sandbox import wire


class WorkerProcess:
    """Server of one worker process. `runner` holds the process's threads."""

    def __init__(self, runner: ThreadRunner) -> None:
        self._runner = runner
        self._environments: dict[str, InThreads] = {}
        self._episodes: dict[str, LiveEpisode] = {}
        self._starting: set[str] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Report readiness, then answer requests until the other end closes the socket.

        Raises VolleyError when all threads of an environment hang.
        """
        writer.write(wire.encode({"ready": os.getpid()}))
        async with asyncio.TaskGroup() as group:
            running = {group.create_task(self._runner.watch())}
            while (request := await wire.read(reader)) is not None:
                if request["call"] == "close":
                    self._episodes.pop(request["episode"], None)
                    self._starting.discard(request["episode"])
                else:
                    if request["call"] == "reset":
                        self._starting.add(request["episode"])
                    running.add(task := group.create_task(self._serve_one(request, writer)))
                    task.add_done_callback(running.discard)
            for task in running:  # no client waits for these requests
                task.cancel()

    async def _serve_one(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            answer = wire.encode({"id": request["id"], "value": await self._answer(request)})
        except VolleyError as error:
            answer = wire.encode({"id": request["id"], "error": problem(error)})
        except (TypeError, ValueError) as error:
            defect = VolleyError(
                f"{request['call']} returned a value that is not JSON: {error}", "a defect of the environment"
            )
            answer = wire.encode({"id": request["id"], "error": problem(defect)})
        finally:
            self._starting.discard(request.get("episode", ""))
        writer.write(answer)

    async def _answer(self, request: Mapping[str, Any]) -> Any:
        match request["call"]:
            case "step":
                return wire.of_step(await self._episode(request["episode"]).step(request["message"]))
            case "reset":
                episode = await self._environment(request).reset(request["split"], request["index"], request["seed"])
                if request["episode"] in self._starting:  # unless it was closed during the reset
                    self._episodes[request["episode"]] = episode
                opened = {"task": episode.task, "opening": list(episode.opening), "tools": list(episode.tools)}
                return {**opened, "database": episode.database}
            case "task":
                return await self._environment(request).task(request["split"], request["index"])
            case _:
                shown = await self._environment(request).demonstration(request["split"], request["index"])
                return wire.of_demonstration(shown)

    def _episode(self, number: str) -> LiveEpisode:
        if (episode := self._episodes.get(number)) is None:
            raise NotFound(f"this process has no episode {number}")
        return episode

    def _environment(self, request: Mapping[str, Any]) -> InThreads:
        """Build the environment on first use; a name never changes its meaning."""
        name, kind, config = request["env"], kinds()[request["kind"]], request["config"]
        if name not in self._environments:
            self._environments[name] = InThreads(
                name, request["kind"], lambda: kind.build(kind.config.model_validate(config)), self._runner
            )
        return self._environments[name]


async def main(
    descriptor: int, n_threads: int, deadline_s: float, max_waiting: int, digests: Mapping[str, str]
) -> None:
    telemetry.configure("env")
    problem_files.expect(digests)
    end_with_parent()
    end = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=end, limit=wire.MAX_LINE)
    runner = ThreadRunner(n_threads, deadline_s, max_waiting)
    try:
        await WorkerProcess(runner).serve(reader, writer)
    except* ConnectionError:
        pass  # the service has ended
    finally:
        runner.close()


if __name__ == "__main__":
    asyncio.run(
        main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), orjson.loads(sys.argv[5]))
    )
