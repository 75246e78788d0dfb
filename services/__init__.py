"""The services, and the command line that starts them."""

import sys
from importlib.util import find_spec
from pathlib import Path


def _refuse_a_hidden_package() -> None:
    """End the process with code 2 if PYTHONPATH names another package `shared` before this project's."""
    found = find_spec("shared")
    where = Path(found.origin).parent if found and found.origin else None
    if where is None or where.resolve().parent != Path(__file__).resolve().parents[1]:
        sys.stderr.write(f"volley: the package {where} hides Volley's own: take its folder out of PYTHONPATH\n")
        raise SystemExit(2)


_refuse_a_hidden_package()
