"""Main loop of a sandbox: read a request, run the untrusted code, answer; one at a time.

A frame is 4 bytes of length (big endian) and JSON: {"id", "method", "params"} -> {"id", "result"} or {"id", "error":
{"why", "detail"}}. Untrusted code can change anything in this process, so the service checks every answer.
"""

from __future__ import annotations

import inspect
import io
import json
import linecache
import os
import random
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

import adapters
import agents
import interpreter
import values
from values import Refused

MODULE = "submission"
MAX_DETAIL = 2000
MAX_FRAMES = 8
_FRAME = struct.Struct(">I")


class Host:
    """Handler of requests from `channel`. `limits` holds the fields of SandboxLimits."""

    def __init__(self, limits: dict[str, Any], channel: int) -> None:
        self._limits, self._channel = limits, channel
        self._loop: Any = None
        self._adapter: adapters.EnvironmentAdapter | None = None
        self._files: dict[str, str] = {}
        self._interpreter: interpreter.Interpreter | None = None

    def answer(self, method: str, params: dict[str, Any]) -> Any:
        """Answer one request. Raises any exception of the untrusted code, and Refused."""
        if method == "paths":
            sys.path[:0] = params["paths"]
            return None
        if method == "ping":
            return "pong"
        if method == "load":
            return self._load(**params)
        if method == "run":
            return self._run(**params)
        if method == "cell":
            return self._cell(**params)
        if self._adapter is None:
            raise Refused("no environment is loaded here")
        if method == "describe":
            return self._adapter.describe()
        if method == "step":
            return self._adapter.step(params["message"])
        if method == "restore":
            return self._adapter.restore(params["snapshot"])
        if isinstance(self._adapter, agents.AgentAdapter) and method in ("program", "judge"):
            judge = method == "judge"
            return self._adapter.judge(**params) if judge else self._adapter.run(**params, stop=self._channel)
        split, index, seed = params["split"], params["index"], params.get("seed", 0)
        random.seed(f"{split}/{index}/{seed}")
        if method == "reset":
            return self._adapter.reset(split, index, seed)
        if method == "task":
            return self._adapter.task(split, index)
        if method == "demonstration":
            return self._adapter.demonstration(split, index)
        raise Refused(f"there is no method {method!r}")

    def failure(self, error: BaseException) -> dict[str, str]:
        """Describe an exception: its text and its position in the submitted files."""
        if isinstance(error, Refused):
            return {"why": "refused", "detail": _text_of(str(error)[:MAX_DETAIL])}
        why = "memory" if isinstance(error, MemoryError) else "exception"
        return {"why": why, "detail": f"{_described(error)}{self._where(error)}"}

    def _load(
        self,
        source: str | None,
        filename: str,
        entry: str | None,
        config: dict[str, Any],
        paths: list[str],
        module: str | None,
        programs: bool = False,
    ) -> dict[str, Any]:
        """Run the submitted file, or import the submitted module, and describe its environment."""
        if programs:
            agents.prepare(self._limits["memory_mb"])
        sys.path[:0] = paths
        self._files.update(dict.fromkeys(paths, ""))
        if source is not None:
            namespace, name = self._execute(source, filename, MODULE), MODULE
        else:
            __import__(str(module))
            name = str(module)
            namespace = vars(sys.modules[name])
        self._adapter = agents.adapt(namespace, name, entry, config, self._wait)
        return self._adapter.describe()

    def _execute(self, source: str, filename: str, name: str) -> dict[str, Any]:
        module = types.ModuleType(name)
        module.__file__ = filename
        sys.modules[name] = module
        self._cache_source(source, filename)
        exec(compile(source, filename, "exec", dont_inherit=True), vars(module))  # noqa: S102 - this is the sandbox
        return vars(module)

    def _cache_source(self, source: str, filename: str) -> None:
        """Make the source available to tracebacks."""
        self._files[filename] = source
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)

    def _run(self, source: str, stdin: str, max_output: int) -> dict[str, Any]:
        """Run a program; return its output, at most `max_output` characters per stream, and its exit code."""
        return self._printed(lambda: self._execute(source, "program.py", "__main__"), stdin, max_output)

    def _cell(
        self,
        source: str,
        seed: int | None,
        cpu_s: float,
        max_output: int,
        files: dict[str, str],
        removed: list[str],
        received: bool,
        max_bytes: int,
    ) -> dict[str, Any]:
        """Run a text in this sandbox's interpreter, which keeps its variables.

        Returns the changed files in addition to the result of `_run`.
        """
        if self._interpreter is None:
            self._interpreter = interpreter.Interpreter(eval)  # noqa: S307 - in a sandbox
        one = self._interpreter
        try:
            one.put(files, removed, received)
        except OSError as error:
            raise Refused(f"a file of the workspace cannot be put in its place: {error.strerror}") from None
        self._cache_source(source, "program.py")
        printed = self._printed(lambda: one.run(source, seed, cpu_s), "", max_output)
        return {**printed, **one.changed(max_bytes)}

    def _printed(self, program: Callable[[], Any], stdin: str, max_output: int) -> dict[str, Any]:
        out, err = BoundedText(max_output), BoundedText(max_output)
        kept = sys.stdin, sys.stdout, sys.stderr
        sys.stdin, sys.stdout, sys.stderr = io.StringIO(stdin), out, err
        code = 0
        try:
            program()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if isinstance(end.code, str):
                err.write(end.code + "\n")
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001 - an exception is a result
            err.write(f"{_described(error)}{self._where(error)}\n")
            code = 1
        finally:
            sys.stdin, sys.stdout, sys.stderr = kept
        return {"stdout": out.getvalue(), "stderr": err.getvalue(), "exit": code & 0xFF, "cut": out.cut or err.cut}

    def _wait(self, value: Any) -> Any:
        """Resolve a coroutine; return any other value unchanged. One event loop serves the whole sandbox."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)

        async def waiting() -> Any:
            return await value

        return self._loop.run_until_complete(waiting())

    def _where(self, error: BaseException) -> str:
        """Last lines of the traceback that are in submitted files."""
        lines, at = [], error.__traceback__
        while at is not None and len(lines) < 10_000:
            code = at.tb_frame.f_code
            if code.co_filename in self._files or code.co_filename.startswith(
                tuple(p for p in self._files if p[0] == "/")
            ):
                line = linecache.getline(code.co_filename, at.tb_lineno).strip()[:200]
                name = os.path.basename(code.co_filename)[:100]
                lines.append(f'  File "{name}", line {at.tb_lineno}, in {code.co_name[:100]}: {line}')
            at = at.tb_next
        if isinstance(error, SyntaxError) and error.filename in self._files:
            lines.append(f'  File "{error.filename}", line {error.lineno}: {str(error.text or "").strip()[:200]}')
        return "".join(f"\n{line}" for line in lines[-MAX_FRAMES:])


class BoundedText(io.TextIOBase):
    """Keep the first `limit` characters written. `cut` is True if there were more."""

    def __init__(self, limit: int) -> None:
        self._left, self._parts, self.cut = limit, [], False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        kept = text[: self._left]
        if kept:
            self._parts.append(kept)
            self._left -= len(kept)
        self.cut = self.cut or len(kept) < len(text)
        return len(text)

    def getvalue(self) -> str:
        return values.text("".join(self._parts))


def serve(channel: int, limits: dict[str, Any]) -> None:
    """Answer frames until the other end is closed or an answer cannot be sent; then end the process."""
    sys.stdout, sys.stderr = _text_writer(1), _text_writer(2)
    host = Host(limits, channel)
    while (frame := _read(channel)) is not None:
        if not frame:  # see agents: it ended a program
            continue
        try:
            request = json.loads(frame)
            try:
                answer = {"id": request["id"], "result": host.answer(request["method"], request["params"])}
                data = json.dumps(answer, allow_nan=False).encode()
            except BaseException as error:  # noqa: BLE001 - the submitted code's exception is the answer
                answer = {"id": request["id"], "error": host.failure(error)}
                del error
                data = json.dumps(answer).encode()
        except BaseException:  # noqa: BLE001 - even reporting it failed
            os._exit(70)
        if len(data) > limits["frame_bytes"]:
            what = f"the answer has {len(data)} bytes; at most {limits['frame_bytes']} are taken"
            data = json.dumps({"id": request["id"], "error": {"why": "output", "detail": what}}).encode()
        _write(channel, _FRAME.pack(len(data)) + data)
    os._exit(0)


def _text_writer(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def say_unconfined(channel: int, why: str) -> None:
    """Report that this process could not be confined; no code is run."""
    data = json.dumps(
        {"id": 1, "error": {"why": "refused", "detail": f"the sandbox cannot be confined: {why}"}}
    ).encode()
    _write(channel, _FRAME.pack(len(data)) + data)


def _described(error: BaseException) -> str:
    """Class and text of an exception. The text may be huge, or raise."""
    name = type(error).__name__[:100]
    if isinstance(error, SystemExit):
        return f"SystemExit: the code called exit({str(error.code)[:100]})"
    try:
        said = str(error)[:MAX_DETAIL]
    except BaseException as second:  # noqa: BLE001
        return f"{name}, whose text cannot be made: its __str__ raises {type(second).__name__[:100]}"
    return f"{name}: {_text_of(said)}" if said else name


def _text_of(said: str) -> str:
    """Escape lone surrogates, which file names may contain."""
    return said.encode("utf-8", "backslashreplace").decode()


def _read(channel: int) -> bytes | None:
    head = _exactly(channel, _FRAME.size)
    return None if head is None else _exactly(channel, _FRAME.unpack(head)[0])


def _exactly(channel: int, n: int) -> bytes | None:
    parts = []
    while n:
        part = os.read(channel, min(n, 1 << 16))
        if not part:
            return None
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def _write(channel: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(channel, view) :]
