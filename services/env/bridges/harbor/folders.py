"""Task folders: what the service needs of them, and faults that Harbor finds only while a trial runs."""

import shlex
from typing import Any

from harbor.environments.definition import has_agent_environment_definition
from harbor.models.task.task import Task

MAX_WHY = 700
"""Characters of a fault; its end says most."""


def brief(error: object, name: str = "") -> str:
    """Text of an error without the command line that Harbor quotes, as one line."""
    _, quoted, output = str(error).partition("Stdout: ")
    text = " ".join((output.partition(" Stderr: None")[0] if quoted else str(error)).split())
    kind = name or type(error).__name__
    return f"{kind}: {text if len(text) <= MAX_WHY else '… ' + text[-MAX_WHY:]}"


def read(folder: str) -> dict[str, Any]:
    """Describe a task for the service, or its `fault`."""
    try:
        task = Task(folder)
        problem = check(task)
    except Exception as error:  # noqa: BLE001 - told to the service
        return {"fault": brief(error)}
    if problem:
        return {"fault": problem}
    config, steps = task.config, task.config.steps or []
    instructions = [task.step_instruction(step.name) for step in steps] or [task.instruction]
    limits = [step.agent.timeout_sec or config.agent.timeout_sec for step in steps] or [config.agent.timeout_sec]
    return {"instruction": instructions[0] + notes(config.environment), "commands_s": limits}


def check(task: Task) -> str:
    """Fault that Harbor finds only when a trial runs; empty if there is none."""
    environment = task.config.environment
    if environment.os.value != "linux":
        return f"environment.os = {environment.os.value!r}: only Linux containers are played"
    if not has_agent_environment_definition(task.paths.environment_dir, docker_image=environment.docker_image):
        return "there is neither environment/Dockerfile, environment/docker-compose.yaml nor environment.docker_image"
    steps = task.config.steps or []
    for step in steps:
        if task.paths.discovered_step_solve_path_for(step.name, environment.os) is None:
            return f"there is no solution of the step {step.name}"
    if not steps and task.paths.discovered_solve_path_for(environment.os) is None:
        return "there is no solution/solve.sh"
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
