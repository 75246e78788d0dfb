"""Container engines on the machine of the tests."""

from __future__ import annotations

import shutil
import subprocess

IMAGE = "python:3.13-slim"


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return engine("docker", *arguments)


def engine(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command, *arguments], capture_output=True, encoding="utf-8", timeout=60, check=False)


def why_no_docker() -> str:
    """Return why this machine has no Docker with Compose and IMAGE; empty if it has."""
    if shutil.which("docker") is None or docker("compose", "version").returncode:
        return "there is no Docker with Compose on this machine"
    return why_no_engine("docker")


def why_no_engine(command: str) -> str:
    """Return why an engine cannot start a container of IMAGE here; empty if it can."""
    if shutil.which(command) is None:
        return f"there is no {command} on this machine"
    tried = engine(command, "run", "--rm", "--pull=never", "--network=none", IMAGE, "python3", "--version")
    return f"{command} cannot start a container of {IMAGE}: {tried.stderr.strip()}" if tried.returncode else ""
