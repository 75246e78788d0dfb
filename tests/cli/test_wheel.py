"""The wheel, built from this clone, installed elsewhere and run from an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from volley.bootstrap import find_uv
from volley.layout import PROJECT

UV = f"""#!/bin/sh
case "$1" in
  --version) echo "uv 0.99.0" ;;
  sync)
    echo "$UV_PROJECT_ENVIRONMENT $*" >> "$UV_CALLS"
    [ -z "$UV_FAILS" ] || {{ echo "error: $UV_FAILS" >&2; exit 2; }}
    {sys.executable} -m venv --without-pip "$UV_PROJECT_ENVIRONMENT"
    for site in "$UV_PROJECT_ENVIRONMENT"/lib/python3*/site-packages; do
      echo {sysconfig.get_path("purelib")} > "$site/zz.pth"
    done ;;
  *) exit 1 ;;
esac
"""
"""Stands in for uv: an environment that it makes finds the libraries of this one."""


@dataclass(frozen=True)
class Machine:
    """A folder with the installed wheel, a home without anything, and an empty folder to work in."""

    folder: Path
    site: Path

    @property
    def cache(self) -> Path:
        return self.folder / "cache" / "volley"

    def variables(self) -> Mapping[str, str]:
        return {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "UV_CALLS": str(self.folder / "calls"),
            "PYTHONPATH": str(self.site),
        }

    def volley(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "volley", *arguments],
            cwd=self.folder / "empty",
            env={**self.variables(), **variables},
            capture_output=True,
            encoding="utf-8",
            timeout=30,
            check=False,
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel."""
    out = tmp_path_factory.mktemp("dist")
    command = ["make", "--no-print-directory", "-o", "install", "build", "ARGS=--quiet --offline", f"OUT={out}"]
    subprocess.run(command, cwd=PROJECT, check=True)
    return out


@pytest.fixture
def machine(built: Path, tmp_path: Path) -> Machine:
    site = tmp_path / "site"
    (wheel,) = built.glob("volley_rl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in ("bin", "home", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "uv").write_text(UV, encoding="utf-8")
    (tmp_path / "bin" / "uv").chmod(0o755)
    return Machine(tmp_path, site)


def test_the_wheel_holds_all_code_and_all_packages(built: Path) -> None:
    (wheel,) = built.glob("volley_rl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = [PROJECT / name for name in ("services", "shared", "volley")] + [*PROJECT.glob("packages/*/volley_*")]
    for folder in folders:
        files = {str(path.relative_to(folder.parent)) for path in folder.rglob("*.py")}
        assert files <= names, folder
    assert not [name for name in names if name.endswith(".pyc") or "/tests/" in name]


def test_the_sdist_holds_what_the_wheel_is_built_from(built: Path) -> None:
    (sdist,) = built.glob("volley_rl-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"uv.lock", "hatch_build.py", "configs/quickstart.yaml", "packages/proof/pyproject.toml"} <= names


def test_help_and_version_make_no_environment(machine: Machine) -> None:
    assert machine.volley("--version").stdout.startswith("volley 0.")
    assert "quickstart" in machine.volley("--help").stdout
    assert not machine.cache.exists()


def test_a_command_runs_in_an_environment_that_it_makes_once(machine: Machine) -> None:
    """Its files come from the folder in the cache, and nothing is written into the present one."""
    shown = machine.volley("config", "show", "--config", "configs/quickstart.yaml", "--json")
    assert shown.returncode == 0, shown.stderr
    (folder,) = (path for path in machine.cache.iterdir() if path.is_dir())
    assert str(folder / "configs" / "models" / "quickstart") in shown.stdout
    assert shown.stderr.startswith("volley: installing environment base")
    assert machine.volley("config", "show", "--config", "configs/quickstart.yaml").stderr == ""
    (call,) = (machine.folder / "calls").read_text(encoding="utf-8").splitlines()
    assert call.startswith(f"{folder}/.venvs/base sync --locked")
    assert {"--no-dev", "--no-install-workspace"} <= set(call.split())
    assert not any((machine.folder / "empty").iterdir())
    command = [str(folder / ".venvs" / "base" / "bin" / "volley"), "--version"]
    assert subprocess.run(command, cwd=machine.folder, check=False).returncode == 0


def test_starts_at_once_wait_for_each_other(machine: Machine) -> None:
    with ThreadPoolExecutor(3) as pool:
        done = [one.result() for one in [pool.submit(machine.volley, "doctor", "--json") for _ in range(3)]]
    assert all('"not made yet"' in one.stdout for one in done), done
    assert len((machine.folder / "calls").read_text(encoding="utf-8").splitlines()) == 1


def test_another_build_has_another_folder(machine: Machine) -> None:
    assert machine.volley("upgrade").returncode == 0
    record = next(machine.site.glob("*.dist-info/RECORD"))
    text = record.read_text(encoding="utf-8")
    record.write_text(text.replace("volley/wheel.py,sha256=", "volley/wheel.py,sha256=x"), encoding="utf-8")
    told = machine.volley("upgrade").stdout
    assert len([path for path in machine.cache.iterdir() if path.is_dir()]) == 2
    assert "other version: " in told
    assert "  environment trainer: made when a command needs it\n" in told
    assert "to upgrade: pip install --upgrade volley-rl" in told


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (
            "failed to write: No space left on device (os error 28)",
            r"the disk of /\S+ is full \([\d.]+ GB free\)\. .* need 4 GB",
        ),
        ("Failed to fetch: https://x", "the package index cannot be reached; check the network"),
        (
            "Failed to download `a`\n  cause: Network connectivity is disabled\nhint: b",
            "its cache lacks packages",
        ),
        ("no solution\n\n  hint: a needs b", "could not be installed: error: no solution$"),
    ],
)
def test_a_failed_installation_is_one_line_and_continues(machine: Machine, output: str, told: str) -> None:
    failed = machine.volley("doctor", UV_FAILS=output)
    assert failed.returncode == 1
    assert re.search(told, failed.stderr.splitlines()[-1])
    assert "Traceback" not in failed.stderr
    assert re.search(r"✓ environment base +volley-rl 0\.", machine.volley("doctor").stdout)


def test_a_cache_that_cannot_be_made_is_named(machine: Machine) -> None:
    (machine.folder / "file").write_text("", encoding="utf-8")
    failed = machine.volley("doctor", VOLLEY_CACHE=str(machine.folder / "file" / "x"))
    assert failed.returncode == 1
    assert "VOLLEY_CACHE names another folder" in failed.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_quickstart_runs_from_an_empty_folder(built: Path, tmp_path: Path) -> None:
    """With the real uv, which takes packages from its cache or the index."""
    uv = find_uv(PROJECT)
    assert uv is not None
    (wheel,), python = built.glob("volley_rl-*.whl"), tmp_path / "venv" / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, wheel], check=True)
    (tmp_path / "empty").mkdir()
    variables = {**os.environ, "VOLLEY_CACHE": str(tmp_path / "cache")}
    try:
        done = subprocess.run(
            [tmp_path / "venv" / "bin" / "volley", "quickstart"],
            cwd=tmp_path / "empty",
            env=variables,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
    finally:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "none lost (verified)" in done.stdout
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["runs"]
