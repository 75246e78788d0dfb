"""Task folders in the format of Harbor (schema 1.0 to 1.4): what they ask, hold and are judged by.

    TASK/task.toml, instruction.md, environment/Dockerfile, tests/test.sh, solution/solve.sh

An archive holds one such folder, or one for each task, at any depth; those below a folder `eval/` are held out.
Whatever a sandbox cannot honour is refused here, by name, before anything is run.

Invariant: each task.toml of an archive is a task, or a file that a task holds, or refused: none is passed over.
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
"""Bytes of one of a task's three parts: files of its environment, its tests, its solution."""
_SIZES = {"K": 2**-10, "M": 1.0, "G": 2.0**10}
_PARTS = ("environment", "tests", "solution")


class _Section(BaseModel):
    """Unknown keys are refused: each might be one without which the task is another one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


type _Variables = dict[str, str]
type _Seconds = Annotated[float, Field(gt=0)]


type _Network = Literal["no-network", "public"] | None
"""That it may be used, which is Harbor's default, does not say that it is: that, the solution shows."""
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
    """`cpus` is not honoured: a sandbox has no share of its own. What is built in no time needs no limit of it."""

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
        """`memory = "2G"` of earlier versions of the format."""
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
    """task.toml. `task`, `metadata`, `source` and `artifacts` say nothing of how the task is played or judged."""

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
    """One task. Times in seconds, sizes in MiB; None where the task sets no limit."""

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
    """Whether an unpacked archive holds task folders: elsewhere than in a package of Python, whose files they are."""
    return any(not any((above / "__init__.py").exists() for above in _up(folder, top)) for folder in _folders(top))


def read_tasks(top: Path) -> Mapping[str, Sequence[HarborTask]]:
    """The tasks of an unpacked archive by split, in the order of their names. Blocks on disk.

    Raises InputError naming the task and what of it cannot be honoured.
    """
    found: dict[str, list[HarborTask]] = {TRAIN: [], EVAL: []}
    folders = _folders(top)
    for folder in folders:
        if (holder := next((above for above in _up(folder, top)[1:] if above in folders), None)) is not None:
            if folder.relative_to(holder).parts[0] in _PARTS:
                continue
            raise InputError(f"the task {_name(folder, top)} lies in the task {_name(holder, top)}", "put it beside it")
        name = _name(folder, top)
        try:
            task = _read_task(folder, name)
        except InputError as error:
            raise InputError(f"the task {name}: {error.detail}", error.hint) from None
        split = EVAL if EVAL in folder.relative_to(top).parts[:-1] else TRAIN
        found[split].append(task)
    if not found[TRAIN]:
        raise InputError("all tasks lie in eval/, and none is left to train on", "put the others beside it")
    return {split: tasks for split, tasks in found.items() if tasks}


def _folders(top: Path) -> Sequence[Path]:
    """Those with a task.toml, in the order of their names."""
    return sorted(path.parent for path in top.rglob("task.toml") if path.is_file())


def _up(folder: Path, top: Path) -> Sequence[Path]:
    """`folder` and those above it, to `top`."""
    return [above for above in (folder, *folder.parents) if above == top or top in above.parents]


def _name(folder: Path, top: Path) -> str:
    return str(folder.relative_to(top)) if folder != top else "task"


def _read_task(folder: Path, name: str) -> HarborTask:
    """Raises InputError."""
    if (folder / "steps").is_dir() or (folder / "trajectory.json").exists():
        raise InputError("tasks of several steps, or with a conversation before, are not played", _HINT)
    if any(folder.rglob(".harborignore")):
        raise InputError(".harborignore is not read", "leave out what is not to be copied")
    settings = _settings(folder / "task.toml")
    instruction = _text(folder / "instruction.md")
    if not instruction.strip() or len(instruction) > MAX_INSTRUCTION:
        raise InputError(f"instruction.md has {len(instruction)} characters", f"1 to {MAX_INSTRUCTION} are taken")
    tests, solution = _below(folder, "tests", "test.sh"), _below(folder, "solution", "solve.sh")
    environment = settings.environment
    image = _image(folder / "environment", environment)
    if (size := sum(path.stat().st_size for path in image.files.values())) > MAX_PART:
        raise InputError(f"the files of its environment have {size} bytes", f"at most {MAX_PART} are taken")
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
        why = "is not known, or cannot be honoured" if problem["type"] == "extra_forbidden" else "cannot be honoured"
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
    """The files of a part by the absolute path that they get. Raises InputError."""
    if not (folder / name / script).is_file():
        raise InputError(f"there is no {name}/{script}")
    files = sorted(path for path in (folder / name).rglob("*") if path.is_file())
    if (size := sum(path.stat().st_size for path in files)) > MAX_PART:
        raise InputError(f"{name}/ has {size} bytes", f"at most {MAX_PART} are taken")
    return {f"/{path.relative_to(folder)}": path for path in files}


def _variables(given: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in given.items():
        check_variable(name)
        if "\0" in value:
            raise InputError(f"{name} holds a NUL character", _HINT)
        if "${" in value:
            raise InputError(f"{name} = {value[:80]!r}: variables of the service are not handed on", "write the value")
    return given


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # none is there, or a folder
        raise InputError(f"there is no file {path.name}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path.name} is not UTF-8: {error.reason}") from None


def _megabytes(size: object) -> int | str:
    """Of a size like 2G; what is none is told, to be refused."""
    text = str(size).strip()
    factor = _SIZES.get(text[-1:].upper())
    if not isinstance(size, str) or factor is None:
        return f"{text}, no size like 2G"
    try:
        return int(float(text[:-1]) * factor)
    except (ValueError, OverflowError):
        return size
