"""Task folders before a container starts: what is read, packed, refused by name, and isolated."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from packages.sandbox.tests.harbor_service import harbor_settings
from packages.sandbox.tests.harbor_tasks import TASK_TOML, sum_task
from shared.errors import ConfigError, InputError
from volley_python.submissions.packing import packed_folder
from volley_sandbox.bridges.harbor.engines import logs_size
from volley_sandbox.harbor.containers import PROGRAM, Containers
from volley_sandbox.harbor.tasks import is_task_archive, read_tasks
from volley_sandbox.sandbox.packages.archives import unpack

COMPOSE = "environment/docker-compose.yaml"
UNREADABLE = {
    "no tests": ({"tests/test.sh": None}, "test"),
    "no solution": ({"solution/solve.sh": None}, "solution"),
    "no instruction": ({"instruction.md": None}, "Task directory is missing instruction.md"),
    "no environment": ({"environment/Dockerfile": None}, "environment/Dockerfile"),
    "no TOML": ({"task.toml": "= 1"}, "TOML"),
    "no number": ({"task.toml": TASK_TOML.replace("256", '"much"')}, "memory_mb"),
    "Windows": ({"task.toml": TASK_TOML.replace("memory_mb", 'os = "windows"\nmemory_mb')}, "windows"),
    "Latin-1": ({"instruction.md": "für".encode("latin-1")}, "instruction.md is not UTF-8"),
    "UTF-16": ({"task.toml": TASK_TOML.encode("utf-16")}, "task.toml is not UTF-8"),
    "a byte-order mark": ({"task.toml": f"\ufeff{TASK_TOML}"}, "task.toml begins with a byte-order mark"),
    "Windows lines": ({"tests/test.sh": "#!/bin/bash\r\ntrue\r\n"}, r"tests/test.sh has .*CRLF"),
    "no time": ({"task.toml": TASK_TOML.replace("= 10.0", "= 0")}, "verifier.timeout_sec = 0"),
    "negative time": ({"task.toml": TASK_TOML.replace("= 60.0", "= -1")}, "agent.timeout_sec = -1"),
    "no number of seconds": ({"task.toml": TASK_TOML.replace("= 600.0", "= nan")}, "build_timeout_sec = nan"),
    "a name for containers": ({COMPOSE: "services: {main: {container_name: x}}"}, "main has a container_name"),
    "a port": ({COMPOSE: "services: {main: !override {}, db: {ports: ['1:2']}}"}, "db publishes the port 1:2"),
}


SOUND = """
services:
  main: {ports: ['80', '127.0.0.1::81', '0:82', {target: 83, published: '0'}]}
  db: {container_name: '${COMPOSE_PROJECT_NAME}-x'}
"""


def test_what_cannot_be_played_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    folders = [_written(tmp_path / str(n), changes) for n, (changes, _) in enumerate(UNREADABLE.values())]
    monkeypatch.setenv("PATH", str(_engine(tmp_path)), prepend=os.pathsep)
    sound = {"instruction.md": "\ufeffAdd.", COMPOSE: SOUND}
    read = Containers(harbor_settings(tmp_path, environment="docker")).read
    *rows, last = read([*folders, _written(tmp_path / "sound", sound)])
    for (case, (_, why)), row in zip(UNREADABLE.items(), rows, strict=True):
        assert re.search(why, row.get("fault", ""), re.IGNORECASE), (case, row)
    assert last["commands_s"] == [60.0], last
    (elsewhere,) = Containers(harbor_settings(tmp_path)).read([folders[-1]])
    assert elsewhere["commands_s"] == [60.0], "each of its episodes has a machine of its own"


def _engine(folder: Path, does: str = "exit 0") -> Path:
    """Make a command `docker` from a line of shell; return its folder."""
    (folder / "bin").mkdir()
    (folder / "bin" / "docker").write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
    (folder / "bin" / "docker").chmod(0o755)
    return folder / "bin"


def _written(folder: Path, changes: Mapping[str, str | bytes | None]) -> Path:
    """Write the task of `sum_task` with changes; return its folder."""
    for name, content in {**sum_task(), **changes}.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_faults_are_named_with_their_task(tmp_path: Path) -> None:
    _written(tmp_path / "one", {})
    for row, why in (
        ({"instruction": "\n", "commands_s": [None]}, "the instruction is empty"),
        ({"fault": "why"}, "why"),
    ):
        with pytest.raises(InputError, match=f"the task one: .*{why}"):
            read_tasks(tmp_path, lambda folders, row=row: [row for _ in folders])


def test_where_tasks_may_lie(tmp_path: Path) -> None:
    def read(folders: object) -> list[dict[str, object]]:
        return [{"instruction": "x", "commands_s": [None]} for _ in folders]  # type: ignore[attr-defined]

    for place in ("a/task.toml", "a/environment/task.toml", "eval/b/task.toml"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch()
    assert {split: len(tasks) for split, tasks in read_tasks(tmp_path, read).items()} == {"train": 1, "eval": 1}
    (tmp_path / "a" / "other").mkdir()
    (tmp_path / "a" / "other" / "task.toml").touch()
    with pytest.raises(InputError, match="inside the task"):
        read_tasks(tmp_path, read)
    (tmp_path / "a" / "__init__.py").touch()
    assert is_task_archive(tmp_path)


def test_a_packed_task_keeps_its_repository_links_and_executables(tmp_path: Path) -> None:
    task = _written(tmp_path / "task", {"environment/repo/.git/HEAD": "ref", "environment/tool": "#!/bin/sh\n"})
    (task / "environment/tool").chmod(0o755)
    (task / "environment/link").symlink_to("numbers.txt")
    (task / ".git").mkdir()
    (task / ".git" / "HEAD").write_text("the author's own", encoding="utf-8")
    found = unpack(packed_folder(task), tmp_path / "store").top / "task"
    assert (found / "environment/link").read_text("utf-8") == sum_task()["environment/numbers.txt"]
    assert [os.access(found / "environment" / name, os.X_OK) for name in ("tool", "numbers.txt")] == [True, False]
    assert [(found / name).exists() for name in ("environment/repo/.git/HEAD", ".git")] == [True, False]


def test_a_folder_of_several_tasks_is_packed_without_links_that_no_task_needs(tmp_path: Path) -> None:
    for name in ("one", "deep/two"):
        _written(tmp_path / "set" / name, {"environment/repo/.git/HEAD": "ref"})
        (tmp_path / "set" / name / "README.md").symlink_to("/absent")
    (tmp_path / "set" / "data").symlink_to("/usr")
    top = unpack(packed_folder(tmp_path / "set"), tmp_path / "store").top
    assert [(top / name / "environment/repo/.git/HEAD").is_file() for name in ("one", "deep/two")] == [True, True]
    assert not [path for path in top.rglob("*") if path.name in ("README.md", "data")]
    (tmp_path / "set" / "more").symlink_to(tmp_path / "set" / "deep")
    with pytest.raises(ConfigError, match="set/more is a link"):
        packed_folder(tmp_path / "set")


@pytest.mark.parametrize("target", ["/etc/hostname", "../..", "absent"])
def test_a_link_out_of_a_task_is_refused(tmp_path: Path, target: str) -> None:
    task = _written(tmp_path / "task", {})
    (task / "environment/link").symlink_to(target)
    with pytest.raises(ConfigError, match="environment/link is a link"):
        packed_folder(task)


def test_too_many_files_are_counted(tmp_path: Path) -> None:
    task = _written(tmp_path / "task", {f"tests/{number}": "" for number in range(1000)})
    with pytest.raises(ConfigError, match=r"has 1007 files and 0\.0 MiB; at most 1000 files") as refused:
        packed_folder(task)
    assert "environment.docker_image" in (refused.value.hint or "")


INSIDE = """
import asyncio, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from folders import brief
from trials import Settings, isolated_networks
from worker import TrialWorker, tail
place = Path(sys.argv[2])
def networks(name):
    try:
        return isolated_networks(place / name)
    except ValueError as error:
        return str(error)
class Told(list):
    write = list.append
async def look():
    worker = TrialWorker(Settings("docker", {}, str(place / "trials"), "tested", 1, 1, 1.0, "declared"), told := Told())
    await asyncio.gather(*(worker._look_at_engine(f"lost {n}") for n in range(20)))
    return [json.loads(line) for line in told]
print(json.dumps({
    "away": asyncio.run(look()),
    "tails": [tail(path) for path in sorted(place.glob("*.txt"))],
    "networks": [networks(name) for name in ("own", "host")],
    "brief": brief(RuntimeError((place / "engine.log").read_text("utf-8"))),
}))
"""
ENGINE_LOG = """Docker compose command failed. Command: x. Stdout: #0 building with "default" instance
#5 [main 2/2] RUN make
#5 0.3 no rule
#5 ERROR: exit code: 2
------
 > [main 2/2] RUN make:
0.3 no rule
------
 Container volley-1__env-main-1  Creating
failed to solve: exit code: 2
. Stderr: None."""


def test_what_containers_and_engines_leave(tmp_path: Path) -> None:
    files = {
        "1.txt": "x" * 2000 + "end",
        "own/docker-compose.yaml": "services: {main: {networks: [back]}}\nnetworks: {back: }",
        "host/docker-compose.yaml": "services: {main: {network_mode: host}}",
        "engine.log": ENGINE_LOG,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "2.txt").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "3.txt")
    python = harbor_settings(tmp_path).section.python
    command = [str(python), "-c", INSIDE, str(PROGRAM.parent), str(tmp_path)]
    engine = _engine(tmp_path, f"echo >>'{tmp_path}/asked'; exit 1")
    variables = {**os.environ, "PATH": f"{engine}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, check=True, env=variables)
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["away"], (tmp_path / "asked").read_text("utf-8")) == ([{"away": "lost 0"}], "\n")
    assert [len(text) for text in found["tails"]] == [1000, 0, 0]
    assert found["networks"][0] == ["default", "back"]
    assert "network_mode = 'host'" in found["networks"][1]
    assert found["brief"] == "RuntimeError: > [main 2/2] RUN make: 0.3 no rule failed to solve: exit code: 2"


def test_files_in_logs_are_counted_once_and_copies_of_artifacts_are_not(tmp_path: Path) -> None:
    for name in ("agent/file", "artifacts/logs/artifacts/file", "artifacts/app/file"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x" * 2**20)
    (tmp_path / "agent/again").hardlink_to(tmp_path / "agent/file")
    (tmp_path / "agent/link").symlink_to("/usr")
    assert 2 <= logs_size(tmp_path) < 3
