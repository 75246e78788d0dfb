"""Wheels, and an index that serves them, made by a test."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def wheel(name: str, version: str, files: dict[str, str | bytes], requires: str = "") -> bytes:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    kept: dict[str, str | bytes] = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    data = {path: content.encode() if isinstance(content, str) else content for path, content in kept.items()}
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(c).digest()).decode().rstrip('=')},{len(c)}\n"
        for path, c in data.items()
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in {**data, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(path, content)
    return out.getvalue()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def package_index(root: Path, packages: Mapping[str, bytes]) -> Iterator[str]:
    """The address of an index (PEP 503) of these files, by name."""
    for name, content in packages.items():
        folder = root / "simple" / name.partition("-")[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        (folder / "index.html").write_text(f'<a href="{name}">{name}</a>', encoding="utf-8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
