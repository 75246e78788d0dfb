"""Environment service for replayed episodes: the run's own, or a temporary one."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shared.clients.env import EnvClient
from shared.errors import ConfigError, Unavailable, VolleyError
from shared.process.ports import hold_free
from shared.run.folder import RunFolder
from shared.services import SERVICES
from shared.web.access import Role, token_for
from volley.layout import PROJECT, python_of, variables_of
from volley.local.processes import Child, ProcessSpec, Reaper, last_error
from volley.runs import addresses
from volley.runs.run_file import read_record
from volley_python.diagnosis import identity

_START_S = 120.0


@asynccontextmanager
async def environments_of(folder: RunFolder) -> AsyncIterator[EnvClient]:
    """Yield a client of the run's service if it is running, else of one started for the context. Raises VolleyError."""
    own = await _own(folder)
    if own is not None:
        async with own as client:
            yield client
        return
    async with _started(folder) as url, EnvClient(url) as client:
        yield client


async def _own(folder: RunFolder) -> EnvClient | None:
    """Client of the run's service; None if the run is not running."""
    try:
        found = addresses.read(folder)
        known = await identity.find_answering(folder, found)
    except ConfigError:
        return None
    if not known.get("env") or not any(known.get(name) for name, info in SERVICES.items() if info.run_key):
        return None
    return EnvClient(found.url("env"), token=token_for(found.token_files, Role.SERVICE), ca_file=found.ca_file)


@asynccontextmanager
async def _started(folder: RunFolder) -> AsyncIterator[str]:
    """Start a service with the run's configuration and submissions; it does not outlive this process.

    It refuses data files that have changed since the run, but accepts changed code of submitted environments, which is
    what reverify tests. If the run had no record of its data, the service's record is removed. Raises ConfigError,
    Unavailable.
    """
    is_recorded = folder.environment_data.exists()
    with tempfile.TemporaryDirectory() as logs, Reaper.running() as reaper:
        spec, url = _service(folder, Path(logs) / "env.log")
        child = await Child.start(spec, reaper)
        try:
            await _ready(url, child)
            yield url
        finally:
            await child.stop()
            if not is_recorded:
                folder.environment_data.unlink(missing_ok=True)


def _service(folder: RunFolder, log: Path) -> tuple[ProcessSpec, str]:
    """Process and address of the service. It runs in the run's folder of start, for paths of the configuration."""
    record = read_record(folder)
    base = Path(record.cwd) if record is not None and Path(record.cwd).is_dir() else PROJECT
    with hold_free("127.0.0.1") as held:
        port: int = held.getsockname()[1]
    command = [str(python_of("base")), "-P", "-m", "services.env", "--config", str(folder.config.absolute())]
    command += [f"services.env.port={port}", "services.env.host=127.0.0.1", "services.token_files={}"]
    command += [f"services.env.folder={folder.environments.absolute()}", "services.env.allow_changed_code=true"]
    environment = {**variables_of("base", cpu=True), "PYTHONPATH": str(PROJECT)}
    return ProcessSpec("env", tuple(command), environment, log, cwd=base), f"http://127.0.0.1:{port}"


async def _ready(url: str, child: Child) -> None:
    async with EnvClient(url) as client, asyncio.timeout(_START_S):
        while True:
            if child.exit_code is not None:
                said = last_error(child.spec.log)
                raise Unavailable(f"the environment service ended with exit code {child.exit_code}: {said}")
            try:
                return await client.ready()
            except VolleyError:
                await asyncio.sleep(0.1)
