"""OpenEnv's own package, beside this project: what tests and benchmarks compare and talk with."""

from __future__ import annotations

from pathlib import Path

ECHO_SERVER = Path(__file__).with_name("echo_server.py")
PLAYER = Path(__file__).with_name("play.py")
