"""A run as an object of a Python program: wait for it, read its records, stop it, continue it, export its weights."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shared.errors import ConfigError
from shared.run.folder import RunFolder
from volley.runs.run_file import read_record
from volley_python.process import CommandFailed, CommandProcess
from volley_python.settings import overrides_of

if TYPE_CHECKING:
    from volley_python.client import Client
    from volley_python.client.records import RunEvent, Trajectories


class Run:
    """One run. `volley.train` and its like return it; `Run(FOLDER)` opens an existing one, which need not run."""

    def __init__(self, folder: Path | str, process: CommandProcess | None = None) -> None:
        self.folder, self._process, self._is_stopped = Path(folder).absolute(), process, False

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def client(self) -> Client:
        """Client of the run's records and services."""
        from volley_python.client import Client

        return Client(self.folder)

    @property
    def state(self) -> str:
        """State of the run: `running`, `finished`, `failed`, or `stopped`. Only this program's process is looked at."""
        if self._process is not None and self._process.exit_code is None:
            return "running"
        record = read_record(RunFolder(self.folder))
        if record is not None and record.finished:
            return "finished"
        return "stopped" if record is None or record.failed is None else "failed"

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the run's end and return its summary. An interrupt (Ctrl-C) stops the run.

        Raises CommandFailed if the run fails or is stopped, and TimeoutError, after which the run goes on.
        """
        if self._process is not None:
            try:
                code = self._process.wait(timeout_s)
            except KeyboardInterrupt:
                self.stop()
                raise
            if code != 0:
                raise CommandFailed(*self._reason(code))
        return self.summary()

    def stop(self) -> None:
        """Stop the run if this program has started it; `resume` continues it from its last checkpoint."""
        if self._process is not None and self._process.exit_code is None:
            self._is_stopped = True
            self._process.stop()

    def follow(self, poll_s: float = 0.3) -> Iterator[RunEvent]:
        """Yield the run's steps, evaluations and tickets, those of the past too, until it ends."""
        from volley_python.client.records import RunRecords, RunTail

        tail = RunTail(RunRecords(self.folder), from_start=True)
        while True:
            is_last = self.state != "running"
            yield from tail.new()
            if is_last:
                return
            time.sleep(poll_s)

    def resume(self, *, wait: bool = True, display: bool = True, **settings: Any) -> Self:
        """Continue the run where it ended; `settings` that may change do, such as `trainer={"max_steps": 100}`.

        Raises as `wait` if it waits.
        """
        self.stop()
        self._is_stopped = False
        self._process = CommandProcess(["up", str(self.folder), *overrides_of(settings)], display=display)
        if wait:
            self.wait()
        return self

    def summary(self) -> dict[str, Any]:
        """Return the figures of summary.json, which a finished run has, else those of the list of runs.

        Raises ConfigError if the folder holds no run.
        """
        with contextlib.suppress(OSError):
            return json.loads(RunFolder(self.folder).summary.read_text(encoding="utf-8"))
        return self.client.summary()

    def metrics(self) -> Any:
        """Return a `pandas.DataFrame`, indexed by step: the trainer's metrics, and of evaluations columns `eval_…`.

        A supervised run has its losses instead. Without pandas it is a `Table`, whose rows have the key `step`.
        """
        from volley_python.client.tables import Table

        client = self.client
        rows: dict[int, dict[str, Any]] = {row["step"]: dict(row) for row in client.steps()}
        for row in client.evaluations():
            if row.get("env") is None:
                measured = {f"eval_{key}": row.get(key) for key in ("success", "reward_mean", "turns_mean")}
                rows[row["step"]] = rows.get(row["step"], {"step": row["step"]}) | measured
        if not len(client.steps()) and len(supervised := client.supervised_steps()):
            rows = {row["step"]: dict(row) for row in supervised}
        table = Table([rows[step] for step in sorted(rows)])
        if find_spec("pandas") is None:
            return table
        return table.to_pandas().set_index("step") if len(table) else table.to_pandas()

    def trajectories(self, **filters: Any) -> Trajectories:
        """Return the archived episodes that meet the filters. Raises ConfigError for a wrong filter."""
        return self.client.trajectories(**filters)

    def export(self, folder: Path | str, version: str | None = None) -> Path:
        """Write the weights as a folder that transformers loads, and return it. Raises CommandFailed."""
        chosen = [] if version is None else ["--version", version]
        process = CommandProcess(["export", str(self.folder), str(folder), *chosen], display=False)
        if process.wait() != 0:
            raise CommandFailed(f"{self.folder} was not exported: {process.last_lines}")
        return Path(folder)

    def _reason(self, code: int) -> tuple[str, str]:
        """Return why the command ended early, and what continues the run."""
        hint = f'volley.Run("{self.folder}").resume() continues it'
        if self._is_stopped or code in (130, 143):
            return f"run {self.name} was stopped", hint
        record = None
        with contextlib.suppress(ConfigError):
            record = read_record(RunFolder(self.folder))
        detail = record.failed if record is not None and record.failed else ""
        last = self._process.last_lines if self._process is not None else ""
        return f"run {self.name} failed: {detail or last or f'exit code {code}'}", f"logs: {self.folder / 'logs'}"
