"""What the light services import before they listen: real processes, which tell it themselves (`-X importtime`)."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from shared.process.ports import free_port
from tests.support.net import wait_http
from tests.support.redis import configured
from tests.support.tokenizer import FOLDER

ROOT = Path(__file__).parents[2]
OURS = {"services", "shared"}
CONFIGURED = {
    "volley_algorithms",
    "volley_commands",
    "volley_tinker",
    "volley_dashboard",
    "volley_engines",
    "volley_judges",
    "volley_tunix",
}
"""Packages that add to the configuration: sections, keys, kinds, and what other trainers call a key."""
WEB = {"annotated_doc", "anyio", "click", "fastapi", "httptools", "opentelemetry", "starlette", "uvicorn", "uvloop"}
FORMS = {"python_multipart", "sniffio"}
"""Five milliseconds: Starlette and anyio import them where they are; the packages mcp and openai bring them."""
MODELS = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
WIRE = {"blake3", "msgpack", "numpy", "orjson", "prometheus_client"}
CONFIGURATION = {"antlr4", "attr", "omegaconf", "yaml"}
"""0.05 s of CPU time."""
COMMON = OURS | CONFIGURED | WEB | FORMS | MODELS | WIRE | CONFIGURATION
SOCKETS = {"websockets"}
GYMNASIUM = {"cloudpickle", "farama_notifications", "gymnasium"}
CLIENTS = {"aiohappyeyeballs", "aiohttp", "aiosignal", "attr", "frozenlist", "idna", "multidict", "propcache", "yarl"}
QUEUE = {"cryptography", "hiredis", "redis", "zstandard"}
CHAT = {"jinja2", "markupsafe", "tokenizers"}
FILES = {"volley_data", "volley_python"}
"""Packages that read files of tasks, and environments in files."""
ALLOWED = {
    ("env", "sokoban"): COMMON | SOCKETS | {*FILES, "volley_environments", "volley_sandbox", "volley_serving"},
    ("env", "frozen_lake"): COMMON
    | SOCKETS
    | GYMNASIUM
    | {*FILES, "volley_environments", "volley_sandbox", "volley_serving"},
    ("orchestrator", "frozen_lake"): COMMON | CLIENTS | QUEUE | CHAT | {"volley_agents", "volley_serving"},
}
"""By service and environment, the packages it may import; who adds one has looked what its import costs."""
LINE = re.compile(r"import time:\s*\d+ \|\s*\d+ \|( +)(\S+)$")


def started(service: str, environment: str, folder: Path, redis_url: str) -> str:
    """What the service writes to stderr until it has answered /ready and ended."""
    port, path = free_port(), folder / "run.yaml"
    tree = {
        "run": {"name": "r", "dir": str(folder)},
        "model": {"path": str(FOLDER)},
        "data": {"env": environment},
        "services": configured(redis_url, folder),
    }
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    log = folder / "log"
    command = [sys.executable, "-X", "importtime", "-m", f"services.{service}", "--config", str(path)]
    command += [f"services.{service}.port={port}"]
    with log.open("w", encoding="utf-8") as file, subprocess.Popen(command, cwd=ROOT, stderr=file) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/ready", 120)
        except TimeoutError:
            pytest.fail(f"services.{service} does not listen: {log.read_text(encoding='utf-8')[-2000:]}")
        finally:
            process.terminate()
            process.wait(60)
    return log.read_text(encoding="utf-8")


def chains(text: str) -> dict[str, list[str]]:
    """By package: how it came in, from the outermost module to the package. A module
    is written when its import ends, one level deeper than the module that imports it, which ends later.
    """
    found: dict[str, list[str]] = {}
    open_chain: list[tuple[int, str]] = []
    for line in reversed(text.splitlines()):
        if (match := LINE.match(line)) is None:
            continue
        depth, name = len(match[1]), match[2]
        while open_chain and open_chain[-1][0] >= depth:
            open_chain.pop()
        open_chain.append((depth, name))
        found[name.partition(".")[0]] = [module for _, module in open_chain]
    return found


def is_foreign(package: str, chain: list[str]) -> bool:
    """Whether it is a library, and there: neither Python's own, nor this machine's, nor one that was only tried."""
    inside = package in sys.stdlib_module_names or package.startswith("_") or chain[0] == "site"
    return not inside and find_spec(package) is not None


@pytest.mark.parametrize(("service", "environment"), ALLOWED)
def test_a_light_service_imports_what_it_needs_to_listen_and_no_more(service, environment, tmp_path, redis_server):
    imported = chains(started(service, environment, tmp_path, redis_server.url))
    assert imported.keys() >= OURS | WEB, "nothing was measured"
    told = [
        f"{package}, through {' → '.join(chain)}"
        for package, chain in imported.items()
        if is_foreign(package, chain) and package not in ALLOWED[service, environment]
    ]
    assert not told, f"services.{service} imports before it listens: " + "; ".join(told)


def test_the_chain_of_an_import_is_read_from_the_nested_lines():
    lines = [
        "import time:  1 |  1 |     c.inner",
        "import time:  2 |  3 |   b",
        '{"event": "x"}',
        "import time: 1 | 4 | a",
    ]
    assert chains("\n".join(lines)) == {"a": ["a"], "b": ["a", "b"], "c": ["a", "b", "c.inner"]}


@pytest.mark.parametrize("module", ["volley", "services.env", "services.trainer"])
def test_another_package_shared_is_named(module: str, tmp_path: Path) -> None:
    """A folder `shared/` with an `__init__.py` on PYTHONPATH comes before the project's own."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").touch()
    command = [sys.executable, "-P", "-m", module, "--help"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"volley: the package {tmp_path / 'shared'} hides Volley's own: take its folder out of PYTHONPATH\n"
    )
