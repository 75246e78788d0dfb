"""Start the engine's process, and explain why it ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from services.rollout.engines.base import EngineSpec
from shared.errors import EngineDied, VolleyError
from shared.models.config import ModelConfig
from shared.process.exit_codes import SIGKILL_HINT, describe, signal_of

# On a CPU each step allocates and frees large blocks. Kept by the process instead of returned to the kernel they cost
# no page faults: a step of 64 requests takes a third of the time.
_CPU = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_ARENA_MAX": "1",
}
_ONE_THREAD_HIDDEN_SIZE = 256
_DEVICES = "--xla_force_host_platform_device_count"
"""How many devices a CPU is taken for: as many as the model is split over. The last of equal flags counts."""


def spawn(spec: EngineSpec, sock: socket.socket, module: str) -> subprocess.Popen[bytes]:
    """Start the process; it runs `module`, which reads the spec from `sock`."""
    env = {**os.environ, "JAX_PLATFORMS": spec.platform}
    if spec.device == "cpu":
        env = {**_CPU, **env, "XLA_FLAGS": f"{env.get('XLA_FLAGS', '')} {_DEVICES}={spec.tp_size}".strip()}
        if spec.tp_size == 1 and _is_small(spec.model_path):
            env.setdefault("NPROC", "1")
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", module, str(sock.fileno())]
    return subprocess.Popen(command, env=env, pass_fds=[sock.fileno()], stdin=subprocess.DEVNULL)


def _is_small(model_path: str) -> bool:
    """Return whether a step's operations are so short that sharing them among threads costs more than it saves."""
    return ModelConfig.read(Path(model_path)).hidden_size <= _ONE_THREAD_HIDDEN_SIZE


def death(process: subprocess.Popen[bytes], cause: VolleyError | None) -> EngineDied:
    """Return the error of calls to an engine whose process has ended. `cause`: the error that ended it, if known."""
    code = process.poll()
    ended = "it closed the link" if code is None else describe(code)
    hint = SIGKILL_HINT if cause is None and code == -signal.SIGKILL else "restart the server"
    return EngineDied(f"the engine's process {process.pid} is gone: {ended if cause is None else cause.detail}", hint)


def boot_failure(process: subprocess.Popen[bytes], cause: VolleyError | None) -> VolleyError:
    """Return the reason why an engine is not up: its own error, or EngineDied if another start may succeed."""
    died, code = death(process, cause), process.poll()
    if cause is not None:
        return died if cause.outage else cause
    ended_itself = code is not None and signal_of(code) is None
    return VolleyError(died.detail, "see the preceding lines of its log") if ended_itself else died
