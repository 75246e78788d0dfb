"""The first signal stops the command, whatever has become of its output; each further one is told apart."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminal import in_terminal
from volley.layout import PROJECT
from volley.local.signals import Stopped, stopping_on_signal


@pytest.fixture(autouse=True)
def _hangups_arrive() -> Iterator[None]:
    """Also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("error", [BrokenPipeError, OSError])
def test_a_signal_is_not_lost_with_the_output(error: type[OSError]) -> None:
    told: list[str] = []

    def first(name: str) -> None:
        told.append(name)
        raise error

    async def body() -> None:
        async with stopping_on_signal(first, lambda: told.append("again")):
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(0.01)
                raise

    with pytest.raises(Stopped) as stopped:
        asyncio.run(body())
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert told == ["SIGTERM", "again"]


def test_a_hangup_that_the_parent_ignores_stops_nothing() -> None:
    """As under `nohup`, whose terminal is then closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def body() -> str:
        async with stopping_on_signal():
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        return "went on"

    try:
        assert asyncio.run(body()) == "went on"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_follow_and_the_cursor_is_back(tmp_path: Path, number: signal.Signals) -> None:
    services = [f"services.{name}.url=http://127.0.0.1:1" for name in ("env", "rollout", "orchestrator", "trainer")]
    command = [sys.executable, "-m", "volley", "follow", "--config", str(PROJECT / "configs/chaos.yaml")]
    variables = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(PROJECT)}
    signalled = False
    with in_terminal([*command, f"run.dir={tmp_path}", *services], 100, variables) as program:
        while program.process.poll() is None:
            if "\x1b[?25l" in program.text() and not signalled:
                program.process.send_signal(number)
                signalled = True
            time.sleep(0.05)
    screen = program.screen()
    assert program.process.returncode == 128 + number, screen.text()
    assert not screen.cursor_hidden
    assert f"stopped by {number.name}; run chaos continues" in screen.text()
