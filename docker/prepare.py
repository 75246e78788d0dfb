"""One-shot before the stack starts: secrets that are missing, and volumes the services' user may write.

    python docker/prepare.py SECRETS_FOLDER UID WRITABLE_FOLDER...

Runs as root with no capability but CHOWN. A secret that exists is never read, changed or replaced; a new one is 256
random bits in hex, readable by the services' user alone.
"""

import os
import secrets
import sys
from pathlib import Path

NAMES = ("redis_password", "token_viewer", "token_service", "token_admin")


def main(folder: str, uid: str, *writable: str) -> None:
    try:
        for name in NAMES:
            create(Path(folder), name, int(uid))
        for path in writable:
            os.chown(path, int(uid), int(uid))
    except OSError as error:
        raise SystemExit(f"prepare: {error.filename}: {error.strerror}") from None


def create(folder: Path, name: str, uid: int) -> None:
    """Makes the secret `folder/name` unless it exists. Complete once its name is there."""
    path, temporary = folder / name, folder / f".{name}.new"
    if path.exists():
        return
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fchown(file.fileno(), uid, uid)
        os.fsync(file.fileno())
    temporary.rename(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
