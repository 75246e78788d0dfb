"""Reports of a run to experiment trackers: what arrives, once, also after failures, and in the real packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.errors import ConfigError, StorageFull, Unavailable
from shared.run.folder import RunFolder
from tests.support.disk import file_size_limit
from tests.support.foreign import environment
from volley.runs.run_file import RunRecord, write_record
from volley_dashboard.tracking import command as track
from volley_dashboard.tracking.feed import FLUSH, Feed
from volley_dashboard.tracking.sidecar import tracked
from volley_dashboard.tracking.upload import upload

PACKAGES = ("tensorboardX", "tensorboard", "wandb", "trackio", "pandas", "mlflow-skinny")
SUMMARY_WRITER = """
import json, os
class SummaryWriter:
    def __init__(self, folder): self.write("open", folder)
    def write(self, *values):
        if os.path.exists(os.environ["TRACKER_DOWN"]): raise OSError("no route to the tracker")
        with open(os.environ["TRACKER_FILE"], "a") as file: file.write(json.dumps(values) + "\\n")
    def add_scalar(self, key, value, step, walltime): self.write(key, value, step, walltime)
    def add_text(self, key, text, step=0): self.write(key, text, step)
    def flush(self): pass
    def close(self): self.write("close")
"""


def line(step: int, **fields: Any) -> dict[str, Any]:
    return {"step": step, "version": "e1", "reward_mean": step / 10, "ends": {"answered": 0.5}, "time": 100.0} | fields


def append(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with path.open("ab") as file:
        file.writelines(orjson.dumps(one) + b"\n" for one in lines)


def replaced(path: Path, kept: int, lines: Sequence[Mapping[str, Any]]) -> None:
    """Cut a file after `kept` lines and append others, as a resumed run does."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    append(path, lines)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.logs.mkdir(parents=True)
    config = {"trainer.max_steps": 4, "model.path": "models/tiny", "model.content.config": "804c"}
    write_record(folder, RunRecord("d1", 0, config, {"jax": "0.12"}, time.time(), elapsed_s=0.0, finished=False))
    append(folder.metrics, [line(1, loss=None), line(2, is_best=True)])
    append(folder.evals, [{"step": 2, "success": 0.25}, {"step": 2, "success": 0.5, "env": "maze"}])
    append(folder.samples, [{"step": 2, "task": "eval/0", "reward": 1.0, "text": "a | b\nc <script>\x00"}])
    return folder


class WrittenTracker:
    """A package `tensorboardX` that writes what it gets to a file, and raises while the file `down` exists."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file, self.down = folder / "tracked.jsonl", folder / "down"
        (folder / "tensorboardX.py").write_text(SUMMARY_WRITER, encoding="utf-8")
        for name, value in (
            ("VOLLEY_TRACKER_PYTHON", sys.executable),
            ("PYTHONPATH", str(folder)),
            ("TRACKER_FILE", str(self._file)),
            ("TRACKER_DOWN", str(self.down)),
        ):
            monkeypatch.setenv(name, value)

    @property
    def written(self) -> list[list[Any]]:
        return [orjson.loads(text) for text in self._file.read_bytes().splitlines()] if self._file.exists() else []

    def steps(self, key: str) -> list[tuple[int, float]]:
        return [(one[2], one[1]) for one in self.written if one[0] == key]


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenTracker:
    return WrittenTracker(tmp_path, monkeypatch)


def test_each_number_of_a_line_arrives_once_and_later_lines_after_it(
    folder: RunFolder, tracker: WrittenTracker
) -> None:
    assert track.main(folder.path, ["tensorboard"]) == 0
    append(folder.metrics, [line(3)])
    assert track.main(folder.path, ["tensorboard"]) == 0
    assert tracker.steps("train/reward_mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert tracker.steps("train/ends/answered") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert tracker.steps("eval/success") == [(2, 0.25)]
    assert tracker.steps("eval/maze/success") == [(2, 0.5)]
    assert {one[0] for one in tracker.written} >= {"samples", "config", "facts"}
    assert not {"train/loss", "train/is_best", "train/step", "train/version"} & {one[0] for one in tracker.written}
    assert "model.content" not in str(tracker.written)


@pytest.mark.parametrize("kept", [2, 1, 0])
def test_lines_that_were_replaced_while_nobody_looked_are_sent(
    folder: RunFolder, tracker: WrittenTracker, kept: int
) -> None:
    append(folder.metrics, [line(3)])
    assert track.main(folder.path, ["tensorboard"]) == 0
    replaced(folder.metrics, kept, [line(step, reward_mean=-step) for step in range(kept + 1, 6)])
    for _ in range(2):
        assert track.main(folder.path, ["tensorboard"]) == 0
    sent = [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert tracker.steps("train/reward_mean") == sent + [(step, -step) for step in range(kept + 1, 6)]


def test_lines_that_were_replaced_by_fewer_are_sent(folder: RunFolder, tracker: WrittenTracker) -> None:
    append(folder.metrics, [line(3), line(4)])
    assert track.main(folder.path, ["tensorboard"]) == 0
    replaced(folder.metrics, 1, [line(2, reward_mean=-2)])
    assert track.main(folder.path, ["tensorboard"]) == 0
    append(folder.metrics, [line(3, reward_mean=-3)])
    assert track.main(folder.path, ["tensorboard"]) == 0
    assert tracker.steps("train/reward_mean")[4:] == [(2, -2), (3, -3)]


def test_a_full_disk_keeps_no_line_from_the_tracker(folder: RunFolder) -> None:
    feed = Feed(folder, "tensorboard")
    with file_size_limit(10):
        sent = [message["step"] for message in feed.unsent() if message.get("group") == "train"]
    assert sent == [1, 2]
    assert isinstance(feed.unsaved, StorageFull)
    append(folder.metrics, [line(3)])
    assert [message["step"] for message in feed.unsent() if "scalars" in message] == [3]
    assert feed.unsaved is None
    assert not [message for message in Feed(folder, "tensorboard").unsent() if message != FLUSH]


def test_a_tracker_that_was_away_gets_what_it_missed(folder: RunFolder, tracker: WrittenTracker) -> None:
    tracker.down.touch()
    ended, said = threading.Event(), list[str]()
    thread = threading.Thread(
        target=upload, args=(folder, "tensorboard", ended, said.append), kwargs={"follow": True}, daemon=True
    )
    thread.start()
    while not said:
        time.sleep(0.02)
    append(folder.metrics, [line(3)])
    tracker.down.unlink()
    while len(tracker.steps("train/reward_mean")) < 3:
        time.sleep(0.02)
    ended.set()
    thread.join(20)
    assert not thread.is_alive()
    assert "no route to the tracker" in said[0]
    assert tracker.steps("train/reward_mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_tracker_that_stays_away_fails_the_command_and_keeps_the_position(
    folder: RunFolder, tracker: WrittenTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker.down.touch()
    monkeypatch.setattr("volley_dashboard.tracking.upload._RETRY_S", 0.01)
    with pytest.raises(Unavailable):
        upload(folder, "tensorboard", threading.Event(), lambda _: None, follow=False)
    assert not folder.tracker("tensorboard").exists()


def test_lines_count_as_sent_only_once_the_tracker_has_written_them(
    folder: RunFolder, tracker: WrittenTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volley_dashboard.tracking.upload._RETRY_S", 0.01)
    package = tmp_path / "tensorboardX.py"
    broken = SUMMARY_WRITER.replace("def flush(self): pass", "def flush(self): raise OSError('disk full')")
    package.write_text(broken, encoding="utf-8")
    assert track.main(folder.path, ["tensorboard"]) == 1
    assert not folder.tracker("tensorboard").exists()
    package.write_text(SUMMARY_WRITER, encoding="utf-8")
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    assert track.main(folder.path, ["tensorboard"]) == 0
    assert {step for step, _ in tracker.steps("train/reward_mean")} == {1, 2}


def test_an_interpreter_that_cannot_be_started_fails_the_command(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volley_dashboard.tracking.upload._RETRY_S", 0.01)
    monkeypatch.setenv("VOLLEY_TRACKER_PYTHON", str(tmp_path / "none"))
    assert track.main(folder.path, ["tensorboard"]) == 1


def test_the_process_beside_a_run_sends_the_rest_at_its_end(folder: RunFolder, tracker: WrittenTracker) -> None:
    said = list[str]()
    with tracked(folder, ["tensorboard"], said.append):
        append(folder.metrics, [line(3)])
    assert [step for step, _ in tracker.steps("train/reward_mean")] == [1, 2, 3]
    assert tracker.written[-1] == ["close"]
    assert len(said) == 1


def test_what_cannot_be_reported_is_refused_by_name(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        track.main(tmp_path, ["tensorboard"])
    folder.tracker("wandb").parent.mkdir()
    folder.tracker("wandb").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError):
        upload(folder, "wandb", threading.Event(), lambda _: None, follow=False)


READ_BACK = """
import json, os, sys
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from mlflow import MlflowClient
import sqlite3
folder = Path(sys.argv[1])
events = EventAccumulator(str(folder / "tensorboard")); events.Reload()
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
client = MlflowClient((folder / "mlflow").as_uri())
runs = client.search_runs([client.get_experiment_by_name("volley").experiment_id])
database = sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "volley.db")
tables = [json.loads(row[0]) for row in database.execute("select metrics from metrics order by id")]
print(json.dumps({
    "tensorboard": [(e.step, e.value) for e in events.Scalars("train/reward_mean")],
    "mlflow_runs": len(runs),
    "mlflow": [(m.step, m.value) for m in client.get_metric_history(runs[0].info.run_id, "train/reward_mean")],
    "mlflow_params": runs[0].data.params["trainer.max_steps"],
    "trackio": [one["train/reward_mean"] for one in tables if "train/reward_mean" in one],
    "trackio_runs": database.execute("select count(distinct run_name) from metrics").fetchone()[0],
}))
"""


@pytest.mark.long
def test_the_real_trackers_show_one_run_that_was_resumed(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environment("trackers", PACKAGES)
    for name, value in (("VOLLEY_TRACKER_PYTHON", python), ("WANDB_MODE", "offline"), ("TRACKIO_DIR", tmp_path / "t")):
        monkeypatch.setenv(name, str(value))
    assert track.main(folder.path, track.NAMES) == 0
    append(folder.metrics, [line(3)])
    assert track.main(folder.path, track.NAMES) == 0
    done = subprocess.run([str(python), "-c", READ_BACK, str(folder.path)], capture_output=True, check=True)
    found = orjson.loads(done.stdout.splitlines()[-1])
    assert [step for step, _ in found["tensorboard"]] == [1, 2, 3]
    assert found["mlflow"] == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert (found["mlflow_runs"], found["mlflow_params"]) == (1, "4")
    assert (found["trackio"], found["trackio_runs"]) == ([0.1, 0.2, 0.3], 1)
    written = sorted((folder.path / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.name for path in written}) == 1  # both belong to one run
    assert all(b"train/reward_mean" in path.read_bytes() for path in written)
