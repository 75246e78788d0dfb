"""The environment service that archived episodes are played to: one by its address, the run's own, or one started for
it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from services.cli.layout import PROJECT, python_of, variables_of
from services.cli.runs import addresses, identity
from services.cli.runs.record import read_record
from shared.clients.env import EnvClient
from shared.errors import ConfigError, Unavailable, VolleyError
from shared.process.ports import hold_free
from shared.run.folder import RunFolder
from shared.web.access import Role, token_for

_START_S = 120.0
_STOP_S = 20.0


@asynccontextmanager
async def environments_of(folder: RunFolder) -> AsyncIterator[EnvClient]:
    """That of the run if it is at work, else one that lives as long as the context. Raises VolleyError."""
    own = await _own(folder)
    if own is not None:
        async with own as client:
            yield client
        return
    async with _started(folder) as url, EnvClient(url) as client:
        yield client


async def _own(folder: RunFolder) -> EnvClient | None:
    """Of the run's service, if the run is at work."""
    try:
        found = addresses.read(folder)
        known = await identity.met(folder, found)
    except ConfigError:
        return None
    if not known.get("env") or not (known.get("orchestrator") or known.get("trainer")):
        return None
    return EnvClient(found.urls["env"], token=token_for(found.token_files, Role.SERVICE), ca_file=found.ca_file)


@asynccontextmanager
async def _started(folder: RunFolder) -> AsyncIterator[str]:
    """A service with the run's configuration, and what was submitted to the run. Raises Unavailable."""
    with tempfile.TemporaryFile() as log:
        process, url = await asyncio.to_thread(_launched, folder, log)
        try:
            await _ready(url, process, log.fileno())
            yield url
        finally:
            process.terminate()
            await asyncio.to_thread(_wait, process)


def _launched(folder: RunFolder, log: IO[bytes]) -> tuple[subprocess.Popen[bytes], str]:
    """Its process and its address."""
    record = read_record(folder)
    base = Path(record.cwd) if record is not None and Path(record.cwd).is_dir() else PROJECT
    with hold_free("127.0.0.1") as held:
        port: int = held.getsockname()[1]
    command = [str(python_of("base")), "-m", "services.env", "--config", str(folder.config)]
    command += [f"services.env.port={port}", "services.env.host=127.0.0.1", "services.token_files={}"]
    command += [f"services.env.folder={folder.environments}"]
    environment = {**variables_of("base", cpu=True), "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen(command, cwd=base, env=environment, stdout=log, stderr=log)
    return process, f"http://127.0.0.1:{port}"


async def _ready(url: str, process: subprocess.Popen[bytes], log: int) -> None:
    async with EnvClient(url) as client, asyncio.timeout(_START_S):
        while True:
            if process.poll() is not None:
                said = os.pread(log, 2000, 0).decode("utf-8", "replace").strip()
                raise Unavailable(f"the environment service ended with exit code {process.returncode}: {said}")
            try:
                return await client.ready()
            except VolleyError:
                await asyncio.sleep(0.1)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
