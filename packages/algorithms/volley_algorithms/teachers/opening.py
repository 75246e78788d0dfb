"""Open the teachers of a run for the orchestrator, and check that they answer: the part `teachers`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from services.orchestrator.episodes.teaching import GroupTeaching, OpenTeachers, Teachers, TeachingContext
from shared.clients.keys import read_key
from shared.files.spending import SpendingStore
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from shared.services_schema import OrchestratorEndpoint
from volley_algorithms.teachers.client import TeacherClient
from volley_algorithms.teachers.own_servers import OwnServers
from volley_algorithms.teachers.privileged import PrivilegedTeaching
from volley_algorithms.teachers.teaching import EpisodeTeaching, Teacher, TeachingBudget, TeachingByEnvironment


def teachers_of(config: RunConfig) -> OpenTeachers:
    """Return what opens the teachers that are configured."""
    services = config.services
    return partial(_open, services.orchestrator, RunFolder(config.run.folder).teacher, services.tls.ca_file)


@asynccontextmanager
async def _open(
    configured: OrchestratorEndpoint, spending: Path, ca_file: Path | None, context: TeachingContext
) -> AsyncIterator[Teachers]:
    """Open the servers, and the store of their budgets if one has a limit. Raises ConfigError."""
    servers, bounds, tokenizer = configured.all_teachers(), context.bounds, context.tokenizer
    of_episodes, of_groups = dict[str, EpisodeTeaching](), dict[str, GroupTeaching]()
    async with AsyncExitStack() as stack:
        store: SpendingStore | None = None
        if any(server.max_requests or server.max_tokens for server in servers.values()):
            store = stack.enter_context(await asyncio.to_thread(SpendingStore, spending))
        for key, server in servers.items():
            limits, budget = (server.max_requests, server.max_tokens), None
            if store is not None and any(limits):
                budget = TeachingBudget(store, *limits, key)
            teacher: Teacher = OwnServers(context.balancer, server.timeout_s)
            if not server.is_self:
                token = read_key(server.token_file, f"{key}.token_file")
                client = TeacherClient(server, tokenizer.token, key=token, ca_file=ca_file)
                teacher = await stack.enter_async_context(client)
            teaching = EpisodeTeaching(teacher, context.status, server.max_concurrent, budget)
            if server.templates:
                longest = bounds.context_length - 1 if server.is_self else None
                of_groups[key] = PrivilegedTeaching(teaching, tokenizer, server.templates, longest, bounds.max_attempts)
            else:
                of_episodes[key] = teaching
        yield Teachers(
            TeachingByEnvironment(configured.teacher_of, of_episodes),
            lambda env: of_groups.get(configured.teacher_of(env) or ""),
        )


async def check(config: RunConfig) -> None:
    """Ask each of the run's teachers on other servers once. Raises TeacherAway, TeacherRefused, ConfigError (a key)."""
    for name, server in config.services.orchestrator.foreign_teachers().items():
        key, ca_file = read_key(server.token_file, f"{name}.token_file"), config.services.tls.ca_file
        async with TeacherClient(server, str, key=key, ca_file=ca_file) as teacher:
            await teacher.ready()
