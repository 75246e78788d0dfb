"""Program that writes a run's metrics to one experiment tracker.

It runs in the tracker's own Python environment and imports nothing but the tracker and the standard library. Messages
are lines of JSON on standard input, and each is answered with a line on standard output, `{}` or `{"error": TEXT}`:

- `{"open": NAME, "id", "run", "project", "folder", "config"}`, the first one;
- `{"scalars": {KEY: NUMBER}, "group", "step", "time"}`; the names of the metrics are GROUP/KEY;
- `{"table": NAME, "columns", "rows", "step"}`: samples of an evaluation;
- `{"facts": {KEY: TEXT}}`: what identifies the run, such as the head of its ledger;
- `{"flush": true}`.

The end of standard input closes the tracker.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

type Message = Mapping[str, Any]


class Tracker(Protocol):
    """A run in a tracker. Methods may block and raise; the caller repeats a message that failed."""

    def scalars(self, group: str, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Args: seconds: time of the step since 1970."""
        ...

    def table(self, name: str, step: int, columns: list[str], rows: list[list[Any]]) -> None: ...

    def facts(self, values: Mapping[str, str]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `RUN/tensorboard`, by tensorboardX."""

    def __init__(self, opened: Message) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(Path(opened["folder"]) / "tensorboard"))
        lines = [f"    {key}: {value}" for key, value in opened["config"].items()]
        self._writer.add_text("config", "\n".join(lines))

    def scalars(self, group: str, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(f"{group}/{key}", value, step, walltime=seconds)

    def table(self, name: str, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        lines = [" | ".join(map(_cell, row)) for row in [columns, ["---"] * len(columns), *rows]]
        self._writer.add_text(name, "\n".join(lines), step)

    def facts(self, values: Mapping[str, str]) -> None:
        self._writer.add_text("facts", "\n".join(f"    {key}: {value}" for key, value in values.items()))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and WANDB_API_KEY apply."""

    def __init__(self, opened: Message) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or opened["project"],
            id=opened["id"],
            name=opened["run"],
            resume="allow",
            config=dict(opened["config"]),
            dir=opened["folder"],
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._groups: set[str] = set()

    def scalars(self, group: str, step: int, seconds: float, values: Mapping[str, float]) -> None:
        if group not in self._groups:  # W&B's own step only grows, but steps of a run may be undone
            self._run.define_metric(f"{group}/step")
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
            self._groups.add(group)
        self._run.log({f"{group}/step": step} | {f"{group}/{key}": value for key, value in values.items()})

    def table(self, name: str, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self._run.log({f"{name}/step": step, name: self._wandb.Table(columns=columns, data=rows)})

    def facts(self, values: Mapping[str, str]) -> None:
        self._run.summary.update(dict(values))

    def flush(self) -> None:
        """Do nothing: W&B's own process writes what it was given."""

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio. TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL apply."""

    def __init__(self, opened: Message) -> None:
        import trackio

        self._trackio = trackio
        config = {key: value for key, value in opened["config"].items() if not key.startswith("_")}
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or opened["project"],
            name=opened["run"],
            resume="allow",
            config=config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, group: str, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._trackio.log({f"{group}/{key}": value for key, value in values.items()}, step=step)

    def table(self, name: str, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        import pandas

        self._trackio.log({name: self._trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))}, step=step)

    def facts(self, values: Mapping[str, str]) -> None:
        self._trackio.log(dict(values))

    def flush(self) -> None:
        """Do nothing: trackio writes on its own."""

    def close(self) -> None:
        self._trackio.finish()


class MlFlow:
    """A run of MLflow at MLFLOW_TRACKING_URI, else in `RUN/mlflow`. MLFLOW_EXPERIMENT_NAME applies."""

    def __init__(self, opened: Message) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (Path(opened["folder"]) / "mlflow").as_uri()
        self._client = MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or opened["project"]
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        tag = {"volley.id": opened["id"]}
        before = self._client.search_runs([experiment], f"tags.`volley.id` = '{opened['id']}'", max_results=1)
        made = before[0] if before else self._client.create_run(experiment, run_name=opened["run"], tags=tag)
        self._id = made.info.run_id
        for key, value in opened["config"].items():
            try:
                self._client.log_param(self._id, _mlflow_name(key), str(value)[:6000])
            except MlflowException:  # a parameter cannot change; the tag shows the setting in force
                self._client.set_tag(self._id, _mlflow_name(key), str(value)[:5000])

    def scalars(self, group: str, step: int, seconds: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        at = int(seconds * 1000)
        metrics = [Metric(_mlflow_name(f"{group}/{key}"), value, at, step) for key, value in values.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics[start : start + 1000])

    def table(self, name: str, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        self._client.log_dict(self._id, {"columns": columns, "data": rows}, f"{name}/{step}.json")

    def facts(self, values: Mapping[str, str]) -> None:
        for key, value in values.items():
            self._client.set_tag(self._id, key, value)

    def flush(self) -> None:
        """Do nothing: each call is a request of its own."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: Mapping[str, type[TensorBoard | Wandb | Trackio | MlFlow]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MlFlow,
}


def main() -> None:
    """Answer messages until standard input ends. What the tracker prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    tracker: Tracker | None = None
    for line in sys.stdin.buffer:
        try:
            tracker = handle(json.loads(line), tracker)
            answers.write("{}\n")
        except Exception as error:  # noqa: BLE001 - the boundary: whatever a tracker raises is an answer
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}) + "\n")
    if tracker is not None:
        tracker.close()


def handle(message: Message, tracker: Tracker | None) -> Tracker | None:
    if "open" in message:
        return tracker or TRACKERS[message["open"]](message)
    assert tracker is not None, "the first message opens the tracker"
    if "scalars" in message:
        tracker.scalars(message["group"], message["step"], message["time"], message["scalars"])
    elif "table" in message:
        tracker.table(message["table"], message["step"], message["columns"], message["rows"])
    elif "facts" in message:
        tracker.facts(message["facts"])
    else:
        tracker.flush()
    return tracker


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")[:500]


def _mlflow_name(key: str) -> str:
    """Replace characters that MLflow does not allow in a name."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in key)[:250]


if __name__ == "__main__":
    main()
