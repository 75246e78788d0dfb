"""`python -m tools.docs.service NAME`: print a service's OpenAPI document and metrics as JSON.

The process imports this one service, so its registry holds this service's metrics alone. Engine and learner are the
simulated ones.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared import config
from shared.boot import RunningService
from shared.process.telemetry import REGISTRY
from shared.schema import RunConfig
from shared.services_schema import TokenFiles
from tools.embedded_redis import embedded_server
from volley.layout import PROJECT

_MODULES = {"rollout": "tools.simulated.rollout", "trainer": "tools.simulated.trainer"}


def main(name: str) -> None:
    module = import_module(_MODULES.get(name, f"services.{name}.app"))
    with tempfile.TemporaryDirectory() as folder, embedded_server(Path(folder) / "queue") as redis:
        run = _run(Path(folder), redis.url)
        print(json.dumps({"openapi": asyncio.run(_document(module.open_service(run))), "metrics": metrics()}))


def _run(folder: Path, redis_url: str) -> RunConfig:
    """Configuration of a service that asks for tokens, so that its document names roles."""
    address = urlsplit(redis_url)
    secrets = {role: f"{role}-token-of-a-document" for role in TokenFiles.model_fields}
    for name, secret in {**secrets, "redis": address.password or ""}.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(secret, encoding="utf-8")
    services = {
        "redis_url": f"redis://{address.hostname}:{address.port}/0",
        "redis_password_file": folder / "redis",
        **{f"token_files.{role}": folder / role for role in secrets},
    }
    overrides = [f"run.dir={folder}", *(f"services.{key}={value}" for key, value in services.items())]
    return config.load([PROJECT / "configs" / "chaos.yaml"], overrides).config


async def _document(opening: AbstractAsyncContextManager[RunningService]) -> dict[str, Any]:
    async with opening as service:
        return service.app.openapi()


def metrics() -> list[dict[str, Any]]:
    """Name, type, labels and meaning of the metrics of this process, without Prometheus' own."""
    found = []
    for collector in list(REGISTRY._collector_to_names):
        for family in collector.collect():
            if family.name.startswith("volley_"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                labels = [*(getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ()))]
                found.append({"name": name, "type": family.type, "labels": labels, "meaning": family.documentation})
    return sorted(found, key=lambda metric: metric["name"])


if __name__ == "__main__":
    main(sys.argv[1])
