"""Completion in real shells: commands, options, choices and runs; names of folders are data."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from volley.__main__ import all_commands
from volley_commands.completion import SHELLS, script_of

_BASH = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
_shtab_volley
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(script_of(shell), encoding="utf-8")
    return {shell: folder / shell for shell in SHELLS}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("quickstart", "mine", "$(touch pwned)"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    return tmp_path


def completed(shell: str, script: Path, place: Path, *words: str) -> set[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = ["-c", _BASH, "bash", str(script), *words]
    if shell == "fish":
        program = ["-N", "-c", "source $argv[1]; complete -C (string join ' ' -- $argv[2..])", str(script), *words]
    done = subprocess.run([shell, *program], cwd=place, capture_output=True, encoding="utf-8", timeout=60, check=True)
    return {line.partition("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("volley", "ver"), {"verify"}),
        (("volley", "env", "sub"), {"submit"}),
        (("volley", "status", "--wat"), {"--watch"}),
        (("volley", "completion", "z"), {"zsh"}),
        (("volley", "verify", "runs/q"), {"runs/quickstart"}),
        (("volley", "env", "list", "--run", "runs/m"), {"runs/mine"}),
    ],
)
def test_words_are_completed(
    shell: str, words: tuple[str, ...], expected: set[str], scripts: dict[str, Path], place: Path
) -> None:
    assert expected <= completed(shell, scripts[shell], place, *words)
    assert len(completed(shell, scripts[shell], place, "volley", "verify", "")) >= 3
    assert not (place / "pwned").exists()


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_is_of_its_shell_and_knows_every_command(shell: str, scripts: dict[str, Path]) -> None:
    text = scripts[shell].read_text(encoding="utf-8")
    assert all(name in text for name in all_commands())
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n", str(scripts[shell])], check=True, timeout=60)
