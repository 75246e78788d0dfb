"""Task folders: what the service needs of them, and faults that Harbor finds only while a trial runs."""

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from engines import ENGINES
from harbor.environments.definition import has_agent_environment_definition
from harbor.models.task.task import Task

MAX_WHY = 700
"""Characters of a fault; its end says most."""
_STATES = (
    "Creating|Created|Starting|Started|Running|Waiting|Healthy|Recreate|Recreated|Stopping|Stopped|Removing|Removed"
)
_PROGRESS = re.compile(rf"#\d+ .*|-+|\s*|\s*(Container|Network|Volume|Image) \S+\s+({_STATES})\s*")
"""Lines of an engine's output that only report progress; it repeats the output of a step that failed."""


COMPOSE = "environment/docker-compose.yaml"


def brief(error: object, name: str = "") -> str:
    """Text of an error without the command line that Harbor quotes, as one line."""
    _, quoted, output = str(error).partition("Stdout: ")
    lines = (output.partition(" Stderr: None")[0] if quoted else str(error)).splitlines()
    text = " ".join(" ".join([line for line in lines if not _PROGRESS.fullmatch(line)] or lines).split()).removesuffix(
        " ."
    )
    kind = name or type(error).__name__
    return f"{kind}: {text if len(text) <= MAX_WHY else '… ' + text[-MAX_WHY:]}"


def read(folder: str, environment: str) -> dict[str, Any]:
    """Describe a task for the service, or its `fault` in an environment of that type."""
    try:
        if problem := check_encoding(Path(folder)):
            return {"fault": problem}
        task = Task(folder)
        problem = check(task, environment)
    except Exception as error:  # noqa: BLE001 - told to the service
        return {"fault": brief(str(error).replace(f"{folder}/", "").replace(folder, ""), type(error).__name__)}
    if problem:
        return {"fault": problem}
    config, steps = task.config, task.config.steps or []
    instructions = [task.step_instruction(step.name) for step in steps] or [task.instruction]
    limits = [step.agent.timeout_sec or config.agent.timeout_sec for step in steps] or [config.agent.timeout_sec]
    return {"instruction": instructions[0] + notes(config.environment), "commands_s": limits}


def check_encoding(folder: Path) -> str:
    """Name the first text file that Harbor cannot decode; empty if there is none."""
    for path in [folder / "task.toml", folder / "instruction.md", *sorted(folder.glob("steps/*/instruction.md"))]:
        name = path.relative_to(folder)
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
        except UnicodeDecodeError as error:
            return f"{name} is not UTF-8 (byte {error.start}); save it as UTF-8"
        if name.suffix == ".toml" and text.startswith("\ufeff"):
            return f"{name} begins with a byte-order mark; save it as UTF-8 without one"
    return ""


def time_limits(config: Any) -> Iterator[tuple[str, float | None]]:
    """Yield the time limits of a task, with their names in task.toml."""
    yield "environment.build_timeout_sec", config.environment.build_timeout_sec
    if config.verifier.environment is not None:
        yield "verifier.environment.build_timeout_sec", config.verifier.environment.build_timeout_sec
    for prefix, one in [("", config), *((f"steps.{step.name}.", step) for step in config.steps or [])]:
        yield f"{prefix}agent.timeout_sec", one.agent.timeout_sec
        yield f"{prefix}verifier.timeout_sec", one.verifier.timeout_sec


def check(task: Task, type_of_environment: str) -> str:
    """Fault that Harbor finds only when a trial runs; empty if there is none."""
    for name, value in time_limits(task.config):
        if value is not None and not 0 < value < math.inf:
            return f"{name} = {value:g}: write a finite number of seconds above 0"
    environment = task.config.environment
    if environment.os.value != "linux":
        return f"environment.os = {environment.os.value!r}: only Linux containers are played"
    if not has_agent_environment_definition(task.paths.environment_dir, docker_image=environment.docker_image):
        return "there is neither environment/Dockerfile, environment/docker-compose.yaml nor environment.docker_image"
    if type_of_environment in ENGINES and (problem := check_compose(task.paths.environment_dir)):
        return problem
    paths, steps, system = task.paths, task.config.steps or [], environment.os
    for step in steps:
        if paths.discovered_step_solve_path_for(step.name, system) is None:
            return f"there is no solution of the step {step.name}"
    if not steps and paths.discovered_solve_path_for(system) is None:
        return "there is no solution/solve.sh"
    scripts = [paths.discovered_solve_path_for(system), paths.discovered_test_path_for(system)]
    for step in steps:
        scripts.append(paths.discovered_step_solve_path_for(step.name, system))
        scripts.append(paths.discovered_step_test_path_for(step.name, system))
    for script in filter(None, scripts):
        with script.open("rb") as file:
            first = file.readline(1000)
        if first.startswith(b"#!") and first.endswith(b"\r\n"):
            name = script.relative_to(task.task_dir)
            return f"{name} has Windows line ends (CRLF), so its first line names no program; save it with LF"
    return ""


class ComposeLoader(yaml.SafeLoader):
    """Loader that reads values with tags of Compose, like !reset, as None."""


ComposeLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def read_compose(environment: Path) -> dict[str, dict[str, Any]]:
    """Services and networks of a task's Compose file by name; none if Compose would refuse the file anyway."""
    try:
        found = ComposeLoader((environment / "docker-compose.yaml").read_text(encoding="utf-8")).get_single_data()
    except (OSError, ValueError, yaml.YAMLError):
        found = None
    sections = {name: found.get(name) if isinstance(found, dict) else None for name in ("services", "networks")}
    return {
        section: {str(name): one if isinstance(one, dict) else {} for name, one in rows.items()}
        if isinstance(rows, dict)
        else {}
        for section, rows in sections.items()
    }


def check_compose(environment: Path) -> str:
    """Name a part of a Compose file that only one episode of an engine can have; empty if there is none."""
    for name, service in read_compose(environment)["services"].items():
        if (given := service.get("container_name")) and "$" not in str(given):  # ${COMPOSE_PROJECT_NAME}-db is its own
            return f"{COMPOSE}: the service {name} has a container_name, which only one episode at a time can have"
        for port in service.get("ports") or []:
            long = isinstance(port, dict)
            fixed = port.get("published") if long else str(port).rpartition(":")[0].rpartition(":")[2]
            if fixed and str(fixed) != "0":
                return f"{COMPOSE}: the service {name} publishes the port {port}, which only one episode can have"
    return ""


def notes(environment: Any) -> str:
    """Describe MCP servers and skills of the container for the model."""
    lines = [
        f"{server.name}: {server.url or shlex.join([server.command, *server.args])}"
        for server in environment.mcp_servers
    ]
    text = "\n\nMCP servers that can be reached from the shell:\n" + "\n".join(lines) if lines else ""
    return text + (
        f"\n\nInstructions for kinds of work are in {environment.skills_dir}." if environment.skills_dir else ""
    )
