"""Open the judges of a run for the orchestrator (part `group_judges`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from services.orchestrator.judges import GroupJudges, JudgeContext, OpenJudges
from shared.run.folder import RunFolder
from shared.run_config import section_of
from shared.schema import RunConfig
from volley_judges.section import JudgesSection


def judges_of(config: RunConfig) -> OpenJudges | None:
    """Return what opens the judges; None if the run has none. Raises ConfigError."""
    section = section_of(config, JudgesSection)
    if not section.rewards:
        return None
    section.check(config)
    attempts, ca_file = config.orchestrator.max_attempts, config.services.tls.ca_file
    return partial(_open, section, RunFolder(config.run.folder).judges, ca_file, attempts)


@asynccontextmanager
async def _open(
    section: JudgesSection, path: Path, ca_file: Path | None, attempts: int, context: JudgeContext
) -> AsyncIterator[GroupJudges]:
    """Open the stored answers and the servers. Raises ConfigError, StorageUnavailable."""
    from volley_judges.judges import RunJudges  # a run without judges needs none of it
    from volley_sandbox.rewards.servers import AskedServer
    from volley_sandbox.rewards.store import RewardStore

    async with AsyncExitStack() as stack:
        store = stack.enter_context(await asyncio.to_thread(RewardStore, path))
        servers = dict[str, AskedServer]()
        for name in sorted({judge.server for _, _, judge in section.every()}):
            server = AskedServer(name, section.servers[name], store, ca_file, key=f"judges.servers.{name}")
            servers[name] = await stack.enter_async_context(server)
        yield RunJudges(section, context, servers, store, attempts)
