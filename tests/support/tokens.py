"""Token files of all roles, for tests."""

from __future__ import annotations

from pathlib import Path

from shared.services_schema import TokenFiles


def write_tokens(folder: Path) -> TokenFiles:
    """Files only the owner can read; the token of a role is `ROLE-token-of-a-test`."""
    return TokenFiles(
        **{role: write_private(folder / f"token_{role}", f"{role}-token-of-a-test") for role in TokenFiles.model_fields}
    )


def write_private(path: Path, text: str) -> Path:
    path.write_text(text + "\n", encoding="utf-8")
    path.chmod(0o600)
    return path
