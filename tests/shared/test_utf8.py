"""Programs under locales that are not UTF-8: names of files, text of files, and what is printed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from shared.process import telemetry

ROOT = Path(__file__).parents[2]
LOCALES = {
    "utf-8": {"LC_ALL": "C.UTF-8"},
    "C": {"LC_ALL": "C"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "latin": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "iso-8859-1:strict"},
    "gbk": {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "gbk:strict"},
}


def run(locale: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[bytes]:
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **LOCALES[locale]}
    return subprocess.run([sys.executable, *arguments], env=variables, cwd=cwd, capture_output=True, timeout=60)


@pytest.mark.parametrize("locale", LOCALES)
def test_programs_and_their_children_name_files_in_utf8(tmp_path: Path, locale: str) -> None:
    (tmp_path / "模型 é").write_text("▁▂▃ é", encoding="utf-8")
    (tmp_path / "program.py").write_text(
        "import pathlib, subprocess, sys\n"
        "from shared.process.utf8 import print_what_can_be_printed, restart_in_utf8\n"
        "restart_in_utf8()\n"
        "print_what_can_be_printed()\n"
        "print(pathlib.Path(sys.argv[1]).read_text(encoding='utf-8'))\n"
        "child = 'import sys; print(sys.getfilesystemencoding(), sys.stdout.encoding)'\n"
        "print(subprocess.run([sys.executable, '-c', child], capture_output=True).stdout)\n",
        encoding="utf-8",
    )
    done = run(locale, "program.py", "模型 é", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    shown = {"latin": "??? é".encode("latin-1"), "ascii": b"??? ?", "gbk": "▁▂▃ é".encode("gbk", "replace")}
    assert lines[0] == shown.get(locale, "▁▂▃ é".encode())
    assert lines[1].strip() == b"b'utf-8 utf-8\\n'"


@pytest.mark.parametrize("locale", LOCALES)
def test_the_command_names_a_file_of_the_configuration(tmp_path: Path, locale: str) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: ./模型}\ndata: {env: gsm8k, train: é.jsonl}\n", encoding="utf-8")
    done = run(locale, "-m", "volley", "sft", "--config", str(tmp_path / "run.yaml"), cwd=tmp_path)
    assert (done.returncode, b"No such file or directory" in done.stderr) == (2, True), done.stderr


def test_a_log_takes_text_that_is_not_utf8(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        telemetry.configure("test")
        telemetry.Log("x").info("read", path=os.fsdecode(b"caf\xe9"), cut="\ud83d", large=2**70)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    line = orjson.loads(capfd.readouterr().err.splitlines()[-1])
    assert (line["path"], line["cut"], line["event"]) == ("caf\ufffd", "\ufffd", "read")
