"""Template files: submitted unchanged with settings, or edited first (`volley env init --template`).

None of them is imported here: they run in sandboxes, with the packages that they declare.
"""

from __future__ import annotations

from pathlib import Path

from shared.errors import NotFound

_FOLDER = Path(__file__).parent


def files() -> dict[str, Path]:
    """Return the templates by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.py")) if path.stem != "__init__"}


def source_of(name: str) -> bytes:
    """Read the file of an adapter. Raises NotFound, which lists the adapters."""
    known = files()
    if name not in known:
        raise NotFound(f"there is no adapter {name[:80]!r}", f"there are: {', '.join(known)}")
    return known[name].read_bytes()
