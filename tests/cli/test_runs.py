"""A run's folder: made once, continued by the same configuration, used by one process at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.orchestrator import settings as orchestrator
from services.rollout import settings as rollout
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.models.arrays import CheckpointContents
from shared.config import LoadedConfig, changed, load, rooted, validate
from shared.errors import ConfigError, StorageDenied, StorageFull
from shared.run.folder import RunFolder
from shared.run.pinned import relevant
from shared.run.state import initial_state
from tests.support.disk import file_size_limit
from tools.simulated.trainer import NumpyArrays
from volley.commands import train
from volley.commands.train import fresh_name
from volley.layout import PROJECT
from volley.runs import elapsed as worked
from volley.runs import first_start
from volley.runs import record as runs
from volley_commands import status
from volley_dashboard.report import report


def loaded(folder: Path, **sections: Any) -> LoadedConfig:
    return validate(
        {"run": {"name": "r", "dir": str(folder)}, "model": {"path": "m"}, "data": {"env": "e"}, **sections}
    )


def claim(wanted: LoadedConfig) -> None:
    with runs.claimed(wanted):
        pass


def test_a_new_run_records_what_it_is(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, record, _):
        assert (record.seed, record.finished) == (0, False)
        assert {"volley", "python", "jax", "sglang-jax"} <= record.versions.keys()
    assert "env: e" in folder.config.read_text(encoding="utf-8")
    assert runs.read_record(folder) == record


def test_it_is_continued_by_the_same_configuration_wherever_its_services_listen(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, record, _):
        runs.write_record(folder, dataclasses.replace(record, elapsed_s=12.0))
    with runs.claimed(loaded(tmp_path, services={"env": {"port": 9}}, trainer={"max_steps": 10})) as (_, again, _):
        assert again.elapsed_s == 12.0


def begun(folder: Path, step: int = 4, **sections: Any) -> LoadedConfig:
    """A run with a checkpoint of this step."""
    wanted = loaded(folder, **sections)
    claim(wanted)
    state = initial_state(0).starting_epoch(1, keep_reference=False, settings=relevant(wanted.config))
    checkpoints = CheckpointFolders(folder / "r" / "checkpoints", "r", 3, NumpyArrays())
    checkpoints.fence(1)
    checkpoints.save(
        replace(state, step=step, low=step),
        CheckpointContents({"w": np.zeros(1)}, {"count": np.zeros(1)}, None, {}, None),
        None,
    )
    return wanted


def test_a_disk_without_room_for_the_lock_is_named(tmp_path: Path) -> None:
    with file_size_limit(0), pytest.raises(StorageFull, match=r"no disk space under .*r: "):
        claim(loaded(tmp_path))
    claim(loaded(tmp_path))


def test_another_configuration_is_refused_by_its_keys(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(ConfigError, match=r"run r in .*trainer\.groups_per_step \(was 8, now 4\).*run\.name"):
        claim(loaded(tmp_path, trainer={"groups_per_step": 4}))


def test_a_try_that_trained_nothing_pins_nothing(tmp_path: Path) -> None:
    claim(loaded(tmp_path, trainer={"groups_per_step": 4}))
    said: list[str] = []
    with runs.claimed(loaded(tmp_path), said.append) as (folder, record, _):
        assert record.config["trainer.groups_per_step"] == 8
    assert said == ["run r has trained nothing yet: its configuration is replaced (trainer.groups_per_step: 4 → 8)"]
    assert runs.stored(folder.path)[0].config.trainer.groups_per_step == 8


def test_a_run_without_a_step_takes_another_configuration_and_keeps_nothing_made_with_the_old_one(
    tmp_path: Path,
) -> None:
    begun(tmp_path, 0, trainer={"groups_per_step": 4})
    folder = RunFolder(tmp_path / "r")
    folder.ledger.write_text("{}\n", encoding="utf-8")
    for path in (folder.redis / "dump.rdb", folder.environment_data, folder.choices, folder.path / ".removed-x" / "y"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    other = loaded(tmp_path)
    with pytest.raises(ConfigError, match="may not change"):
        claim(other)  # as `volley follow`: the trainer may be at work
    said = list[str]()
    with runs.claimed(other, said.append, may_clear=True) as (_, record, _):
        assert (record.config["trainer.groups_per_step"], record.amendments) == (8, ())
    assert "trainer.groups_per_step (was 4, now 8) may not change" in said[0]
    assert "no step was trained" in said[0]
    gone = (folder.ledger, folder.checkpoints, folder.redis / "dump.rdb", folder.environment_data, folder.choices)
    assert not any(path.exists() for path in (*gone, folder.path / ".removed-x"))


ELSEWHERE = [
    {"services": {"redis_url": "redis://h"}},
    {"services": {"trainer": {"url": "http://h"}}},
    {"services": {"rollout_urls": ["http://h"]}},
]


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize("was_elsewhere", [True, False])
def test_a_run_with_services_elsewhere_is_never_cleared(
    tmp_path: Path, elsewhere: dict[str, Any], was_elsewhere: bool
) -> None:
    begun(tmp_path, 0, trainer={"groups_per_step": 4}, **(elsewhere if was_elsewhere else {}))
    other = loaded(tmp_path, **({} if was_elsewhere else elsewhere))
    with pytest.raises(ConfigError, match="may not change"), runs.claimed(other, may_clear=True):
        pass
    assert RunFolder(tmp_path / "r").checkpoints.exists()


def _file(*parts: str) -> Callable[[RunFolder], None]:
    def write(folder: RunFolder) -> None:
        path = folder.path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")

    return write


def _linked(folder: RunFolder) -> None:
    folder.checkpoints.rename(folder.path / "elsewhere")
    folder.checkpoints.symlink_to(folder.path / "elsewhere")


@pytest.mark.parametrize(
    "left",
    [
        _file("metrics.jsonl"),
        _file("refused.jsonl"),
        _file("refused", "e000001", "s000001-1.zst"),
        _file("checkpoints", "bad", "e000001-s000005", "x"),
        _file("archive", "e000001", "s000001.zst"),
        _file("fork.json"),
        _file("bucket.json"),
        _linked,
    ],
)
def test_a_folder_that_may_hold_a_step_is_never_cleared(tmp_path: Path, left: Callable[[RunFolder], None]) -> None:
    begun(tmp_path, 0, trainer={"groups_per_step": 4})
    folder = RunFolder(tmp_path / "r")
    left(folder)
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(ConfigError), runs.claimed(loaded(tmp_path), may_clear=True):
        pass
    assert sorted(folder.path.rglob("*")) == before


def test_a_run_with_a_step_is_never_cleared(tmp_path: Path) -> None:
    begun(tmp_path, 1)
    other = loaded(tmp_path, trainer={"groups_per_step": 4})
    with pytest.raises(ConfigError, match="may not change"), runs.claimed(other, may_clear=True):
        pass


def test_what_may_change_is_said_and_listed_before_it_does(tmp_path: Path) -> None:
    begun(tmp_path)
    said: list[str] = []
    with runs.claimed(loaded(tmp_path, trainer={"max_steps": 40}), said.append) as (folder, record, _):
        assert record.config["trainer.max_steps"] == 40
    assert said == ["trainer.max_steps: 10 → 40 from step 4 on"]
    assert [(one.from_step, dict(one.changes)) for one in record.amendments] == [(4, {"trainer.max_steps": (10, 40)})]
    claim(loaded(tmp_path))  # no trainer has begun with it: it is as if it had not been asked for
    record = runs.read_record(folder)
    assert record is not None
    assert record.amendments == ()


def test_a_finished_run_says_so_and_goes_on_with_more_steps(tmp_path: Path) -> None:
    wanted = begun(tmp_path, 10)
    with runs.claimed(wanted) as (folder, record, _):
        done = runs.mark_finished(folder, record)
    assert (done.finished, done.final) == (True, "e000001-s000010")
    with pytest.raises(ConfigError, match=r"is finished.*trainer\.max_steps=N"):
        claim(wanted)
    with runs.claimed(loaded(tmp_path, trainer={"max_steps": 12})) as (_, again, _):
        assert (again.finished, again.final) == (False, None)


def test_a_finished_run_tells_what_its_trainer_had_in_force(tmp_path: Path) -> None:
    wanted = begun(tmp_path)
    state = initial_state(0).starting_epoch(1, keep_reference=False, settings=relevant(wanted.config))
    other = relevant(loaded(tmp_path, trainer={"max_steps": 5}).config)
    state = replace(replace(state, step=4).starting_epoch(2, keep_reference=False, settings=other), step=5, low=5)
    checkpoints = CheckpointFolders(tmp_path / "r" / "checkpoints", "r", 3, NumpyArrays())
    checkpoints.fence(2)
    checkpoints.save(state, CheckpointContents({}, {}, None, {}, None), None)
    with runs.claimed(loaded(tmp_path, trainer={"max_steps": 10})) as (folder, record, _):
        done = runs.mark_finished(folder, record)
    assert (done.final, done.config["trainer.max_steps"]) == ("e000002-s000005", 5)
    assert [(one.from_step, dict(one.changes)) for one in done.amendments] == [(4, {"trainer.max_steps": (10, 5)})]
    assert runs.stored(folder.path)[0].config.trainer.max_steps == 5


def test_a_run_of_an_earlier_version_goes_on_without_a_removed_key(tmp_path: Path) -> None:
    wanted, custom = loaded(tmp_path), "orchestrator.generation.filters.custom"
    state = initial_state(0).starting_epoch(1, keep_reference=False, settings={**relevant(wanted.config), custom: []})
    checkpoints = CheckpointFolders(tmp_path / "r" / "checkpoints", "r", 3, NumpyArrays())
    claim(wanted)
    checkpoints.fence(1)
    checkpoints.save(replace(state, step=4, low=4), CheckpointContents({}, {}, None, {}, None), None)
    with runs.claimed(wanted) as (folder, record, _):
        done = runs.mark_finished(folder, record)
    assert (done.finished, done.amendments) == (True, ())
    assert custom not in done.config
    assert custom.rpartition(".")[2] not in folder.config.read_text(encoding="utf-8")


def test_two_processes_cannot_train_one_run(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)), pytest.raises(ConfigError, match="is being trained by process") as caught:
        claim(loaded(tmp_path))
    assert "volley status" in caught.value.hint


KILLED = """
import asyncio, os, pathlib, signal, sys
from volley.runs import record as runs
from volley.local.processes import Child, ProcessSpec, Reaper
from shared import config
async def main(lock):
    with Reaper.running(holds=[lock]) as reaper:
        ends = "until [ -e $0.may_end ]; do sleep 0.05; done; exit"
        stubborn = ("/bin/sh", "-c", f"trap '{ends}' TERM; touch $0; while :; do sleep 0.05; done", sys.argv[2])
        await Child.start(ProcessSpec("child", stubborn, dict(os.environ), pathlib.Path(sys.argv[2] + ".log")), reaper)
        while not pathlib.Path(sys.argv[2]).exists():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
with runs.claimed(config.load([sys.argv[1]])) as claim:
    asyncio.run(main(claim.lock))
"""


def test_a_run_whose_supervisor_was_killed_is_taken_up_when_its_processes_have_ended(tmp_path: Path) -> None:
    config, started = tmp_path / "c.yaml", tmp_path / "started"
    config.write_text(loaded(tmp_path).to_yaml(), encoding="utf-8")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(config), str(started)], cwd=PROJECT, timeout=60, check=False
    )
    assert killed.returncode == -9
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        (tmp_path / "started.may_end").touch()

    with runs.claimed(loaded(tmp_path), say):
        assert not processes_with(str(started))
    assert len(said) == 1


def processes_with(argument: str) -> list[str]:
    """Process ids by what is on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if argument.encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found.append(path.name)
    return found


def test_a_run_is_continued_from_its_folder_wherever_that_is(tmp_path: Path) -> None:
    claim(loaded(tmp_path / "here", trainer={"max_steps": 3}))
    (tmp_path / "here").rename(tmp_path / "there")
    again, record = runs.stored(tmp_path / "there" / "r")
    assert again.config.trainer.max_steps == 3
    assert record.cwd == str(Path.cwd())
    with runs.claimed(again) as (folder, _, _):
        assert folder.path == tmp_path / "there" / "r"


def test_paths_count_from_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the folder of an older run, which holds them relative; those that are given later count from there."""
    (tmp_path / "models/tiny").mkdir(parents=True)
    sections: dict[str, Any] = {"model": {"path": "models/tiny"}, "data": {"env": "e", "train": "t.jsonl"}}
    begun(tmp_path / "runs", **sections)
    record = runs.read_record(RunFolder(tmp_path / "runs/r"))
    assert record is not None
    runs.write_record(RunFolder(tmp_path / "runs/r"), dataclasses.replace(record, cwd=str(tmp_path)))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = runs.stored(Path("../runs/r"), ["services.token_files.service=s", "services.token_files.admin=a"])[0].config
    assert (again.model.path, again.data.train) == (str(tmp_path / "models/tiny"), tmp_path / "t.jsonl")
    assert again.services.token_files.service == tmp_path / "elsewhere/s"
    said: list[str] = []
    with runs.claimed(runs.stored(Path("../runs/r"))[0], said.append):
        assert said == []
    monkeypatch.chdir("/")
    assert runs.stored(tmp_path / "runs/r")[0].config.model.path == str(tmp_path / "models/tiny")


def test_a_hub_id_stays_one(tmp_path: Path) -> None:
    assert rooted(loaded(tmp_path, model={"path": "Qwen/Qwen3-4B"}), tmp_path).config.model.path == "Qwen/Qwen3-4B"
    assert rooted(loaded(tmp_path, model={"path": "./tiny"}), tmp_path).config.model.path == str(tmp_path / "tiny")


COUNTS = """
import sys, time
from volley.runs import elapsed as worked
from volley.runs import first_start
from volley.runs import record as runs
from shared import config
with runs.claimed(config.load([sys.argv[1]])) as claim, worked.counting(claim.folder, claim.record):
    time.sleep(600)
"""


def test_the_time_before_a_kill_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(loaded(tmp_path).to_yaml(), encoding="utf-8")
    elapsed = 0.0
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", COUNTS, str(path)], cwd=PROJECT)
        before = elapsed
        while elapsed <= before:
            assert process.poll() is None
            time.sleep(0.05)
            record = runs.read_record(RunFolder(tmp_path / "r"))
            elapsed = record.elapsed_s if record else 0.0
        process.kill()
        process.wait()
    with runs.claimed(loaded(tmp_path)) as (_, record, _):
        assert record.elapsed_s >= elapsed > 2 * worked._BEAT_S - 0.1  # what two beats count


def test_the_time_goes_on_being_counted_after_the_folder_was_away(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, record, _), worked.counting(folder, record):
        away = folder.path.rename(tmp_path / "away")
        time.sleep(1.5 * worked._BEAT_S)  # a beat finds nothing to write to
        away.rename(folder.path)
        deadline = time.monotonic() + 30
        while (now := runs.read_record(folder)) is None or not now.elapsed_s:
            assert time.monotonic() < deadline, "nothing counts any more"
            time.sleep(0.05)


def test_time_that_cannot_be_written_hides_no_other_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    claim(loaded(tmp_path))
    record = runs.read_record(folder)
    assert record is not None

    def fail() -> None:
        with worked.counting(folder, record):
            folder.path.rename(tmp_path / "away")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(StorageDenied), worked.counting(folder, record):
        pass


def test_why_a_run_has_failed_is_kept_until_it_is_started_again(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, record, _), worked.counting(folder, record) as counted:
        counted.failed = "http://r0 refuses e000001-s000000 for good"
    found = runs.read_record(folder)
    assert found is not None
    assert found.failed == "http://r0 refuses e000001-s000000 for good"
    assert status._ended(folder) == [
        "run r has failed: http://r0 refuses e000001-s000000 for good",
        f"after you have fixed it, `volley up {folder.path}` continues it",
    ]
    own = dataclasses.replace(found, config={**found.config, "data.env": "fruit-604afa20@1"})
    runs.write_record(folder, own)
    for metrics, told in (("", "is used if you repeat the command that started the run"), ("{}\n", "needs another")):
        folder.metrics.write_text(metrics, encoding="utf-8")
        assert f"its own copy of fruit-604afa20@1; a corrected file {told}" in status._ended(folder)[1]
    folder.metrics.unlink()
    assert report.summarize([], [], found)["failed"] == found.failed
    with runs.claimed(loaded(tmp_path)) as (_, again, _):
        assert again.failed is None


def test_a_changed_environment_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    (file := tmp_path / "fruit.py").write_text("class A: ...", encoding="utf-8")
    given = load([], ["model.path=none", f"data.env={file}", f"run.dir={tmp_path}", "run.name=r"])
    with pytest.raises(
        ConfigError, match=r"fruit\.py: the run began with other files, .*for a new run add run\.name=r-2"
    ):
        first_start.check_files({"data.env": "fruit-0a1b2c3d@1"}, given, RunFolder(tmp_path / "r"))
    first_start.check_files({"data.env": "other-0a1b2c3d@1"}, given, RunFolder(tmp_path / "r"))


def broken(folder: Path, what: str) -> Path:
    claim(loaded(folder))
    run = folder / "r"
    match what:
        case "missing":
            return folder / "other"
        case "no record":
            (run / "run.json").unlink()
        case "torn record":
            (run / "run.json").write_text('{"digest": ', encoding="utf-8")
        case "torn config":
            (run / "config.yaml").write_text("run: {name: ", encoding="utf-8")
        case "no config":
            (run / "config.yaml").unlink()
        case "renamed":
            return run.rename(folder / "q")
    return run


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", r"other: no such folder"),
        ("no record", r"its run\.json is missing"),
        ("torn record", r"its run\.json cannot be read"),
        ("torn config", r"config\.yaml is not valid YAML"),
        ("no config", r"its config\.yaml is missing"),
        ("renamed", r"q contains run r"),
    ],
)
def test_a_folder_that_cannot_be_continued_says_why(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        runs.stored(broken(tmp_path, what))
    assert "\n" not in str(raised.value)


def test_the_name_of_a_run_that_exists_may_not_change(tmp_path: Path) -> None:
    claim(loaded(tmp_path))
    with pytest.raises(ConfigError, match=r"run\.name \(was r, now other\) may not change"):
        runs.stored(tmp_path / "r", ["run.name=other"])


def test_an_edited_configuration_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "r" / "config.yaml").write_text(
        loaded(tmp_path, trainer={"groups_per_step": 4}).to_yaml(), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"groups_per_step \(was 8, now 4\)"):
        claim(runs.stored(tmp_path / "r")[0])


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no readable run\.json"), runs.claimed(loaded(tmp_path)):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"run folder .*choose another with run\.dir"),
        runs.claimed(loaded(tmp_path / "file")),
    ):
        pass


def test_the_quickstart_takes_a_new_name_after_a_finished_run(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(loaded(tmp_path).to_yaml(), encoding="utf-8")
    assert fresh_name([str(config)], []) == ["run.name=r"]
    with runs.claimed(loaded(tmp_path)) as (folder, record, _):
        runs.write_record(folder, dataclasses.replace(record, finished=True))
    assert fresh_name([str(config)], ["run.seed=1"]) == ["run.seed=1", "run.name=r-2"]
    assert fresh_name([str(config)], ["run.name=mine"]) == ["run.name=mine"]


def test_secrets_are_private_and_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.secrets.mkdir()
    path = runs.secret(folder, "token")
    word = path.read_text(encoding="utf-8")
    assert len(word) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert runs.secret(folder, "token").read_text(encoding="utf-8") == word


def test_a_run_that_could_start_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        services = {"env": {"port": taken.getsockname()[1]}}
        wanted = begun(tmp_path, model={"path": str(PROJECT / "configs/models/tiny")}, services=services)
        with pytest.raises(ConfigError, match=r"services\.env\.port"):
            train.resume(wanted.config.run.folder, [])
    assert "ended early; nothing had been started. `volley up " in capsys.readouterr().out


def test_a_proof_that_fails_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, record, _):
        folder.refused.write_text("{}\n", encoding="utf-8")  # of a run without a checkpoint
        assert train.finish(folder, record, prove=True) == 1
    told = capsys.readouterr().out
    assert f"the proof FAILED with 1 violation, which `volley verify {folder.path}` names." in told
    assert "DONE" not in told


def test_a_run_keeps_the_date_of_its_first_start(tmp_path: Path) -> None:
    today = datetime.datetime.now(datetime.UTC).date()
    with runs.claimed(loaded(tmp_path)) as (folder, record, _):
        first = load([folder.config])
        assert first.config.run.date in (today, today + datetime.timedelta(1))
        assert record.config["run.date"] == str(first.config.run.date)
    earlier = changed(first, {"run.date": "2024-07-26"})
    folder.config.write_text(earlier.to_yaml(), encoding="utf-8")
    runs.write_record(folder, replace(record, config=relevant(earlier.config)))
    for again in (loaded(tmp_path), runs.stored(folder.path)[0]):
        with runs.claimed(again) as (folder, record, _):
            assert load([folder.config]).config.run.date == datetime.date(2024, 7, 26)


def test_a_run_without_a_date_gets_the_day_on_which_it_was_made(tmp_path: Path) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, record, _):
        pass
    without = {key: value for key, value in record.config.items() if key != "run.date"}
    old = replace(record, config=without, created=1721952000.0)
    assert runs.dated(loaded(tmp_path), old).config.run.date == datetime.date(2024, 7, 26)
    runs.write_record(folder, old)
    folder.metrics.write_text("{}\n", encoding="utf-8")  # it has begun
    said = list[str]()
    with runs.claimed(loaded(tmp_path), said.append) as (folder, _, _):
        assert load([folder.config]).config.run.date == datetime.date(2024, 7, 26)
    assert said == []


def test_every_service_renders_with_the_date_of_the_run() -> None:
    config = load(["configs/quickstart.yaml"], ["run.date=2024-07-26", "services.redis_url=redis://127.0.0.1:1"]).config
    for settings in (orchestrator.from_config(config), rollout.from_config(config)):
        assert settings.date == datetime.date(2024, 7, 26)


@pytest.mark.parametrize("content", ["", "0123456789abcdef", "0" * 49, "no word of ours, " * 3])
def test_a_token_that_is_not_whole_is_made_again(tmp_path: Path, content: str) -> None:
    with runs.claimed(loaded(tmp_path)) as (folder, _, _):
        path = runs.secret(folder, "token_service")
    word = path.read_text(encoding="utf-8")
    assert runs.secret(folder, "token_service").read_text(encoding="utf-8") == word
    path.write_text(content, encoding="utf-8")
    again = runs.secret(folder, "token_service").read_text(encoding="utf-8")
    assert len(again) == len(word)
    assert again not in (word, content)
    assert path.stat().st_mode & 0o777 == 0o600


def model_of(folder: Path) -> Path:
    model = folder / "m"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (model / name).write_text(name, encoding="utf-8")
    return model


@pytest.mark.parametrize("older", [False, True])
def test_a_run_goes_on_only_with_the_files_of_its_model(tmp_path: Path, older: bool) -> None:
    model = model_of(tmp_path)
    wanted = loaded(tmp_path, model={"path": str(model)})
    if older:
        begun(tmp_path, model={"path": str(model)})  # its checkpoint records no digest
    with runs.claimed(wanted) as (folder, record, _):
        assert record.config["model.content.generation_config"] == "none"
    if not older:
        folder.ledger.write_text("{}\n", encoding="utf-8")
    said = list[str]()
    for again in (wanted, runs.stored(folder.path)[0]):
        with runs.claimed(again, said.append):
            pass
    assert said == []
    (model / "generation_config.json").write_text("{}", encoding="utf-8")
    for again in (wanted, runs.stored(folder.path, ["model.content=null"])[0]):
        with pytest.raises(ConfigError, match=r"generation_config\.json \(sha256 was none, is [0-9a-f]{64}\)"):
            claim(again)
    (model / "generation_config.json").unlink()
    claim(wanted)


def test_a_new_run_does_not_take_the_digests_of_the_file_that_it_is_given(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    with runs.claimed(loaded(tmp_path, model={"path": str(model), "content": {"config": "1"}})) as (folder, _, _):
        content = load([folder.config]).config.model.content
    assert content is not None
    assert len(content["config"]) == 64


def test_a_finished_run_of_an_older_version_keeps_the_digests(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    begun(tmp_path, model={"path": str(model)})
    with runs.claimed(loaded(tmp_path, model={"path": str(model)})) as (folder, record, _):
        assert (
            runs.mark_finished(folder, record).config["model.content.tokenizer"]
            == record.config["model.content.tokenizer"]
        )
    assert load([folder.config]).config.model.content is not None
