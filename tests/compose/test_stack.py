"""The whole stack in containers, with two rollout servers, for five steps; then scaled, with Prometheus and Grafana.
Opt-in, since it builds images and trains:

VOLLEY_TEST_COMPOSE=1 pytest tests/compose/test_stack.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.services import SERVICES
from tests.compose import compose_file
from tests.compose.dashboard import panels, rules
from tests.docs.commands import first_example

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = (
    "run.name=compose-test sft.max_steps=10 sft.n_demonstrations=64 trainer.max_steps=5 trainer.groups_per_step=4"
    " data.n_eval_tasks=20"
)
QUIET = {"volley_failed_attempts_total", "volley_session_calls_total", "volley_env_hung_calls"}
"""Metrics without a series in a run without failures, agents and slow environments."""
QUERY = "/api/v1/query"
PORTS = {"prometheus": 9090, "grafana": 3000}
ASK_WEIGHTS = """
import pathlib, urllib.request
token = pathlib.Path("/run/secrets/token_viewer").read_text()
request = urllib.request.Request("http://127.0.0.1:8102/weights", headers={"Authorization": "Bearer " + token})
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""

ASK_ENVIRONMENTS = """
import pathlib, sys, urllib.request
token = pathlib.Path("/run/secrets/token_admin").read_text()
headers = {"Authorization": "Bearer " + token, "Content-Type": "text/x-python"}
request = urllib.request.Request("http://127.0.0.1:8101" + sys.argv[1], headers=headers)
if len(sys.argv) > 2:
    request.data = sys.argv[2].encode()
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("VOLLEY_TEST_COMPOSE") != "1", reason="set VOLLEY_TEST_COMPOSE=1 to build and run the containers"
    ),
    pytest.mark.timeout(3000),
]


class ComposeStack:
    """A compose project of its own. Only the ports of Prometheus and Grafana are published, as free ones."""

    def __init__(self, folder: Path) -> None:
        override = folder / "override.yaml"
        lines = [f"  {name}: {{ports: !reset []}}" for name in (*SERVICES, "dashboard")]
        lines += [f'  {name}: {{ports: !override ["127.0.0.1::{port}"]}}' for name, port in PORTS.items()]
        override.write_text("\n".join(["services:", *lines]), encoding="utf-8")
        self._command = [
            "docker",
            "compose",
            "-p",
            f"volley-test-{os.getpid()}",
            "-f",
            str(ROOT / "compose.yaml"),
            "-f",
            str(override),
        ]
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith("VOLLEY_") or key == "VOLLEY_CA_FILE"
        }
        self._environment = {**kept, "VOLLEY_OVERRIDES": OVERRIDES}

    def __call__(self, *arguments: str, timeout_s: float = 60.0, check: bool = True) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environment,
            cwd=ROOT,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout_s,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stderr[-4000:]}"
        return done.stdout

    def exit_code(self, service: str, timeout_s: float) -> int:
        """Waits until the service's one container has ended. Raises TimeoutExpired."""
        container = self("ps", "--all", "--quiet", service).split()[-1]
        done = subprocess.run(
            ["docker", "wait", container], capture_output=True, encoding="utf-8", timeout=timeout_s, check=True
        )
        return int(done.stdout)

    def weights(self, replica: int) -> dict[str, Any]:
        """What GET /weights of one rollout server answers."""
        return json.loads(self("exec", "-T", "--index", str(replica), "rollout", "python", "-IS", "-c", ASK_WEIGHTS))

    def environments(self, path: str, *source: str) -> Any:
        """What the environment service answers to an administrator."""
        return json.loads(self("exec", "-T", "env", "python", "-IS", "-c", ASK_ENVIRONMENTS, path, *source))

    def get(self, service: str, path: str, **query: str) -> Any:
        """Return the answer of Prometheus or Grafana."""
        address = self("--profile", "obs", "port", service, str(PORTS[service])).strip()
        return httpx.get(f"http://{address}{path}", params=query, trust_env=False, timeout=30).raise_for_status().json()

    def targets(self) -> dict[str, str]:
        """Health of what Prometheus scrapes, by address."""
        found = self.get("prometheus", "/api/v1/targets")["data"]["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in found}

    def state_of(self, name: str) -> str:
        return self.environments(f"/environments/{name}")["versions"][-1]["state"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no docker engine can be reached")
    stack = ComposeStack(tmp_path_factory.mktemp("compose"))
    try:
        yield stack
    finally:
        stack("--profile", "obs", "down", "--volumes", "--timeout", "20", timeout_s=120, check=False)


def test_scaled_stack_trains_and_both_rollout_servers_end_on_the_last_version(stack: ComposeStack) -> None:
    stack("up", "--build", "--detach", "--scale", "rollout=2", timeout_s=1500)
    stack.environments("/environments?name=compass&weight=0", first_example())
    code = stack.exit_code("report", timeout_s=1200)
    told = stack("logs", "--no-log-prefix", "report")
    assert code == 0, told + stack("logs", "--tail", "30")
    assert "DONE: steps=5 " in told
    summary = json.loads(stack("exec", "-T", "trainer", "cat", "/runs/compose-test/summary.json"))
    assert summary["steps"] == 5
    assert summary["final_weight_version"].endswith("-s000005")
    assert [stack.weights(replica)["current"] for replica in (1, 2)] == [summary["final_weight_version"]] * 2
    stack("exec", "-T", "dashboard", "python", "-IS", "docker/probe.py", "8100", "/")
    assert stack.state_of("compass") == "active"
    stack("restart", "--timeout", "20", "env")
    stack("up", "--no-deps", "--no-recreate", "--detach", "--wait", "env", timeout_s=120)
    assert stack.state_of("compass") == "active", "what was submitted is kept in a volume"


def has(image: str) -> bool:
    """Return True if the engine has an image, or can pull it."""
    return any(
        subprocess.run(["docker", *command, image], capture_output=True, timeout=600).returncode == 0
        for command in (["image", "inspect"], ["pull"])
    )


def until(expected: Any, look: Callable[[], Any], timeout_s: float = 120.0) -> None:
    """Look every second until it is as expected."""
    deadline = time.monotonic() + timeout_s
    while (found := look()) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(1)


def test_prometheus_scrapes_every_replica_and_every_panel_has_data(stack: ComposeStack) -> None:
    services = compose_file.services()
    if not has(services["prometheus"]["image"]):
        pytest.skip("the image of Prometheus cannot be had")
    stack("up", "--no-deps", "--no-recreate", "--detach", "--scale", "rollout=3", "rollout", timeout_s=120)
    stack("--profile", "obs", "up", "--no-recreate", "--detach", "--wait", "prometheus", timeout_s=120)
    n_single = len(SERVICES) - 1
    until(["up"] * (n_single + 3), lambda: list(stack.targets().values()))
    (loaded,) = stack.get("prometheus", "/api/v1/rules")["data"]["groups"]
    assert len(loaded["rules"]) == len(list(rules()))
    assert {rule["health"] for rule in loaded["rules"]} <= {"ok", "unknown"}
    shown = [expression for expression, _ in panels() if not any(name in expression for name in QUIET)]
    until([], lambda: [one for one in shown if not stack.get("prometheus", QUERY, query=one)["data"]["result"]])
    stack("up", "--no-deps", "--no-recreate", "--detach", "--scale", "rollout=1", "rollout", timeout_s=120)
    until(["up"] * (n_single + 1), lambda: list(stack.targets().values()))
    if has(services["grafana"]["image"]):
        stack("--profile", "obs", "up", "--no-recreate", "--detach", "--wait", "grafana", timeout_s=180)
        assert stack.get("grafana", "/api/dashboards/uid/volley")["dashboard"]["title"] == "Volley"
