"""Task folders in Harbor's format (schema 1.0 to 1.4).

    TASK/task.toml, instruction.md, environment/Dockerfile, tests/test.sh, solution/solve.sh

An archive holds one such folder, or one for each task, at any depth; tasks below a folder `eval/` are held out.
Settings that a sandbox does not support are rejected by name before anything runs.

Invariant: each task.toml of an archive is a task, a file of a task, or an error; none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.env.episode_types import EVAL, TRAIN
from services.env.harbor.dockerfile import Image, check_image, check_place, check_variable, read
from services.env.sandbox.packages.toml import read_toml
from shared.errors import InputError

MAX_INSTRUCTION = 2**18
"""Characters of an instruction."""
MAX_PART = 8 * 2**20
"""Bytes of each part of a task: its environment's files, its tests, its solution."""
_SIZES = {"K": 2**-10, "M": 1.0, "G": 2.0**10}
_PARTS = ("environment", "tests", "solution")


class _Section(BaseModel):
    """A section of task.toml. Unknown keys are rejected, because each may change the task."""

    model_config = ConfigDict(extra="forbid", frozen=True)


type _Variables = dict[str, str]
type _Seconds = Annotated[float, Field(gt=0)]


type _Network = Literal["no-network", "public"] | None
"""Permission to use the network, Harbor's default. Running the solution shows whether a task needs it."""
type _None = Annotated[list[Any], Field(max_length=0)]


class AgentSection(_Section):
    timeout_sec: _Seconds | None = None
    network_mode: _Network = None


class VerifierSection(_Section):
    timeout_sec: _Seconds = 600.0
    env: _Variables = {}
    environment_mode: Literal["shared"] | None = None
    network_mode: _Network = None


class EnvironmentSection(_Section):
    """Section `environment`. `cpus` is ignored, because sandboxes have no CPU shares, and so is the build timeout."""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: Literal["linux"] = "linux"
    cpus: float | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
    gpus: Literal[0] | None = None
    network_mode: _Network = None
    allow_internet: bool | None = None
    allowed_hosts: _None = []
    mcp_servers: _None = []
    env: _Variables = {}
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_sizes(cls, data: Any) -> Any:
        """Convert `memory = "2G"` of earlier schema versions."""
        if not isinstance(data, dict):
            return data
        made = dict(data)
        for key in ("memory", "storage"):
            if key in made:
                megabytes = _megabytes(made.pop(key))
                if made.setdefault(f"{key}_mb", megabytes) != megabytes:
                    raise ValueError(f"{key} and {key}_mb differ")
        return made


class SolutionSection(_Section):
    env: _Variables = {}


class TaskFile(_Section):
    """task.toml. `task`, `metadata`, `source` and `artifacts` affect neither the episode nor its grade."""

    schema_version: str = "1.4"
    version: str | None = None
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    source: str | None = None
    artifacts: list[Any] = []
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task. Times in seconds, sizes in MiB; None if the task sets no limit."""

    name: str
    instruction: str
    image: Image
    tests: Mapping[str, Path]
    solution: Mapping[str, Path]
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    agent_s: float | None
    verifier_s: float
    memory_mb: int | None
    storage_mb: int | None


def is_task_archive(top: Path) -> bool:
    """True if an unpacked archive holds task folders outside of Python packages."""
    return any(not any((above / "__init__.py").exists() for above in _up(folder, top)) for folder in _folders(top))


def read_tasks(top: Path) -> Mapping[str, Sequence[HarborTask]]:
    """Read the tasks of an unpacked archive by split, sorted by name. Blocks on disk.

    Raises InputError naming the task and its unsupported part.
    """
    found: dict[str, list[HarborTask]] = {TRAIN: [], EVAL: []}
    folders = _folders(top)
    for folder in folders:
        if (holder := next((above for above in _up(folder, top)[1:] if above in folders), None)) is not None:
            if folder.relative_to(holder).parts[0] in _PARTS:
                continue
            raise InputError(
                f"the task {_name(folder, top)} is inside the task {_name(holder, top)}", "move it next to that task"
            )
        name = _name(folder, top)
        try:
            task = _read_task(folder, name)
        except InputError as error:
            raise InputError(f"the task {name}: {error.detail}", error.hint) from None
        split = EVAL if EVAL in folder.relative_to(top).parts[:-1] else TRAIN
        found[split].append(task)
    if not found[TRAIN]:
        raise InputError("all tasks are in eval/, so there are none to train on", "move training tasks out of eval/")
    return {split: tasks for split, tasks in found.items() if tasks}


def _folders(top: Path) -> Sequence[Path]:
    """Folders with a task.toml, in the order of their names."""
    return sorted(path.parent for path in top.rglob("task.toml") if path.is_file())


def _up(folder: Path, top: Path) -> Sequence[Path]:
    """`folder` and its parents up to `top`."""
    return [above for above in (folder, *folder.parents) if above == top or top in above.parents]


def _name(folder: Path, top: Path) -> str:
    return str(folder.relative_to(top)) if folder != top else "task"


def _read_task(folder: Path, name: str) -> HarborTask:
    """Read one task. Raises InputError."""
    if (folder / "steps").is_dir() or (folder / "trajectory.json").exists():
        raise InputError("tasks with several steps, or with an earlier conversation, are not supported", _HINT)
    if any(folder.rglob(".harborignore")):
        raise InputError(".harborignore is not supported", "remove the files that must not be copied")
    settings = _settings(folder / "task.toml")
    instruction = _text(folder / "instruction.md")
    if not instruction.strip() or len(instruction) > MAX_INSTRUCTION:
        raise InputError(f"instruction.md has {len(instruction)} characters", f"write 1 to {MAX_INSTRUCTION}")
    tests, solution = _below(folder, "tests", "test.sh"), _below(folder, "solution", "solve.sh")
    environment = settings.environment
    image = _image(folder / "environment", environment)
    if (size := sum(path.stat().st_size for path in image.files.values())) > MAX_PART:
        raise InputError(f"the files of its environment have {size} bytes", f"the limit is {MAX_PART}")
    return HarborTask(
        name=name,
        instruction=instruction,
        image=image,
        tests=tests,
        solution=solution,
        verifier_env=_variables(settings.verifier.env),
        solution_env=_variables(settings.solution.env),
        agent_s=settings.agent.timeout_sec,
        verifier_s=settings.verifier.timeout_sec,
        memory_mb=environment.memory_mb,
        storage_mb=environment.storage_mb,
    )


_HINT = "see docs/other-environments.md: what of a task folder can be honoured in a sandbox"


def _settings(path: Path) -> TaskFile:
    found = read_toml(_text(path), "task.toml cannot be read")
    try:
        return TaskFile.model_validate(found)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])[:80]
        why = "is unknown or not supported" if problem["type"] == "extra_forbidden" else "is not supported"
        given = repr(problem["input"])[:80]
        raise InputError(f"task.toml: {key} = {given} {why} ({problem['msg'].lower()})", _HINT) from None


def _image(context: Path, settings: EnvironmentSection) -> Image:
    if others := sorted(path.name for path in context.glob("*compose*")):
        raise InputError(f"environment/{others[0]}: a sandbox is one container, without a network", _HINT)
    if settings.docker_image is not None:
        check_image(settings.docker_image)
    if (context / "Dockerfile").is_file():
        image = read(context)
    elif settings.docker_image is not None:
        image = Image()
    else:
        raise InputError("there is neither environment/Dockerfile nor environment.docker_image in task.toml", _HINT)
    workdir = check_place(settings.workdir) if settings.workdir else image.workdir
    folders = (*image.folders, workdir)
    return Image(workdir, {**image.env, **_variables(settings.env)}, folders, image.files)


def _below(folder: Path, name: str, script: str) -> Mapping[str, Path]:
    """Files of a part by their absolute path in the sandbox. Raises InputError."""
    if not (folder / name / script).is_file():
        raise InputError(f"there is no {name}/{script}")
    files = sorted(path for path in (folder / name).rglob("*") if path.is_file())
    if (size := sum(path.stat().st_size for path in files)) > MAX_PART:
        raise InputError(f"{name}/ has {size} bytes", f"the limit is {MAX_PART}")
    return {f"/{path.relative_to(folder)}": path for path in files}


def _variables(given: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in given.items():
        check_variable(name)
        if "\0" in value:
            raise InputError(f"{name} holds a NUL character", _HINT)
        if "${" in value:
            raise InputError(f"{name} = {value[:80]!r}: the service's variables are not passed on", "write the value")
    return given


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # missing, or a folder
        raise InputError(f"there is no file {path.name}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path.name} is not UTF-8: {error.reason}") from None


def _megabytes(size: object) -> int | str:
    """MiB of a size like 2G, or a text that validation rejects."""
    text = str(size).strip()
    factor = _SIZES.get(text[-1:].upper())
    if not isinstance(size, str) or factor is None:
        return f"{text}, not a size like 2G"
    try:
        return int(float(text[:-1]) * factor)
    except (ValueError, OverflowError):
        return size
