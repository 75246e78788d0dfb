"""`volley completion`: a script with which a shell completes commands, options, choices, and folders of runs.

shtab writes it from the parsers. Names of folders are never evaluated by the shell.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from volley.printing import print_result
from volley.run_arguments import FOLDERS

SHELLS = ("bash", "zsh", "fish")
_BASH = """
_volley_runs() {
  local run
  for run in runs/*/run.json; do
    run=${run%/run.json}
    if [[ -e $run/run.json && $run == "$1"* ]]; then printf '%s\\n' "$run"; fi
  done
  compgen -d -- "$1"
}
"""
_ZSH = """
_volley_runs() {
  local -a found
  found=(runs/*/run.json(N:h))
  compadd -a found
  _files -/
}
"""
_FISH = """
function _volley_runs
  for run in runs/*/run.json
    path dirname -- $run
  end
  __fish_complete_directories
end
"""
_RUNS = {
    "bash": "_volley_runs",
    "zsh": "_volley_runs",
    "fish": "(_volley_runs)",
    "preamble": {"bash": _BASH, "zsh": _ZSH, "fish": _FISH},
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    script = script_of(arguments.shell)
    print_result({"shell": arguments.shell, "script": script}, script)
    return 0


def script_of(shell: str) -> str:
    from volley.__main__ import parser

    whole = parser()
    _complete_folders(whole)
    return shtab.complete(whole, shell)


def _complete_folders(part: argparse.ArgumentParser) -> None:
    """Tell shtab which arguments of a command and its own commands are runs, files or folders."""
    for action in part._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in {id(one): one for one in action.choices.values()}.values():
                _complete_folders(inner)
        elif action.dest in FOLDERS:
            action.complete = _RUNS  # type: ignore[attr-defined]
        elif action.type is Path or action.dest == "config":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
