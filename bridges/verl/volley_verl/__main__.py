"""Print Hydra overrides for verl, or check that verl finds this package.

python -m volley_verl config RUN.yaml --env-url URL --server URL --weights-dir FOLDER
python -m volley_verl check
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys

import yaml

from volley_verl.config import translate
from volley_verl.settings import SettingsError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m volley_verl", description="Volley's bridge to verl.")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="print a Volley run's configuration as Hydra overrides for verl")
    config.add_argument("files", nargs="+", metavar="RUN.yaml", help="later files win")
    config.add_argument("--env-url", default=os.environ.get("VOLLEY_ENV_URL"))
    config.add_argument("--server", action="append", default=[], help="address of a rollout server; may be repeated")
    config.add_argument("--weights-dir", help="folder for new weights that all servers read too")
    config.add_argument("--legacy", action="store_true", help="for verl's legacy trainer, trainer.use_v1=false")
    commands.add_parser("check", help="register with verl, and show the error if there is one")
    options = parser.parse_args(arguments)
    if options.command == "check":
        return _check()
    try:
        run: dict[str, object] = {}
        for file in options.files:
            with open(file, encoding="utf-8") as source:
                run = _merged(run, yaml.safe_load(source) or {})
        addresses = {"env_url": options.env_url, "servers": options.server, "weights_dir": options.weights_dir}
        made = translate(run, **addresses, legacy=options.legacy)
    except (SettingsError, OSError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for key in made.left_out:
        print(f"left out, it concerns Volley's own processes: {key}", file=sys.stderr)
    print("\n".join(shlex.quote(line) for line in made.lines()))
    return 0


def _merged(base: dict, over: dict) -> dict:
    made = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = _merged(made[key], value) if both else value
    return made


def _check() -> int:
    import verl

    import volley_verl.plugin  # noqa: F401

    print(f"verl {verl.__version__} has the agent loop, reward manager, rollout and checkpoint engine of Volley")
    return 0


if __name__ == "__main__":
    sys.exit(main())
