"""Convert a GGUF file to a Hugging Face folder: `python -m volley_convert.gguf FILE.gguf FOLDER`.

`volley model get` runs it. It prints the result or a problem as a JSON object.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from shared.errors import VolleyError, problem

_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 written, 2 for a file that cannot be converted."""
    os.environ |= _QUIET
    from volley_convert.gguf.conversion import convert

    try:
        quantizations = convert(Path(arguments[0]), Path(arguments[1]))
    except VolleyError as error:
        _print_json(problem(error))
        return 2
    _print_json({"ok": True, "quantizations": quantizations})
    return 0


def _print_json(line: Mapping[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
