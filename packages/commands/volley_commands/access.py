"""`volley access RUN`: print a run's addresses and token files as shell variables.

Prints lines for `eval "$(volley access RUN)"`, or JSON. Never prints a token: the shell reads it from its file.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ServiceUnreachable
from shared.run.folder import RunFolder
from shared.services_schema import TokenFiles
from shared.visible import quoted
from volley.printing import is_json, print_for_shell, print_result
from volley.run_arguments import add_run_dir
from volley.runs import addresses
from volley.runs.addresses import Addresses
from volley_python.diagnosis import identity


def add(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    return main(arguments.run_dir)


def main(run_dir: Path) -> int:
    """Print the variables. As JSON, also print those of a run that is not running; the exit code is then 1.

    Raises:
        ConfigError: the folder is not that of a run.
        ServiceUnreachable: none of its services answers, or another run's do; the shell gets nothing to evaluate.
    """
    folder = RunFolder(run_dir.absolute())
    found = addresses.read(folder)
    known = asyncio.run(identity.find_answering(folder, found))
    answering = _answering(found, known)
    if is_json():
        print_result(_described(folder, found, answering))
        return 0 if answering else 1
    if identity.is_elsewhere(known):
        raise ServiceUnreachable(identity.elsewhere_message(folder), f"`volley up {quoted(run_dir)}` continues it")
    if not answering:
        raise ServiceUnreachable(
            f"run {folder.name} is not running: none of its services answers ({', '.join(found.urls.values())})",
            f"`volley up {quoted(run_dir)}` continues it",
        )
    print_for_shell(*(f"export {name}={shlex.quote(value)}" for name, value in variables(folder, found).items()))
    return 0


def variables(folder: RunFolder, found: Addresses) -> dict[str, str]:
    """Values by variable name.

    VOLLEY_RUN_DIR, VOLLEY_TRAINER_URL, VOLLEY_ROLLOUT_0_URL, VOLLEY_TOKEN_FILE_VIEWER, VOLLEY_CA_FILE, …
    """
    shown = {"VOLLEY_RUN_DIR": str(folder.path)}
    shown |= {f"VOLLEY_{name.upper().replace('-', '_')}_URL": url for name, url in found.urls.items()}
    files = {f"VOLLEY_TOKEN_FILE_{role.upper()}": getattr(found.token_files, role) for role in TokenFiles.model_fields}
    files["VOLLEY_CA_FILE"] = found.ca_file
    return shown | {name: str(path) for name, path in files.items() if path is not None}


def _described(folder: RunFolder, found: Addresses, answering: set[str]) -> dict[str, Any]:
    services = {
        name: {"url": url, "external": name in found.external, "answers": name in answering}
        for name, url in found.urls.items()
    }
    files = found.token_files.model_dump(mode="json")
    row = {
        "run_dir": folder.path,
        "running": bool(answering),
        "services": services,
        "token_files": files,
        "ca_file": found.ca_file,
    }
    return {**row, "variables": variables(folder, found)}


def _answering(found: Addresses, known: Mapping[str, bool]) -> set[str]:
    """Names of the run's services that answer; none if the run is not running.

    External services may answer although the run is not running: they count alone only if all services are external.
    """
    names = {name for name, ours in known.items() if ours}
    return names if names - set(found.external) or len(found.external) == len(found.urls) else set()
