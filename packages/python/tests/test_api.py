"""Commands that a Python program starts: output, interrupts, and their end with the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

import volley
from shared.config import load
from shared.errors import ConfigError
from volley_python.files import HandedFiles
from volley_python.process import CommandProcess
from volley_python.settings import overrides_of

CONFIG = "configs/quickstart.yaml"
PYTHON = (sys.executable, "-u", "-c")
SLEEPING = "import time, sys\nprint('ready')\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"


def test_settings_are_nested_or_dotted() -> None:
    given = {"trainer": {"max_steps": 3, "mesh": {"shape": [1, 1]}}, "run.name": "1", "model__path": Path("m")}
    assert overrides_of(given) == [
        "trainer.max_steps=3",
        "trainer.mesh.shape=[1, 1]",
        'run.name="1"',
        'model.path="m"',
    ]
    assert load([CONFIG], overrides_of(given)).config.run.name == "1"
    with pytest.raises(ConfigError, match=r"trainer\.max_steps is a object"):
        overrides_of({"trainer": {"max_steps": object()}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reward_funcs", r"^reward_funcs is an argument of TRL \(write reward=…\)$"),
        ("train_dataset", r"\(write data=…\)$"),
        ("eval_dataset", r"\(write eval_data=…\)$"),
        ("model_name_or_path", r"\(write model=…\)$"),
        ("args", r"\(write each setting by its name, such as trainer\.max_steps\)$"),
    ],
)
def test_an_argument_of_another_trainer_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        volley.train("m", **{name: object()})


def test_output_reaches_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    command = CommandProcess(["print('out'); import sys; print('err', file=sys.stderr); sys.exit(3)"], program=PYTHON)
    assert command.wait(60) == 3
    assert sorted(capsys.readouterr().out.split()) == ["err", "out"]
    assert sorted(command.last_lines.split()) == ["err", "out"]


def test_a_command_is_waited_for_and_interrupted() -> None:
    lines: list[str] = []
    command = CommandProcess([SLEEPING], seen=lines.append, program=PYTHON)
    while not lines:
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        command.wait(0.01)
    assert command.exit_code is None
    assert command.stop() == 130


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_a_command_ends_with_its_program(end: str) -> None:
    program = (
        "import os, sys, time\nfrom volley_python.process import CommandProcess\nlines = []\n"
        f"c = CommandProcess([{SLEEPING!r}], seen=lines.append, program=(sys.executable, '-u', '-c'))\n"
        f"while not lines: time.sleep(0.01)\nprint(c.pid, flush=True)\n{end}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, encoding="utf-8", check=False, timeout=60
    )
    assert ended.returncode == (-signal.SIGKILL if end else 0)
    pid = int(ended.stdout)
    deadline = time.monotonic() + 30
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


class Frame:
    """Stand-in for a pandas frame, with the two members that are used."""

    columns = ("prompt",)

    def to_dict(self, form: str) -> list[dict[str, Any]]:
        assert form == "records"
        return [{"prompt": "p"}]


@pytest.mark.parametrize("rows", [[{"prompt": "p"}], iter([{"prompt": "p"}]), Frame()])
def test_rows_are_written_as_json_lines(rows: Any, tmp_path: Path) -> None:
    path = HandedFiles(tmp_path).rows(rows, "train")
    assert path is not None
    assert [orjson.loads(line) for line in Path(path).read_bytes().splitlines()] == [{"prompt": "p"}]


def test_wrong_rows_are_named(tmp_path: Path) -> None:
    files = HandedFiles(tmp_path)
    with pytest.raises(ConfigError, match="row 1 of the data is a str"):
        files.rows([{"prompt": "p"}, "q"], "train")  # pyrefly: ignore
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        files.rows([{"prompt": object()}], "train")


def test_handed_files_move_into_the_runs_folder(tmp_path: Path) -> None:
    files = HandedFiles(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    (path,) = files.data_files([{"messages": []}], "train")
    loaded = load([CONFIG], [f"sft.train=[{path}]", f"run.dir={tmp_path}"])
    kept = files.kept_in(tmp_path / "inputs", loaded)
    (there,) = kept.config.sft.train
    assert (there.parent.parent, there.name) == (tmp_path / "inputs", "train.jsonl")
    assert there.read_bytes() == path.read_bytes()
    assert files.kept_in(tmp_path / "inputs", loaded).config.sft.train == (there,)
    first = path.read_bytes()
    path.write_text("other", encoding="utf-8")
    assert files.kept_in(tmp_path / "inputs", loaded).config.sft.train != (there,)
    assert there.read_bytes() == first


@pytest.mark.parametrize("start", [volley.train, volley.sft])
def test_a_mistake_is_an_exception_and_leaves_no_folder(start: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing-model"):
        start(config=CONFIG, model=str(tmp_path / "missing-model"), run={"dir": str(tmp_path / "runs")})
    with pytest.raises(ConfigError, match="max_step"):
        start(config=CONFIG, trainer={"max_step": 1})
    assert not (tmp_path / "runs").exists()


def test_names_are_found_and_others_are_not() -> None:
    assert set(volley.__all__) == {name for name in volley.__all__ if hasattr(volley, name)}
    assert not hasattr(volley, "trane")
