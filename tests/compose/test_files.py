"""What the compose file and the images promise, read from the files; and the two small programs the containers run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from shared import config
from shared.process.ports import free_port
from shared.services import SERVICES
from tests.compose import compose_file
from tests.support.committed import every_config

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
LONG_RUNNING = {"redis", "dashboard", *SERVICES}
OBS = {"prometheus", "grafana"}


def resolved(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The compose file as the plugin understands it; needs the plugin, not the engine."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no docker compose plugin on this machine")
    file = () if "-f" in arguments else ("-f", str(ROOT / "compose.yaml"))
    command = ["docker", "compose", *file, *arguments, "config", "--format", "json"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VOLLEY_", "COMPOSE_"))}
    return subprocess.run(command, capture_output=True, encoding="utf-8", env={**kept, **settings}, timeout=30)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The default stack with Prometheus and Grafana."""
    done = resolved("--profile", "obs")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def test_the_run_needs_no_profile_and_obs_adds_the_metrics() -> None:
    services = compose_file.services()
    profiles = {name: service.get("profiles", []) for name, service in services.items()}
    assert {name for name, of in profiles.items() if not of} == LONG_RUNNING | {"prepare", "check", "report"}
    assert {name for name, of in profiles.items() if of == ["obs"]} == OBS


def test_settings_of_the_example_are_the_defaults(compose: dict[str, Any]) -> None:
    done = resolved("--profile", "obs", "--env-file", str(ROOT / ".env.example"))
    assert json.loads(done.stdout) == compose


def test_settings_are_listed() -> None:
    used = set(re.findall(r"\$\{(VOLLEY_\w+)", (ROOT / "compose.yaml").read_text(encoding="utf-8")))
    example = re.findall(r"^(VOLLEY_\w+)=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
    documented = re.findall(
        r"^\| `(VOLLEY_\w+)`", (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert used == set(example) == set(documented)


def test_gpus_are_reserved_for_trainer_and_rollout_servers_alone(compose: dict[str, Any]) -> None:
    done = resolved("--profile", "obs", VOLLEY_DEVICE="gpu", VOLLEY_ROLLOUT_GPUS="1,2")
    services = json.loads(done.stdout)["services"]
    assert services.keys() == compose["services"].keys(), "the same names: addresses and commands are those of CPUs"
    reserved = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in services.items()
        if "deploy" in service
    }
    nvidia = {"driver": "nvidia", "capabilities": ["gpu"]}
    assert reserved == {"trainer": [{**nvidia, "device_ids": ["0"]}], "rollout": [{**nvidia, "device_ids": ["1,2"]}]}
    for name in reserved:
        assert services[name]["image"] == f"volley-{name}-gpu:latest"
        assert services[name]["build"]["args"] == {"EXTRA": f"{name}-gpu"}
    told = {name for name, service in services.items() if "rollout.engine.device=gpu" in (service["command"] or ())}
    assert told == {*SERVICES, "check", "report"}


def test_published_images_need_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_bytes((ROOT / "compose.yaml").read_bytes())
    done = resolved("-f", str(file), VOLLEY_IMAGES="registry.example/team/", VOLLEY_TAG="1.2.3", VOLLEY_PULL="missing")
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    ours = {name: one for name, one in services.items() if name != "redis"}
    assert all(one["image"].startswith("registry.example/team/volley-") for one in ours.values())
    assert all(one["image"].endswith(":1.2.3") and one["pull_policy"] == "missing" for one in ours.values())
    binds = [mount for one in services.values() for mount in one.get("volumes", ()) if mount["type"] == "bind"]
    assert binds == []


def test_unknown_device_is_named() -> None:
    done = resolved(VOLLEY_DEVICE="npu")
    assert done.returncode
    assert "trainer-npu" in done.stderr or "rollout-npu" in done.stderr


def test_every_service_of_the_run_is_there_with_a_health_check(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services.keys() >= LONG_RUNNING
    assert all("healthcheck" in services[name] for name in LONG_RUNNING)


def test_a_wrong_configuration_stops_the_stack_before_its_services(compose: dict[str, Any]) -> None:
    """Once they have started, they are restarted without a bound."""
    services = compose["services"]

    def waits_for(name: str) -> set[str]:
        direct = services[name].get("depends_on", {})
        return {*direct, *(other for one in direct for other in waits_for(one))}

    for name in SERVICES:
        assert "check" in waits_for(name), name
        assert services[name]["restart"] == "on-failure", name
    assert services["env"]["depends_on"]["check"]["condition"] == "service_completed_successfully"
    assert "restart" not in services["check"]


def test_a_service_that_dies_before_it_is_healthy_does_not_end_the_stack(compose: dict[str, Any]) -> None:
    """Docker calls a container unhealthy between two starts, and `docker compose up` would end there."""
    waits = [how["condition"] for one in compose["services"].values() for how in one.get("depends_on", {}).values()]
    assert set(waits) == {"service_started", "service_completed_successfully"}


def test_files_that_containers_mount_exist(compose: dict[str, Any]) -> None:
    mounted = [mount for service in compose["services"].values() for mount in service.get("volumes", ())]
    assert all(Path(mount["source"]).exists() and mount["read_only"] for mount in mounted if mount["type"] == "bind")


def test_ports_are_published_on_the_loopback_interface_only(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}


def test_a_scaled_service_has_no_fixed_name_nor_port(compose: dict[str, Any]) -> None:
    rollout = compose["services"]["rollout"]
    assert "container_name" not in rollout
    assert "hostname" not in rollout
    assert all(not port.get("published") for port in rollout["ports"])


def test_containers_have_no_capabilities_and_a_read_only_root(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"], name
        assert service.get("cap_add", []) == (["CHOWN"] if name == "prepare" else []), name
        assert service.get("user") != "0" or name == "prepare", name


def test_secrets_reach_services_as_files_and_never_as_environment(compose: dict[str, Any]) -> None:
    for name in LONG_RUNNING:
        service = compose["services"][name]
        mounts = {mount["target"]: mount for mount in service["volumes"]}
        assert mounts["/run/secrets"]["read_only"], name
        assert not [
            key for key in service.get("environment") or {} if re.search("token|password|secret", key, re.IGNORECASE)
        ], name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_is_built_from_the_lock_and_runs_without_root(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    bases = {line.split()[1] for line in lines if line.startswith("FROM ")}
    assert bases == {"python:3.13-slim"}
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER volley"
    assert "sync.sh" in path.read_text(encoding="utf-8")
    assert "uv sync --locked" in (ROOT / "docker" / "sync.sh").read_text(encoding="utf-8")


def test_images_hold_every_package_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    context = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {"!hatch_build.py", *(f"!{name}" for name in packages)} <= set(context)
    for path in DOCKERFILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert {f"COPY {name} {name}" for name in packages} <= set(lines), path.name
        assert "    sh sync.sh --all-packages " in path.read_text(encoding="utf-8")
        assert "COPY pyproject.toml uv.lock hatch_build.py docker/sync.sh ./" in lines, "the project's build hook"
    made = (ROOT / "docker" / "sync.sh").read_text(encoding="utf-8")
    assert all(f"{name}/__init__.py" in made for name in packages)


def test_there_is_one_image_for_each_environment_of_python() -> None:
    assert [path.name.split(".")[0] for path in DOCKERFILES] == ["base", "rollout", "trainer"]


@every_config
def test_layer_of_the_containers_fits_every_configuration(path: Path) -> None:
    loaded = config.load([path, ROOT / "docker" / "stack.yaml"])
    services = loaded.config.services
    assert loaded.config.run.dir == Path("/runs")
    assert services.base_url("env") == "http://env:8101"
    assert {services.env.host, services.rollout.host, services.orchestrator.host, services.trainer.host} == {"0.0.0.0"}


def test_replica_takes_its_address_from_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTNAME", "0123456789ab")
    layers = [ROOT / "configs" / "quickstart.yaml", ROOT / "docker" / "stack.yaml"]
    loaded = config.load(layers, ["services.rollout.url=http://${oc.env:HOSTNAME}:8102"])
    assert loaded.config.services.base_url("rollout") == "http://0123456789ab:8102"


def test_replicas_never_take_the_same_gpus(tmp_path: Path) -> None:
    show = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); input()"]
    command = [sys.executable, str(ROOT / "docker" / "take_gpus.py"), str(tmp_path / "gpus"), *show]
    command += ["--config", str(ROOT / "configs" / "quickstart.yaml"), "rollout.engine.tp_size=2"]
    environment, pipe = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2"}, subprocess.PIPE
    replicas = [
        subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8")
        for _ in range(2)
    ]
    shown = [replica.stdout.readline() for replica in replicas if replica.stdout]
    assert sorted(shown) == ["", "0,1\n"]
    errors = [replica.communicate("\n", timeout=30)[1] for replica in replicas]
    assert "fewer than 2 of the GPUs 0,1,2 are free" in errors[shown.index("")]
    assert [replica.returncode for replica in replicas] == [int(not said) for said in shown]


def prepare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docker" / "prepare.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30)


def test_secrets_are_random_private_and_made_once(tmp_path: Path) -> None:
    assert prepare(tmp_path, os.getuid()).returncode == 0
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert sorted(made) == ["redis_password", "token_admin", "token_service", "token_viewer"]
    assert len(set(made.values())) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in made.values())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o400}
    assert prepare(tmp_path, os.getuid()).returncode == 0
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == made


def test_given_secret_is_kept(tmp_path: Path) -> None:
    (tmp_path / "token_admin").write_text("given", encoding="utf-8")
    assert prepare(tmp_path, os.getuid()).returncode == 0
    assert (tmp_path / "token_admin").read_text(encoding="utf-8") == "given"
    assert (tmp_path / "redis_password").exists()


def test_missing_secrets_folder_is_one_clear_line(tmp_path: Path) -> None:
    done = prepare(tmp_path / "nowhere", os.getuid())
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No such file" in done.stderr


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server on a free port that answers every GET with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def probe(port: int) -> int:
    command = [sys.executable, "-IS", str(ROOT / "docker" / "probe.py"), str(port), "/ready"]
    return subprocess.run(command, capture_output=True, timeout=30).returncode


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_probe_follows_the_status(status: int, expected: int) -> None:
    with answering(status) as port:
        assert probe(port) == expected


def test_probe_fails_when_nothing_listens() -> None:
    assert probe(free_port()) == 1


DOCKER = """#!/bin/sh
# Stands for `docker`: a volume is a folder beside this program.
here=$(dirname "$0")
case "$1 $2" in
"volume inspect") [ -d "$here/$3" ] ;;
"run --rm")
    while [ "$1" != -v ]; do shift; done
    cd "$here/${2%%:*}" && shift 3 && exec "$@" ;;
esac
"""


def test_volumes_are_saved_and_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    script, names = tmp_path / "docker" / "volumes.sh", ("redis", "environments", "orchestrator", "runs")
    (tmp_path / "bin").mkdir()
    (tmp_path / "docker").mkdir()
    shutil.copy(ROOT / "docker" / "volumes.sh", script)
    (tmp_path / ".env").write_text("A=b\nCOMPOSE_PROJECT_NAME='mine'\n", encoding="utf-8")
    (tmp_path / "bin" / "docker").write_text(DOCKER, encoding="utf-8")
    (tmp_path / "bin" / "docker").chmod(0o755)

    def volumes(*arguments: str, **variables: str) -> str:
        kept = {key: value for key, value in os.environ.items() if key != "COMPOSE_PROJECT_NAME"}
        given = kept | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{kept['PATH']}"} | variables
        command = ["sh", str(script), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, encoding="utf-8", timeout=20)
        assert (done.returncode == 0) == (not done.stderr), done.stderr
        return done.stderr

    for name in (*names, "secrets"):
        (tmp_path / "bin" / f"mine_{name}").mkdir()
        (tmp_path / "bin" / f"mine_{name}" / "file").write_text(name, encoding="utf-8")
        (tmp_path / "bin" / f"new_{name}").mkdir()
    assert "no volume other_redis" in volumes("save", "a", COMPOSE_PROJECT_NAME="other")
    assert not (tmp_path / "a").exists()
    assert volumes("save", "a b") == ""
    assert "no typo/redis.tar" in volumes("load", "typo", COMPOSE_PROJECT_NAME="new")
    (tmp_path / "bin" / "new_runs" / "file").touch()
    assert "new_runs is not empty" in volumes("load", "a b", COMPOSE_PROJECT_NAME="new")
    assert not list((tmp_path / "bin" / "new_redis").iterdir())
    (tmp_path / "bin" / "new_runs" / "file").unlink()
    assert volumes("load", "a b", COMPOSE_PROJECT_NAME="new") == ""
    assert {name: (tmp_path / "bin" / f"new_{name}" / "file").read_text(encoding="utf-8") for name in names} == {
        name: name for name in names
    }
