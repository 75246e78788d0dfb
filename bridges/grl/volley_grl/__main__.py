"""Print Volley's configuration for one of GRL.

python -m volley_grl tunix_base.yaml > run.yaml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from volley_grl.errors import ConversionError
from volley_grl.translation import Translation, translate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m volley_grl", description="Converts GRL's configurations.")
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="GRL's file; its `defaults` lie beside it")
    file: Path = parser.parse_args(arguments).file
    try:
        made = convert(file)
    except (ConversionError, OSError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for note in made.notes:
        print(f"without effect: {note}", file=sys.stderr)
    print(yaml.safe_dump(made.tree, sort_keys=True, allow_unicode=True), end="")
    return 0


def convert(file: Path) -> Translation:
    """Convert a file, and those beside it that its `defaults` name.

    Raises ConversionError, OSError, and YAMLError for a file that is not YAML.
    """
    return translate(_read(file), lambda name: _read(file.parent / f"{Path(name).name}.yaml"))


def _read(file: Path) -> Mapping[str, Any]:
    found: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ConversionError(f"{file} does not hold a mapping of sections", "give GRL's tunix_base.yaml")
    return found


if __name__ == "__main__":
    sys.exit(main())
