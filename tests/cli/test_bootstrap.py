"""The bootstrap on machines that lack something: real interpreters, real processes, a package index
that is not there.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.terminal import TerminalProgram, in_terminal
from volley import bootstrap
from volley.layout import PROJECT


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project folder without environments, whose uv.lock and pyproject.toml are stand-ins."""
    root = tmp_path / "checkout"
    (root / "volley").mkdir(parents=True)
    (root / "volley" / "bootstrap.py").write_text(
        Path(bootstrap.__file__).read_text(encoding="utf-8"), encoding="utf-8"
    )
    for name in ("uv.lock", "pyproject.toml"):
        (root / name).write_text(name, encoding="utf-8")
    return root


def run(checkout: Path, path: str, **variables: str) -> subprocess.CompletedProcess[str]:
    home = checkout.parent / "home"
    home.mkdir(exist_ok=True)
    environment = {"PATH": path, "HOME": str(home), "PIP_INDEX_URL": "http://127.0.0.1:1/simple", **variables}
    command = [sys.executable, str(checkout / "volley" / "bootstrap.py")]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120, check=False)


FAKE_UV = """
case "$1" in
  --version) echo "uv 0.99.0" ;;
  sync)
    echo "$UV_PROJECT_ENVIRONMENT $*" >> "$UV_CALLS"
    mkdir -p "$UV_PROJECT_ENVIRONMENT/bin" && ln -sf /bin/sh "$UV_PROJECT_ENVIRONMENT/bin/python"
    echo "home = /nowhere" > "$UV_PROJECT_ENVIRONMENT/pyvenv.cfg" ;;
  *) exit 1 ;;
esac
"""


def test_it_uses_only_the_syntax_of_python_3_8() -> None:
    ast.parse(Path(bootstrap.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_it_makes_three_environments_and_then_nothing(checkout: Path, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "uv", FAKE_UV)
    calls = tmp_path / "calls"
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    assert run(checkout, path, UV_CALLS=str(calls)).returncode == 0
    made = calls.read_text(encoding="utf-8").splitlines()
    assert [line.split()[0] for line in made] == [
        str(checkout / ".venvs" / name) for name in ("base", "rollout", "trainer")
    ]
    assert ["--extra rollout" in line for line in made] == [False, True, False]
    assert all("--locked" in line and "--no-python-downloads" in line for line in made)
    assert run(checkout, path, UV_CALLS=str(calls)).stderr == ""
    assert len(calls.read_text(encoding="utf-8").splitlines()) == 3


def test_what_accelerates_is_named_or_found(checkout: Path, tmp_path: Path) -> None:
    """Another choice makes the two environments with JAX anew, and base not."""
    executable(tmp_path / "bin" / "uv", FAKE_UV)
    calls, path = tmp_path / "calls", f"{tmp_path / 'bin'}:/usr/bin:/bin"
    assert run(checkout, path, UV_CALLS=str(calls), VOLLEY_ACCELERATOR="cpu").returncode == 0
    assert run(checkout, path, UV_CALLS=str(calls), VOLLEY_ACCELERATOR="gpu").returncode == 0
    made = [line.split() for line in calls.read_text(encoding="utf-8").splitlines()[3:]]
    assert [line[0] for line in made] == [str(checkout / ".venvs" / name) for name in ("rollout", "trainer")]
    assert [line[line.index("--extra", line.index("traces")) + 1] for line in made] == ["rollout-gpu", "trainer-gpu"]
    refused = run(checkout, path, UV_CALLS=str(calls), VOLLEY_ACCELERATOR="npu")
    assert refused.returncode == 1
    assert "VOLLEY_ACCELERATOR is npu, none of cpu, gpu, tpu" in refused.stderr
    (tmp_path / "nvidia0").touch()
    assert bootstrap.accelerator({}, tmp_path) == "gpu"
    assert bootstrap.accelerator({}, tmp_path / "bin") == "cpu"


def test_the_extras_of_every_accelerator_are_locked_with_their_libraries() -> None:
    """Of the one JAX that each environment has."""
    lock = tomllib.loads((PROJECT / "uv.lock").read_text(encoding="utf-8"))
    known = {(one["name"], one["version"]) for one in lock["package"]}
    extras = next(one for one in lock["package"] if one["name"] == "volley-rl")["optional-dependencies"]
    for environment in bootstrap.ACCELERATED:
        plain = next(one for one in extras[environment] if one["name"] == "jax")
        for accelerator, library in (("gpu", "jax-cuda12-plugin"), ("tpu", "libtpu")):
            jax = next(one for one in extras[f"{environment}-{accelerator}"] if one["name"] == "jax" and "extra" in one)
            assert jax["version"] == plain["version"]
            assert any(name == library for name, _ in known)
        assert ("jax-cuda12-plugin", plain["version"]) in known


TALKING_UV = """
case "$1" in
  --version) echo "uv 0.99.0" ;;
  sync)
    echo "Resolved 3 packages in 1ms" >&2; echo "Downloading jaxlib (80.1MiB)" >&2; sleep 1
    if [ -n "$UV_FAILS" ]; then echo "error: no space left" >&2; exit 2; fi
    echo " Downloaded jaxlib" >&2; echo "Installed 2 packages in 90ms" >&2; echo " + jaxlib==1.0" >&2
    mkdir -p "$UV_PROJECT_ENVIRONMENT/bin" && ln -sf /bin/sh "$UV_PROJECT_ENVIRONMENT/bin/python"
    echo "home = /nowhere" > "$UV_PROJECT_ENVIRONMENT/pyvenv.cfg" ;;
  *) exit 1 ;;
esac
"""


def in_a_terminal(checkout: Path, **variables: str) -> tuple[int, TerminalProgram]:
    executable(checkout.parent / "bin" / "uv", TALKING_UV)
    path = f"{checkout.parent / 'bin'}:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(checkout.parent), "TERM": "xterm", **variables}
    with in_terminal([sys.executable, str(checkout / "volley" / "bootstrap.py")], 40, environment) as program:
        code = program.process.wait(60)
    return code, program


def test_at_a_terminal_one_line_tells_what_goes_on_and_goes(checkout: Path) -> None:
    code, program = in_a_terminal(checkout)
    text = "".join(program.screen().text().splitlines())
    assert code == 0, program.text()
    for i, name in enumerate(("base", "rollout", "trainer"), 1):
        assert re.search(
            rf"installing environment {name} \(Python 3\.1\d\) {i} of 3volley: environment {name} is", text
        )
    assert "s  downloading jaxlib (80.1MiB)" in program.text()
    assert "jaxlib" not in program.screen().text()


def test_what_failed_at_a_terminal_is_shown_whole(checkout: Path) -> None:
    code, program = in_a_terminal(checkout, UV_FAILS="1")
    text = program.screen().text()
    assert code == 1
    assert "  Resolved 3 packages in 1ms\n  Downloading jaxlib (80.1MiB)\n  error: no space left\n" in text


def test_in_a_pipe_every_line_comes_plain(checkout: Path) -> None:
    executable(checkout.parent / "bin" / "uv", TALKING_UV)
    done = run(checkout, f"{checkout.parent / 'bin'}:/usr/bin:/bin", TERM="xterm")
    lines = done.stderr.splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[1:4] == ["  Resolved 3 packages in 1ms", "  Downloading jaxlib (80.1MiB)", "   Downloaded jaxlib"]
    assert sum(line.endswith(", 2 packages installed") for line in lines) == 3


def test_a_new_lock_makes_them_anew(checkout: Path, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "uv", FAKE_UV)
    variables = {"UV_CALLS": str(tmp_path / "calls")}
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    run(checkout, path, **variables)
    (checkout / "uv.lock").write_text("another", encoding="utf-8")
    run(checkout, path, **variables)
    assert len((tmp_path / "calls").read_text(encoding="utf-8").splitlines()) == 6


def test_a_python_of_pyenv_is_found_past_a_dead_shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "shims" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    pyenv = tmp_path / "pyenv" / "versions" / "3.13.1" / "bin" / "python3"
    executable(pyenv, "echo 3 13")
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert pyenv in list(bootstrap.python_candidates(tmp_path, None))
    assert bootstrap.python_version(pyenv) == (3, 13)
    assert bootstrap.python_version(tmp_path / "shims" / "python3.12") is None


@pytest.mark.long
def test_without_uv_and_network_it_says_what_is_missing(checkout: Path) -> None:
    done = run(checkout, "/nonexistent")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("volley: uv is missing")
    assert "package index cannot be reached" in last
    assert "Traceback" not in done.stderr


def test_a_failing_installation_is_told_in_one_line(checkout: Path, tmp_path: Path) -> None:
    executable(
        tmp_path / "bin" / "uv",
        'case "$1" in --version) echo "uv 0.99.0" ;; *) echo "error: Failed to fetch: x" >&2; exit 2 ;; esac',
    )
    done = run(checkout, f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "volley: environment base could not be installed: the package index cannot be reached"
    )


def test_an_old_uv_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "bin" / "uv", 'echo "uv 0.4.30"')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bootstrap.find_uv(tmp_path) is None


def test_the_makefile_starts_it() -> None:
    text = (PROJECT / "Makefile").read_text(encoding="utf-8")
    for target in ("quickstart", "test", "check", "format", "bench"):
        assert f"\n{target}: install" in text
