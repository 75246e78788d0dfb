"""What Volley starts may keep compiled bytecode, also where the caller's environment forbids it."""

from __future__ import annotations

import subprocess

import pytest

from volley.layout import PROJECT, variables_of

FORBIDDEN = "PYTHONDONTWRITEBYTECODE"


def test_services_write_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORBIDDEN, "1")
    monkeypatch.setenv("KEPT", "yes")
    variables = variables_of("base", cpu=True)
    assert FORBIDDEN not in variables
    assert variables["KEPT"] == "yes"


def test_what_make_starts_writes_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORBIDDEN, "1")
    command = ["make", "--no-print-directory", "--eval", "show-environment:\n\t@env", "show-environment"]
    shown = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", check=True).stdout
    assert FORBIDDEN not in shown
    assert "PATH=" in shown


def test_a_run_on_cpus_uses_the_cpu_whatever_the_shell_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert variables_of("trainer", cpu=True)["JAX_PLATFORMS"] == "cpu"
    assert variables_of("trainer", cpu=False)["JAX_PLATFORMS"] == "cuda"
