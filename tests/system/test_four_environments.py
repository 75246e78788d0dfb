"""One run of four environments: built in, of reasoning-gym, submitted, and on a remote OpenEnv server that is killed
and comes back. The real stack, and OpenEnv's own package.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.errors import Unavailable
from shared.process.ports import free_port
from shared.run import archive
from shared.run.folder import RunFolder
from shared.types import Group
from shared.web.access import Role, token_for
from tests.docs.commands import first_example
from tests.support.net import HTTP, wait_http
from tests.support.stack import Training, training
from tools.openenv import ECHO_SERVER
from tools.openenv.installed import openenv_python
from volley.runs import addresses
from volley_proof.verify.command import verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

N_STEPS = 120
MIXTURE = (
    "data.mixture.reasoning_gym.weight=1",
    "data.mixture.reasoning_gym.env_config.dataset=chain_sum",
    "data.mixture.reasoning_gym.env_config.talk=bare",
)
UNCONFINED = "services.env.unsandboxed=[compass]"
ALL = {"frozen_lake", "reasoning_gym", "compass@1", "echo@1"}


@pytest.fixture(scope="module")
def openenv() -> Path:
    try:
        return openenv_python()
    except Unavailable as error:
        pytest.skip(f"OpenEnv's package is not here: {error}")


@contextmanager
def echo_server(python: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([str(python), str(ECHO_SERVER), str(port), "64"]) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/health")
            yield process
        finally:
            process.kill()


def test_each_is_trained_on_and_the_remote_one_comes_back(tmp_path: Path, openenv: Path) -> None:
    port = free_port()
    changes = (f"trainer.max_steps={N_STEPS}", "trainer.groups_per_step=4", "data.n_eval_tasks=2", *MIXTURE, UNCONFINED)
    with training(tmp_path, *changes) as run:
        run.wait_for(r"^step +1/", 400)
        with echo_server(openenv, port):
            call = _caller(run)
            call("env", "POST", "/environments", {"name": "compass", "source": first_example(), "weight": 1})
            far = {"action_field": "message", "observation": "text", "num_tasks": {"train": 100, "eval": 10}}
            body = {"name": "echo", "url": f"http://127.0.0.1:{port}", "protocol": "openenv", "config": far}
            call("env", "POST", "/environments", {**body, "weight": 1})
            _until(lambda: _groups(call, "echo@1") >= 4 and _groups(call, "compass@1") >= 4, 400)
        _until(lambda: _row(call, "echo@1")["state"] == "suspended", 300)
        others = _groups(call, "compass@1")
        _until(lambda: _groups(call, "compass@1") > others, 120)
        with echo_server(openenv, port):
            before = _groups(call, "echo@1")
            _until(lambda: _groups(call, "echo@1") >= before + 2, 400)
            assert run.wait(1200) == 0, run.text()
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    trained = Counter(group.env for group in _trained(run.folder))
    assert set(trained) == ALL, trained
    assert min(trained.values()) >= 4, trained
    summary = orjson.dumps(orjson.loads(run.folder.summary.read_bytes())).decode()
    assert all(name.partition("@")[0] in summary for name in ALL)


type Call = Callable[..., Any]


def _caller(run: Training) -> Call:
    at = addresses.read(run.folder)
    headers = {"Authorization": f"Bearer {token_for(at.token_files, Role.ADMIN)}"}

    def call(service: str, method: str, path: str, body: Any = None) -> Any:
        answer = HTTP.request(method, at.urls[service] + path, json=body, headers=headers, timeout=30)
        assert answer.status_code < 300, answer.text
        return answer.json()

    return call


def _row(call: Call, env: str) -> Any:
    rows = call("orchestrator", "GET", "/runs")[0]["mixture"]
    return next((row for row in rows if row["env"] == env), {"groups": 0, "state": "absent"})


def _groups(call: Call, env: str) -> int:
    return _row(call, env)["groups"]


def _until(holds: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def _trained(folder: RunFolder) -> list[Group]:
    versions = archive.versions(folder.archive)
    return [Group.decode(data) for version in versions for data in archive.read(folder.archive, folder.name, version)]
