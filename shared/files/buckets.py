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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.errors import Conflict, Forbidden, NotFound, Unavailable, VolleyError, WeightsError

ADDRESS = r"(s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._=+@-]+)*"
PART_BYTES = 16 * 2**20
_N_AT_ONCE = 4
_ANSWER_S, _RETRY_S, _N_RETRIES = 60.0, 30, 4
_CREDENTIALS = ("Unauthenticated", "PermissionDenied")
_NO_CREDENTIALS = re.compile(
    r"Missing (AccessKeyId|SecretAccessKey)|token request|169\.254\.|credential", re.IGNORECASE
)


def is_address(text: str) -> bool:
    return text.startswith(("s3://", "gs://"))


class Bucket:
    """`address` is an `ADDRESS`; keys are relative to it, their parts divided by slashes. Nothing is asked until the
    first call.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def read(self, key: str, most: int) -> bytes:
        """Raises WeightsError for an object of more than `most` bytes."""
        import obstore

        with self._translated(key):
            store = self._store()
            found = obstore.get(store, key)
            if (size := found.meta["size"]) > most:
                raise WeightsError(f"{self.address}/{key} has {size} bytes, more than {most}")
            return bytes(found.bytes())

    def download(self, key: str, path: Path, size: int, check: Callable[[], None] = lambda: None) -> None:
        """The object as a file, a few parts of it at once. `check` is called before each part, and raises what is to
        end this.

        Raises WeightsError if it has another size, or becomes another object meanwhile; and OSError.
        """
        import obstore

        with self._translated(key):
            store = self._store()
            meta = obstore.head(store, key)
            if meta["size"] != size:
                raise WeightsError(f"{self.address}/{key} has {meta['size']} bytes, expected {size}")
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

    def _store(self) -> Any:
        from obstore.store import from_url

        return from_url(
            self.address,
            client_options={"allow_http": True, "timeout": f"{_ANSWER_S}s"},  # for an endpoint that is named so
            retry_config={"max_retries": _N_RETRIES, "retry_timeout": _seconds(_RETRY_S)},
        )

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        where = f"{self.address}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            if error.errno is not None:  # a file here, not an object
                raise
            raise self._missing(where, error) from error
        except AlreadyExistsError as error:
            raise Conflict(f"{where} is there already") from error
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


def _seconds(seconds: int) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


def _reason(text: str) -> str:
    """What a store says in the end, without the addresses and answers around it."""
    first = text.splitlines()[0]
    return first.rsplit(" - ", 1)[-1][:200]
