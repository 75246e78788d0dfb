"""`python -m services.env.submissions.check FILE PACKAGES [CLASS]`: the validation of a file, without a service.

Prints the report as JSON; the exit code is 0 if the environment would be taken, 1 if not, 2 if it cannot be tried here.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from services.env.backends.sandboxed import LOG_LINES, SandboxedBackend
from services.env.sandbox.limits import SandboxLimits
from services.env.sandbox.packages.dependencies import PYPI, DependencyStore
from services.env.sandbox.sandboxes import Sandboxes
from services.env.submissions.programs import of_source
from services.env.submissions.submissions import MIN_TIER
from services.env.submissions.validation import Validated, validate
from shared.errors import VolleyError

_DEADLINE_S = 30.0


async def checked(file: Path, source: str, packages: Path, entry: str | None) -> Validated:
    """Args: packages: where dependencies are installed. Raises Unavailable where no sandbox can be started."""
    dependencies = DependencyStore(packages, os.environ.get("UV_DEFAULT_INDEX", PYPI))

    async with Sandboxes() as sandboxes:
        tier = await sandboxes.probe()
        if tier.level < MIN_TIER:
            sys.stderr.write(f"note  this machine cannot confine the code: {'; '.join(tier.missing)}\n")
        log: deque[str] = deque(maxlen=LOG_LINES)

        def open_backend(splits: Mapping[str, int], has_demonstration: bool) -> SandboxedBackend:
            return SandboxedBackend(
                file.stem,
                lambda: of_source(source, file.name, entry, {}, dependencies),
                splits,
                has_demonstration,
                sandboxes,
                SandboxLimits(),
                _DEADLINE_S,
                log,
            )

        return await validate(open_backend)


def main() -> None:
    file, packages = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        found = asyncio.run(checked(file, file.read_text(encoding="utf-8"), packages, *(sys.argv[3:4] or [None])))
    except (VolleyError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"volley: {error}\n")
        raise SystemExit(2) from None
    sys.stdout.write(found.report.model_dump_json() + "\n")
    raise SystemExit(0 if found.report.passed else 1)


if __name__ == "__main__":
    main()
