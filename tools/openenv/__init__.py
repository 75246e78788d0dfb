"""OpenEnv's own package, for tests and benchmarks to compare and communicate with."""

from __future__ import annotations

from pathlib import Path

ECHO_SERVER = Path(__file__).with_name("echo_server.py")
PLAYER = Path(__file__).with_name("play.py")
