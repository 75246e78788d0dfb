"""Asks torch, transformers and PEFT, in an environment and a process of their own (`torch_server.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import foreign

PROGRAM = Path(__file__).with_name("torch_server.py")


class Torch:
    """`process` answers one question after the other: importing torch takes seconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, name: str, arrays: Mapping[str, np.ndarray] | None = None, **arguments: Any) -> dict[str, np.ndarray]:
        """Call a function of the torch program by name; return its arrays."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(folder) / "given.npz", **(arrays or {}))
            self._process.stdin.write(json.dumps({"name": name, "arguments": arguments, "in": folder}) + "\n")
            self._process.stdin.flush()
            error = json.loads(self._process.stdout.readline())["error"]
            assert not error, error
            with np.load(Path(folder) / "found.npz") as found:
                return dict(found)


@pytest.fixture(scope="session")
def torch() -> Iterator[Torch]:
    """One process for all tests of a suite. Skips if the environment cannot be made."""
    command = [str(foreign.torch()), str(PROGRAM)]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(command, env=os.environ | offline, **pipes) as process:
        yield Torch(process)
        assert process.stdin is not None
        process.stdin.close()
