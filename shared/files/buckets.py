"""Objects below one address of a bucket, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`. The only importer of obstore.

Credentials, region and endpoint are those of the environment, under the names that all tools of these services read
(AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, …), or of the machine's role. None of
them gets into an error's text.

Every method blocks. All of them raise NotFound (no such bucket or object), Forbidden (the bucket does not take our
credentials, or there are none) and Unavailable (it does not answer, or answers with a fault of its own).
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

ADDRESS = r"(s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]*(/\.*[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*)*"
PART_BYTES = 16 * 2**20
_N_AT_ONCE = 4
_PART = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._=+@-]{1,200}")
_CONNECT_S, _IDLE_S, _WHOLE_S, _RETRY_S, _N_RETRIES = 10, 120, 86400, 30, 4
"""Seconds to connect, without an answer (to which what is sent counts: four parts of 5 MiB at once, see `upload`, need
a link of 0.2 MB/s), of one request, and of all its tries; and how many more there are.
"""
_CREDENTIALS = ("Unauthenticated", "PermissionDenied")
_NO_CREDENTIALS = re.compile(
    r"Missing (AccessKeyId|SecretAccessKey)|token request|169\.254\.|credential", re.IGNORECASE
)

type Tag = Mapping[str, str]
"""Which content of an object it is, as the bucket names it."""


def is_address(text: str) -> bool:
    return text.startswith(("s3://", "gs://"))


def is_key(text: str) -> bool:
    """Whether each part of it is a plain name."""
    return all(map(_PART.fullmatch, text.split("/")))


def check_names(names: Iterable[str], beside: str) -> None:
    """Raises WeightsError for those that cannot all be files of one folder, `beside` another one."""
    files = {beside}
    for name in names:
        if not is_key(name):
            raise WeightsError(f"the manifest names a file {name[:100]!r}")
        files.add(name)
    if any(str(parent) in files for name in files for parent in PurePosixPath(name).parents):
        raise WeightsError("the manifest names a file that is a folder of others")


class Bucket:
    """`address` is an `ADDRESS`; keys are relative to it, their parts divided by slashes. Neither the environment nor
    the bucket is asked before the first call.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def read(self, key: str, most: int) -> bytes:
        """Raises WeightsError for an object of more than `most` bytes."""
        return self.read_tagged(key, most)[0]

    def read_tagged(self, key: str, most: int) -> tuple[bytes, Tag]:
        """`read`, and what to `swap` it by."""
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
        """The object as a file, a few parts of it at once. `check` is called before each part, and raises what is to
        end this.

        Raises WeightsError if it has another size (with `at_most` a larger one), or becomes another object meanwhile;
        and OSError.
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
        """The object is there whole or not at all, in place of any other; a file is sent in parts. Raises OSError."""
        import obstore

        with self._translated(key):
            if isinstance(source, bytes):
                obstore.put(self._store, key, source, max_concurrency=_N_AT_ONCE)
                return
            with source.open("rb") as file:
                obstore.put(self._store, key, file, max_concurrency=_N_AT_ONCE)

    def swap(self, key: str, data: bytes, tag: Tag | None) -> Tag:
        """Puts an object in the place of the one that `tag` is of, or, without one, where none is: the bucket decides.
        Its own tag. Raises Conflict if something else is there.
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
                raise Conflict(f"{self.address}/{key} is another one by now") from error
            return _tag(made)

    def keys(self, below: str) -> list[str]:
        """Of all objects whose key begins with `below` and a slash, in order."""
        return sorted(self.sizes(below))

    def sizes(self, below: str) -> dict[str, int]:
        """In bytes, of all objects whose key begins with `below` and a slash."""
        import obstore

        with self._translated(below):
            return {one["path"]: one["size"] for some in obstore.list(self._store, below) for one in some}

    def is_empty(self) -> bool:
        """But for the object that a console makes of a "folder", whose key is the address."""
        import obstore
        from obstore.exceptions import InvalidPathError

        with self._translated(""):
            try:
                return not any(one["path"] for some in obstore.list(self._store, chunk_size=2) for one in some)
            except InvalidPathError:  # of a key that is none to us, like a//b
                return False

    def remove(self, keys: Sequence[str]) -> None:
        """In this order; those that are not there are no error."""
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
                "allow_http": True,  # for an endpoint that is named so
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
            if error.errno is not None:  # a file here, not an object
                raise
            raise self._missing(where, error) from error
        except PreconditionError as error:
            raise WeightsError(f"{where} became another object while it was read") from error
        except BaseError as error:
            raise self._failed(where, error) from error

    def _missing(self, where: str, error: Exception) -> VolleyError:
        if "NoSuchBucket" in str(error):
            return NotFound(f"{where}: there is no such bucket")
        return NotFound(f"{where} is not there")

    def _failed(self, where: str, error: Exception) -> VolleyError:
        text, kind = str(error), type(error).__name__
        if "NoSuchBucket" in text:
            return self._missing(where, error)
        if kind.startswith(_CREDENTIALS) or " 403 " in text or " 401 " in text:
            return Forbidden(f"{where}: the bucket refuses this service's credentials", "see docs/deploy.md, Buckets")
        if _NO_CREDENTIALS.search(text):
            return Forbidden(f"{where}: this service has no credentials for it", "see docs/deploy.md, Buckets")
        return Unavailable(f"{where} cannot be reached now: {_reason(text)}")


def _tag(meta: Any) -> Tag:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _seconds(seconds: int) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


def _reason(text: str) -> str:
    """What a store says in the end, without the addresses and answers around it."""
    first = text.splitlines()[0]
    return first.rsplit(" - ", 1)[-1][:200]
