"""`volley.train` and its like: what the commands do, from a script or a notebook.

They start the same processes as the commands, in a child of this program. The configuration is checked here first, so
that a mistake is an exception before anything starts.
"""

from __future__ import annotations

import json
import queue
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from shared import config as configuration
from shared import packages
from shared.config import LoadedConfig
from shared.run.folder import RunFolder
from volley import choices
from volley.commands import train as train_command
from volley.printing import print_lines
from volley.reporting.supervised import supervised_runs
from volley.runs.record import claimed
from volley_python.files import Files, HandedFiles, Reward, Rows, paths_of
from volley_python.process import CommandFailed, CommandProcess
from volley_python.run import Run
from volley_python.settings import overrides_of


def train(
    model: str | Path | None = None,
    data: Rows | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    tools: str | Path | Sequence[Callable[..., Any]] | None = None,
    columns: Mapping[str, str] | None = None,
    eval_data: Rows | None = None,
    eval_share: float | None = None,
    config: Files = (),
    name: str | None = None,
    wait: bool = True,
    display: bool = True,
    **settings: Any,
) -> Run:
    """Train a model on prompts with a reward, or the run of a configuration; return the run.

    Args:
        model: folder, hub id, or RUN@VERSION.
        data: prompts, a row each.
        reward: function of this program, `FILE.py` or `FILE.py:NAME`, or several; an ordinary function runs from its
            module's source, in the environment service.
        tools: functions that the model may call, or the file that defines them.
        columns: columns of the data by what they are, such as `{"prompt": "question"}`.
        eval_data: held-out prompts; `eval_share`: share of `data` to hold out instead.
        config: configuration files, later ones win. They suffice if they name model and environment.
        name: name of the run; without one, a new run gets a name that no finished run has.
        wait: return when the run has ended; else at once.
        display: show its progress.
        settings: settings of the configuration, such as `trainer={"max_steps": 8}` or `model__dtype="bfloat16"`.

    Raises VolleyError if the run cannot start or fails.
    """
    named = {} if name is None else {"run.name": name}
    overrides = overrides_of({**settings, **named})
    with tempfile.TemporaryDirectory(prefix="volley-") as scratch:
        files = HandedFiles(Path(scratch))
        if data is None and reward is None and tools is None:
            paths = paths_of(config)
            chosen = overrides if model is None else [*overrides, *overrides_of({"model.path": model})]
            loaded = _in_thread(lambda: configuration.rooted(configuration.load(paths, chosen), Path.cwd()))
        else:
            with files.named():
                loaded = _in_thread(
                    lambda: packages.part("own_data")(
                        model,
                        files.rows(data, "train"),
                        files.rewards(reward),
                        tools=files.tools(tools),
                        columns=columns,
                        eval_data=files.rows(eval_data, "eval"),
                        eval_share=eval_share,
                        config=paths_of(config),
                        overrides=overrides,
                    )
                )
        return _started(loaded, files, fresh=name is None, wait=wait, display=display)


def sft(
    data: Rows | Sequence[str | Path] | None = None,
    model: str | Path | None = None,
    *,
    eval_data: Rows | None = None,
    epochs: int | None = None,
    config: Files = (),
    name: str | None = None,
    wait: bool = True,
    display: bool = True,
    **settings: Any,
) -> Run:
    """Train a model on conversations, as `volley sft`; arguments and errors as of `train`.

    Args:
        data: conversations: files, folders, or rows with `messages`. Without them, demonstrations of `data.env`.
        epochs: passes over the data.
    """
    return _supervised("sft", data, model, eval_data, epochs, config, name, settings, wait=wait, display=display)


def dpo(
    data: Rows | Sequence[str | Path] | None = None,
    model: str | Path | None = None,
    *,
    eval_data: Rows | None = None,
    epochs: int | None = None,
    config: Files = (),
    name: str | None = None,
    wait: bool = True,
    display: bool = True,
    **settings: Any,
) -> Run:
    """Train a model on preference pairs, rows with `chosen` and `rejected`, as `volley dpo`; else as `sft`."""
    return _supervised("dpo", data, model, eval_data, epochs, config, name, settings, wait=wait, display=display)


def evaluate(target: str | Path | Run, *, config: Files = (), display: bool = True, **settings: Any) -> dict[str, Any]:
    """Evaluate a run, RUN@VERSION or a model on held-out tasks, as `volley eval`; return its result.

    Raises CommandFailed.
    """
    with tempfile.TemporaryDirectory(prefix="volley-") as scratch:
        result = Path(scratch) / "result.json"
        arguments = ["eval", _target(target), "--json", str(result)]
        arguments += [word for path in paths_of(config) for word in ("--config", path)]
        _finish(CommandProcess([*arguments, *overrides_of(settings)], display=display))
        return json.loads(result.read_text(encoding="utf-8"))


def resume(folder: Path | str, *, wait: bool = True, display: bool = True, **settings: Any) -> Run:
    """Continue the run of a folder, as `volley up`. Raises CommandFailed if it waits and the run fails."""
    return Run(folder).resume(wait=wait, display=display, **settings)


class Server:
    """A served model: `url` of its HTTP API, `token` for it, and `model`, its name. `stop` ends it."""

    def __init__(self, process: CommandProcess, described: Mapping[str, Any]) -> None:
        self._process = process
        self.url, self.token, self.model = str(described["url"]), described["token"], str(described["model"])

    def __repr__(self) -> str:
        return f"Server({self.model!r} at {self.url})"

    @property
    def openai(self) -> dict[str, str]:
        """Arguments of an OpenAI client: `openai.OpenAI(**server.openai)`."""
        return {"base_url": f"{self.url}/v1", "api_key": self.token or "none"}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.stop()


def serve(target: str | Path | Run, **settings: Any) -> Server:
    """Serve a run's newest version, RUN@VERSION or a model by HTTP, as `volley serve`; return when it is ready.

    Raises CommandFailed.
    """
    lines: queue.Queue[str] = queue.Queue()
    process = CommandProcess(["serve", _target(target), "--json", *overrides_of(settings)], seen=lines.put)
    described: list[str] = []
    while process.exit_code is None or not lines.empty():
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            continue
        if line == "{" or described:  # the result, between lines on standard error
            described.append(line)
        if line == "}":
            return Server(process, json.loads("".join(described)))
    process.wait()
    raise CommandFailed(f"{_target(target)} is not served: {process.last_lines}")


def _finish(process: CommandProcess) -> None:
    """Wait for the end of a command; an interrupt stops it. Raises CommandFailed."""
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.stop()
        raise
    if code != 0:
        raise CommandFailed(process.last_lines or f"exit code {code}")


def _target(target: str | Path | Run) -> str:
    return str(target.folder if isinstance(target, Run) else target)


def _supervised(
    mode: Literal["sft", "dpo"],
    data: Rows | Sequence[str | Path] | None,
    model: str | Path | None,
    eval_data: Rows | None,
    epochs: int | None,
    config: Files,
    name: str | None,
    settings: Mapping[str, Any],
    *,
    wait: bool,
    display: bool,
) -> Run:
    named = {} if name is None else {"run.name": name}
    with tempfile.TemporaryDirectory(prefix="volley-") as scratch:
        files = HandedFiles(Path(scratch))
        loaded = supervised_runs().configured(
            mode,
            files.data_files(data, "train"),
            None if model is None else str(model),
            held_out=files.data_files(eval_data, "eval"),
            epochs=epochs,
            configs=paths_of(config),
            overrides=overrides_of({**settings, **named}),
        )
        return _started(loaded, files, fresh=name is None, wait=wait, display=display)


def _started(loaded: LoadedConfig, handed: HandedFiles, *, fresh: bool, wait: bool, display: bool) -> Run:
    """Check the configuration, make the run's folder and start its processes. Raises VolleyError."""
    if fresh:
        loaded = train_command.freshly_named(loaded)
    loaded, _ = _in_thread(lambda: train_command.prepared(loaded))
    folder = RunFolder(loaded.config.run.folder.absolute())
    loaded = handed.kept_in(folder.inputs, loaded)
    with claimed(loaded, may_clear=True):
        choices.record(loaded, folder)
    for line in choices.lines(loaded) if display else ():
        print_lines(f"chosen: {line}")
    return Run(folder.path).resume(wait=wait, display=display)


def _in_thread[T](call: Callable[[], T]) -> T:
    """Call in a thread of its own, because a notebook's thread has a running event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
