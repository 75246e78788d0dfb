"""Docker on the machine of the tests."""

from __future__ import annotations

import shutil
import subprocess

IMAGE = "python:3.13-slim"


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, encoding="utf-8", timeout=60, check=False)


def why_no_docker() -> str:
    """Return why this machine has no Docker with Compose and IMAGE; empty if it has."""
    if shutil.which("docker") is None or docker("compose", "version").returncode:
        return "there is no Docker with Compose on this machine"
    if (found := docker("image", "inspect", IMAGE)).returncode:
        return f"Docker does not answer, or has no image {IMAGE}: {found.stderr.strip()}"
    return ""
