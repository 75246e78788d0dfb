"""What of task folders of Harbor is read, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from services.env.harbor.tasks import is_task_archive, read_tasks
from shared.errors import InputError
from tests.env.harbor_tasks import dockerfile, sum_task, toml

REFUSED = {
    "RUN apt-get install -y curl": (
        dockerfile("RUN apt-get update && \\\n  apt-get install -y curl"),
        "RUN is not supported",
    ),
    "ADD": (dockerfile("ADD https://example.com/x.tar.gz /app/"), "ADD is not supported"),
    "USER": (dockerfile("USER agent"), "USER is not supported"),
    "ENTRYPOINT": (dockerfile('ENTRYPOINT ["/init"]'), "ENTRYPOINT is not supported"),
    "COPY --from": (dockerfile("COPY --from=ghcr.io/astral-sh/uv:0.9 /uv /bin/uv"), "COPY --from"),
    "COPY out": (dockerfile("COPY ../tests /app/"), "points outside environment/"),
    "COPY nothing": (dockerfile("COPY absent.txt /app/"), "no such file"),
    "COPY into the system": (dockerfile("COPY numbers.txt /usr/share/"), "/usr belongs to the system"),
    "a variable": (dockerfile("WORKDIR $HOME/x"), "variables are not expanded"),
    "an image": ({"environment/Dockerfile": "FROM pytorch/pytorch:2.4\n"}, "'pytorch/pytorch:2.4' holds programs"),
    "two stages": (dockerfile("FROM debian:12-slim"), "a second FROM"),
    "no FROM": ({"environment/Dockerfile": "WORKDIR /app\n"}, "has no FROM"),
    "compose": ({"environment/docker-compose.yaml": "services: {}"}, "docker-compose.yaml"),
    "dockerignore": ({"environment/.dockerignore": "*.md"}, ".dockerignore"),
    "hosts": (toml("environment", 'network_mode = "allowlist"\nallowed_hosts = ["pypi.org"]'), "network_mode"),
    "a prebuilt image": (toml("environment", 'docker_image = "alexgshaw/build-pmars:1"'), "alexgshaw/build-pmars:1"),
    "GPUs": (toml("environment", "gpus = 1"), "environment.gpus = 1"),
    "Windows": (toml("environment", 'os = "windows"'), "environment.os = 'windows'"),
    "a size": (toml("environment", 'storage = "much"'), "storage_mb = 'much, not a size like 2G'"),
    "a size of no unit": (toml("environment", "storage = 5"), "storage_mb = '5, not a size like 2G'"),
    "a health check": (toml("environment", 'healthcheck = {command = "true"}'), "environment.healthcheck"),
    "a server of tools": (toml("environment", 'mcp_servers = [{name = "x", url = "http://x"}]'), "mcp_servers"),
    "secrets": (toml("verifier", 'env = {KEY = "${OPENAI_API_KEY}"}'), "the service's variables are not passed on"),
    "a user": (toml("agent", 'user = "agent"'), "agent.user"),
    "a judge apart": (toml("verifier", 'environment_mode = "separate"'), "verifier.environment_mode"),
    "steps": (toml("metadata", 'x = 1\n[[steps]]\nname = "one"'), "steps"),
    "folders of steps": ({"steps/one/instruction.md": "x"}, "tasks with several steps"),
    "a conversation": ({"trajectory.json": "{}"}, "earlier conversation"),
    "no instruction": ({"instruction.md": "\n"}, "instruction.md has"),
    "no TOML": ({"task.toml": "= 1"}, "task.toml cannot be read"),
    "no list": (dockerfile('COPY ["a", 1]'), "not a list of texts"),
    "a list without commas": (dockerfile('COPY ["a" "/b"]'), "not a list of texts"),
    "many sources": (dockerfile("COPY numbers.txt /a/\n" * 201), "more than 200 sources"),
    "a pattern of folders": (dockerfile("COPY n** /app/"), "no such file"),
    "a long Dockerfile": (dockerfile("#" * 2**16), "environment/Dockerfile has 65"),
    "files to be left out": ({"tests/.harborignore": "*.md"}, ".harborignore is not supported"),
    "a key of many parts": (toml("metadata", ".".join("a" * 5000) + " = 1"), "more than 100 dots"),
    "a hidden key of many parts": (toml("metadata", ".\u2028.".join(['"a"'] * 200) + " = 1"), "more than 100 dots"),
    "much TOML": (toml("metadata", "#" * 2**16), "it has 65"),
    "a long number": (toml("metadata", f"x = 1{'0' * 5000}"), "task.toml cannot be read"),
    "no size": (toml("environment", 'storage = "infG"'), "storage_mb = 'infG'"),
    "no variable's value": (toml("environment", 'env = {A = "x\\u0000"}'), "holds a NUL"),
    "half a list": (dockerfile('COPY ["a"'), "not a list of texts"),
    "no pattern": (dockerfile("COPY a**b /x"), "no such file"),
    "a document": (dockerfile("COPY <<EOF /x"), "no such file"),
    "open quotes": (dockerfile("COPY 'a /x"), "cannot be read"),
    "no variable": (dockerfile("ENV 1=2"), "not the name of a variable"),
    "no place": (dockerfile("COPY numbers.txt /a/../b"), "not a plain absolute path"),
    "a long place": (dockerfile("WORKDIR a\n" * 600), "has 1026 characters"),
    "many folders": (dockerfile("WORKDIR /a\n" * 4001), "more than 4000 files and folders"),
    "an infinite size": (toml("environment", 'storage = "1e999G"'), "storage_mb = '1e999G'"),
    "a size without a unit": (toml("environment", 'storage = "5"'), "storage_mb = '5, not a size like 2G'"),
    "two sizes": (toml("environment", 'memory = "1G"'), "memory and memory_mb differ"),
    "no number": (toml("environment", "cpus = 'two'"), "environment.cpus = 'two'"),
    "no table": ({"task.toml": "agent = 1"}, "agent = 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, why = REFUSED[case]
    with pytest.raises(InputError) as refused:
        read_tasks(_unpacked(tmp_path, sum_task(**changes)))
    assert "the task task: " in refused.value.detail
    assert why in refused.value.detail


def test_copies_are_bounded_as_they_are_made(tmp_path: Path) -> None:
    lines = "".join(f"COPY . /d{number}\n" for number in range(150))
    files = {**sum_task(), **dockerfile(lines), **{f"environment/f{number}": "" for number in range(100)}}
    with pytest.raises(InputError, match="more than 4000 files and folders"):
        read_tasks(_unpacked(tmp_path, files))


def test_a_folder_is_one_by_what_lies_in_it(tmp_path: Path) -> None:
    files = {**sum_task(), **dockerfile("WORKDIR /app/x\nCOPY one /app\nCOPY one data/\nCOPY two data\n")}
    task = read_tasks(_unpacked(tmp_path, {**files, "environment/one": "1", "environment/two": "2"}))["train"][0]
    assert sorted(task.image.files) == ["/app/one", "/app/x/data/one", "/app/x/data/two"]


def test_folders_are_copied_and_counted(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / "environment" / f"d{number}" / "e").mkdir(parents=True)
    files = {**sum_task(), **dockerfile("COPY d1 /x\n")}
    assert "/x/e" in read_tasks(_unpacked(tmp_path, files))["train"][0].image.folders
    files |= dockerfile("".join(f"COPY . /d{number}\n" for number in range(25)))
    with pytest.raises(InputError, match="more than 4000 files and folders"):
        read_tasks(_unpacked(tmp_path, files))


def test_each_task_of_an_archive_is_found(tmp_path: Path) -> None:
    sizes = {"a": 1, "hard/b": 2, "hard/deep/er/c": 3, "eval/d": 4, "hard/eval/e": 5}
    for path, first in sizes.items():
        _unpacked(tmp_path / path, {**sum_task(first), "tests/example/task.toml": "no task"})
    assert is_task_archive(tmp_path)
    names = {split: [task.name for task in tasks] for split, tasks in read_tasks(tmp_path).items()}
    assert names == {"train": ["a", "hard/b", "hard/deep/er/c"], "eval": ["eval/d", "hard/eval/e"]}
    _unpacked(tmp_path / "hard" / "b" / "more", sum_task(6))
    with pytest.raises(InputError, match="the task hard/b/more is inside the task hard/b"):
        read_tasks(tmp_path)


def test_files_of_a_package_are_no_tasks(tmp_path: Path) -> None:
    _unpacked(tmp_path / "package" / "templates" / "one", sum_task())
    (tmp_path / "package" / "__init__.py").touch()
    assert not is_task_archive(tmp_path)


@pytest.mark.parametrize("missing", ["instruction.md", "environment/Dockerfile", "tests/test.sh", "solution/solve.sh"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    files = sum_task()
    del files[missing]
    (tmp_path / missing).mkdir(parents=True)
    with pytest.raises(InputError, match=missing):
        read_tasks(_unpacked(tmp_path, files))


DOCKERFILE = """# syntax=docker/dockerfile:1
from ghcr.io/laude-institute/t-bench/python-3-13:20250620 AS base
LABEL x=y
ENV A=1 B="two words" \\
    # in between
    C=3
ENV D four words here
WORKDIR /srv
WORKDIR work
COPY one.txt two.txt ./
COPY ["one.txt", "/data/new name.txt"]
COPY folder /data/folder
COPY *.txt /all/
COPY . /whole/
CMD ["bash"]
"""


MAY = 'allow_internet = true\nnetwork_mode = "public"\nmcp_servers = []\ngpus = 0\ncpus = 1\nstorage = "10G"'


def test_a_dockerfile_is_read_as_docker_does(tmp_path: Path) -> None:
    files = {"environment/Dockerfile": DOCKERFILE, "environment/one.txt": "1", "environment/two.txt": "2"}
    files["environment/folder/deep/three.txt"] = "3"
    settings = toml("environment", f"memory = '2G'\nenv = {{E = '5'}}\n{MAY}")
    folder = _unpacked(
        tmp_path, {**sum_task(), **files, "task.toml": settings["task.toml"].replace("memory_mb = 256", "")}
    )
    (folder / "environment" / "numbers.txt").unlink()
    task = read_tasks(folder)["train"][0]
    assert (task.image.workdir, task.memory_mb) == ("/srv/work", 2048)
    assert task.image.env == {"A": "1", "B": "two words", "C": "3", "D": "four words here", "E": "5"}
    names = ("Dockerfile", "folder/deep/three.txt", "one.txt", "two.txt")
    assert sorted(task.image.files) == sorted(
        ["/srv/work/one.txt", "/srv/work/two.txt", "/data/new name.txt", "/data/folder/deep/three.txt"]
        + ["/all/one.txt", "/all/two.txt", *(f"/whole/{name}" for name in names)]
    )


def _unpacked(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
