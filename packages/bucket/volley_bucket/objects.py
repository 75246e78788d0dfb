"""Objects below one address of a bucket, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`. The only importer of obstore.

Credentials, region and endpoint come from the environment variables that all tools of these services use
(AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, …), or from the machine's role. They
never appear in an error's text.

Every method blocks, and raises NotFound (no such bucket or object), Forbidden (no credentials, or rejected ones) and
Unavailable (the bucket does not answer, or answers with a server error).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from shared.errors import Conflict, Forbidden, NotFound, Unavailable, VolleyError, WeightsError

PART_BYTES = 16 * 2**20
_N_AT_ONCE = 4
_PART = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._=+@-]{1,200}")
_CONNECT_S, _IDLE_S, _WHOLE_S, _RETRY_S, _N_RETRIES = 10, 120, 86400, 30, 4
"""Time-outs in seconds: to connect; without an answer (sent data count: `upload` sends four parts of 5 MiB at once,
which needs a link of 0.2 MB/s); of one request; of all retries. Then the number of retries.
"""
_CREDENTIALS = ("Unauthenticated", "PermissionDenied")
_NO_CREDENTIALS = re.compile(
    r"Missing (AccessKeyId|SecretAccessKey)|token request|169\.254\.|credential", re.IGNORECASE
)

type Tag = Mapping[str, str]
"""Identity of an object's content, as the bucket names it."""


def is_key(text: str) -> bool:
    """True if each part of a key is a plain name."""
    return all(map(_PART.fullmatch, text.split("/")))


def check_names(names: Iterable[str], beside: str) -> None:
    """Raise WeightsError for names that cannot all be files of one folder that also holds `beside`."""
    files = {beside}
    for name in names:
        if not is_key(name):
            raise WeightsError(f"the manifest names a file {name[:100]!r}")
        files.add(name)
    if any(str(parent) in files for name in files for parent in PurePosixPath(name).parents):
        raise WeightsError("the manifest names a file that is a folder of others")


class Bucket:
    """A bucket at an `ADDRESS`; keys are relative to it, with slashes between their parts.

    It reads neither the environment nor the bucket before the first call.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def read(self, key: str, most: int) -> bytes:
        """Return an object. Raises WeightsError if it has more than `most` bytes."""
        return self.read_tagged(key, most)[0]

    def read_tagged(self, key: str, most: int) -> tuple[bytes, Tag]:
        """Return an object, and the tag to `swap` it by."""
        import obstore

        with self._translated(key):
            store = self._store
            found = obstore.get(store, key)
            if (size := found.meta["size"]) > most:
                raise WeightsError(f"{self.address}/{key} has {size} bytes, more than {most}")
            return bytes(found.bytes()), _tag(found.meta)

    def download(
        self, key: str, path: Path, size: int, check: Callable[[], None] = lambda: None, *, at_most: bool = False
    ) -> None:
        """Download an object to a file, several parts at once.

        `check` is called before each part, and may raise to stop.

        Raises WeightsError if the object has another size (with `at_most`, a larger one) or changes meanwhile, and
        OSError.
        """
        import obstore

        with self._translated(key):
            store = self._store
            meta = obstore.head(store, key)
            if meta["size"] != size and not (at_most and meta["size"] < size):
                raise WeightsError(f"{self.address}/{key} has {meta['size']} bytes, expected {size}")
            size = meta["size"]
            unchanged = {"if_match": meta["e_tag"]} if meta["e_tag"] else {}
            with path.open("wb", buffering=0) as file, ThreadPoolExecutor(_N_AT_ONCE) as threads:

                def part(start: int) -> None:
                    check()
                    only: Any = {"range": (start, min(start + PART_BYTES, size)), **unchanged}
                    data = memoryview(obstore.get(store, key, options=only).bytes())
                    while data:
                        n = os.pwrite(file.fileno(), data, start)
                        data, start = data[n:], start + n

                for _ in threads.map(part, range(0, size, PART_BYTES)):
                    pass

    def upload(self, key: str, source: Path | bytes) -> None:
        """Upload an object whole or not at all, replacing any other; a file is sent in parts. Raises OSError."""
        import obstore

        with self._translated(key):
            if isinstance(source, bytes):
                obstore.put(self._store, key, source, max_concurrency=_N_AT_ONCE)
                return
            with source.open("rb") as file:
                obstore.put(self._store, key, file, max_concurrency=_N_AT_ONCE)

    def swap(self, key: str, data: bytes, tag: Tag | None) -> Tag:
        """Replace the object of `tag`, or create one if `tag` is None; the bucket compares atomically.

        Return the new tag.

        Raises Conflict if the present object is another one.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

        mode: Any = "create" if tag is None else dict(tag)
        with self._translated(key):
            try:
                made = obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError, NotFoundError) as error:
                if "NoSuchBucket" in str(error):
                    raise
                raise Conflict(f"{self.address}/{key} was replaced by another writer") from error
            return _tag(made)

    def keys(self, below: str) -> list[str]:
        """Return the sorted keys of all objects below `below` and a slash."""
        return sorted(self.sizes(below))

    def sizes(self, below: str) -> dict[str, int]:
        """Return the sizes in bytes of all objects below `below` and a slash, by key."""
        import obstore

        with self._translated(below):
            return {one["path"]: one["size"] for some in obstore.list(self._store, below) for one in some}

    def is_empty(self) -> bool:
        """True without objects, ignoring the "folder" object of a console, whose key is the address."""
        import obstore
        from obstore.exceptions import InvalidPathError

        with self._translated(""):
            try:
                return not any(one["path"] for some in obstore.list(self._store, chunk_size=2) for one in some)
            except InvalidPathError:  # for a key that Volley does not use, like a//b
                return False

    def remove(self, keys: Sequence[str]) -> None:
        """Delete objects in order, ignoring missing ones."""
        import obstore

        for key in keys:
            with suppress(NotFound), self._translated(key):
                obstore.delete(self._store, key)

    @cached_property
    def _store(self) -> Any:
        from obstore.store import from_url

        return from_url(
            self.address,
            client_options={
                "allow_http": True,  # for an http:// endpoint
                "connect_timeout": f"{_CONNECT_S}s",
                "read_timeout": f"{_IDLE_S}s",
                "timeout": f"{_WHOLE_S}s",
            },
            retry_config={"max_retries": _N_RETRIES, "retry_timeout": _seconds(_RETRY_S)},
        )

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        from obstore.exceptions import BaseError, PreconditionError

        where = f"{self.address}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            if error.errno is not None:  # a local file, not an object
                raise
            raise self._missing(where, error) from error
        except PreconditionError as error:
            raise WeightsError(f"{where} was replaced while it was read") from error
        except BaseError as error:
            raise self._failed(where, error) from error

    def _missing(self, where: str, error: Exception) -> VolleyError:
        if "NoSuchBucket" in str(error):
            return NotFound(f"{where}: there is no such bucket")
        return NotFound(f"{where} does not exist")

    def _failed(self, where: str, error: Exception) -> VolleyError:
        text, kind = str(error), type(error).__name__
        if "NoSuchBucket" in text:
            return self._missing(where, error)
        if kind.startswith(_CREDENTIALS) or " 403 " in text or " 401 " in text:
            return Forbidden(f"{where}: the bucket refuses this service's credentials", "see docs/buckets.md")
        if _NO_CREDENTIALS.search(text):
            return Forbidden(f"{where}: this service has no credentials for it", "see docs/buckets.md")
        return Unavailable(f"{where} cannot be reached now: {_reason(text)}")


def _tag(meta: Any) -> Tag:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _seconds(seconds: int) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


def _reason(text: str) -> str:
    """Return the last reason in a store's message, without addresses and answers around it."""
    first = text.splitlines()[0]
    return first.rsplit(" - ", 1)[-1][:200]
