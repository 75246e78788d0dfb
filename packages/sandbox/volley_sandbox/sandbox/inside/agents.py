"""Agents: a class whose episode is played by a program, or by an external agent, and judged afterwards.

    class Agent:
        splits = {"train": 100}
        command = ["python", "-m", "my_agent"]      # or: def run(self, base_url, api_key, model, task)
        def reset(self, split, index, seed): ...    # returns the task
        def judge(self, output): ...                # returns a reward, or (reward, info)

The program is a child of this process, the first one of its pid namespace. The program has ended, with everything that
it started, before `judge` is called.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from adapters import ADAPTERS, EnvironmentAdapter, find_entry
from namespaces import HOME
from programs import MEGA, PATH, Middle, exit_code, isolate, supervise
from values import Refused, jsonable, judged_of, number, short

FOLDER = "/task"
"""Working folder of `reset`, the program, and `judge` where programs are started."""
MAX_TASK = 100_000
"""Bytes of a task in an environment variable; the kernel allows 128 KiB."""
MAX_TIMEOUT_S = 24 * 3600.0
_MAX_CODES, _MAX_RESULT = 32, 1 << 20
_SPARE = 4
"""Address space of one process over the memory of all of them: threads and libraries reserve more than they use."""
_OF_RUN = ("base_url", "api_key", "model", "task")
_RESULT = 3  # descriptor of the file for the value that `run` returns


class AgentAdapter(EnvironmentAdapter):
    """Adapter of an agent."""

    protocol = "agent"

    def __init__(self, found: type, config: Mapping[str, Any], wait: Callable[[Any], Any]) -> None:
        super().__init__(found, config, wait)
        self._output: Any = ""
        self._task = ""
        self._exit: int | None = None

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "agent": self._spec()}

    def reset(self, split: str, index: int, seed: int) -> dict[str, Any]:
        opened = super().reset(split, index, seed)
        self._task = "\n\n".join(message["content"] for message in opened["messages"])
        if getattr(self._live, "command", None) is not None and len(self._task.encode()) > MAX_TASK:
            raise Refused(
                f"the task has {len(self._task.encode())} bytes; a command gets at most {MAX_TASK} in VOLLEY_TASK:"
                " write the rest into files of the working folder"
            )
        return opened

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        raise Refused("an agent's episode has no steps")

    def run(
        self, base_url: str, api_key: str, model: str, timeout_s: float, memory_mb: int, max_output: int, stop: int
    ) -> dict[str, Any]:
        """Start the program and wait for its end.

        Returns {"output", "exit", "ended"}: the end of all its output, its exit code, and the limit that ended it.
        """
        if self._live is None:
            raise Refused("there is no task to run: reset was not called")
        command = getattr(self._live, "command", None)
        variables = _variables(base_url, api_key, model, self._task)
        sys.stdout.flush()
        sys.stderr.flush()
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        cpu_s = max(60, int(timeout_s) + 1)
        with tempfile.TemporaryFile(dir="/tmp") as result:

            def become() -> None:
                os.dup2(result.fileno(), _RESULT)
                isolate(out_end, err_end, cpu_s, memory_mb * _SPARE, _RESULT + (command is None))
                if command is not None:
                    os.execvpe(command[0], list(command), variables)  # noqa: S606 - this is the sandbox
                os.environ.update(variables)
                given = dict(zip(_OF_RUN, (base_url, api_key, model, self._task), strict=True))
                _call(lambda: self._live.run(**{name: given[name] for name in _taken(self._live.run)}))

            kept = {out: Middle(_MAX_RESULT), err: Middle(max_output)}
            status, ended = supervise(become, kept, [out_end, err_end], timeout_s, memory_mb, stop)
            printed = kept[out].text()
            self._output = printed if command is not None else _result_in(result)
        self._exit = exit_code(status) if status is not None else None
        shown = "\n".join(text.strip() for text in (printed, kept[err].text()) if text.strip())
        return {"output": shown[-max_output:], "exit": self._exit, "ended": ended}

    def judge(self, output: str | None) -> dict[str, Any]:
        """Judge the task as it stands.

        Args:
            output: final output of an external agent; None for a program, whose own output counts.
        """
        live, self._live = self._live, None
        if live is None:
            raise Refused("there is no task to judge: reset was not called, or it has been judged")
        if not callable(getattr(live, "judge", None)):
            raise Refused(f"{type(live).__name__} has no method judge")
        found = self._output if output is None else output
        wants = inspect.signature(live.judge).parameters
        more = {"exit_code": self._exit} if "exit_code" in wants else {}
        return judged_of(self._wait(live.judge(found, **more)))

    def _tools(self) -> list[Any]:
        """Tools of the task for agents outside; a program's tools are its own."""
        return super()._tools() if getattr(self._environment, "agent", None) == "external" else []

    def _spec(self) -> dict[str, Any]:
        """How its episodes are played. Raises Refused."""
        one, name = self._environment, self._class.__name__
        judged = callable(getattr(one, "judge", None))
        if (agent := getattr(one, "agent", "program")) not in ("program", "external"):
            raise Refused(f'{name}.agent is {short(agent)}; it must be "program" or "external"')
        command, codes = getattr(one, "command", None), getattr(one, "exit_codes", (0,))
        if agent == "program":
            if not judged:
                raise Refused(f"{name} has no method judge(output), which returns the reward")
            if (command is None) != callable(getattr(one, "run", None)):
                raise Refused(f"{name} must have either command or run(base_url, api_key, model)")
            if command is None and (others := [one for one in _taken(one.run) if one not in _OF_RUN]):
                raise Refused(f"{name}.run takes {others[0]}; it may take {', '.join(_OF_RUN[:-1])} and {_OF_RUN[-1]}")
        if command is not None and not (
            isinstance(command, (list, tuple)) and command and all(isinstance(part, str) for part in command)
        ):
            raise Refused(f'{name}.command is {short(command)}; it must be a list like ["python", "-m", "my_agent"]')
        if not isinstance(codes, (list, tuple, set)) or not 0 < len(codes) <= _MAX_CODES:
            raise Refused(f"{name}.exit_codes must be a list of exit codes that count as a normal end, like [0, 1]")
        if not all(isinstance(code, int) and 0 <= code <= 255 for code in codes):
            raise Refused(f"{name}.exit_codes must be numbers from 0 to 255")
        timeout_s = number(getattr(one, "timeout_s", 300.0), f"{name}.timeout_s")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise Refused(f"{name}.timeout_s is {timeout_s:g}; it must be from 0 to {MAX_TIMEOUT_S:g} seconds")
        return {"kind": agent, "timeout_s": timeout_s, "exit_codes": sorted(codes), "judged": judged}


def _taken(run: Callable[..., Any]) -> list[str]:
    """Names of the arguments that `run` takes; those with a default only if Volley has a value for them."""
    named = [one for one in inspect.signature(run).parameters.values() if one.kind is not one.VAR_POSITIONAL]
    if any(one.kind is one.VAR_KEYWORD for one in named):
        return [*_OF_RUN]
    return [one.name for one in named if one.default is one.empty or one.name in _OF_RUN]


def _variables(base_url: str, api_key: str, model: str, task: str) -> dict[str, str]:
    """Environment of the program, in the names that SDKs read."""
    root = base_url.removesuffix("/v1")
    variables = {
        "PATH": PATH,
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if not path.startswith(sys.base_prefix)),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": api_key,
        "VOLLEY_MODEL": model,
    }
    return variables if len(task.encode()) > MAX_TASK else {**variables, "VOLLEY_TASK": task.replace("\0", "")}


def _call(run: Callable[[], Any]) -> None:
    """Call the author's `run` in its own process, write what it returns, and end the process."""
    code = 1
    try:
        value = run()
        if inspect.isawaitable(value):
            import asyncio

            async def waiting() -> Any:
                return await value

            value = asyncio.run(waiting())
        data = json.dumps(jsonable("" if value is None else value, "what run returned")).encode()
        if len(data) > _MAX_RESULT:
            raise Refused(f"run returned {len(data)} bytes as JSON; the limit is {_MAX_RESULT}")
        with open(_RESULT, "wb", closefd=False) as file:
            file.write(data)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - it goes to the output of the program
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code & 0xFF)


def _result_in(file: Any) -> Any:
    """The value that `run` returned; an empty text if it did not return."""
    file.seek(0)
    data = file.read(_MAX_RESULT + 1)
    try:
        return json.loads(data) if data else ""
    except ValueError:
        return ""


def prepare(memory_mb: int) -> None:
    """Bound the memory of the environment's own process, and enter the working folder."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb * _SPARE * MEGA, hard))
    os.environ.update(PATH=PATH, HOME=HOME)
    os.makedirs(FOLDER, exist_ok=True)
    os.chdir(FOLDER)


def adapt(
    namespace: Mapping[str, Any], module: str, entry: str | None, config: Mapping[str, Any], wait: Callable[[Any], Any]
) -> EnvironmentAdapter:
    """Make the adapter of a submitted class. Raises Refused."""
    found, protocol = find_entry(namespace, module, entry)
    return {**ADAPTERS, "agent": AgentAdapter}[protocol](found, config, wait)
