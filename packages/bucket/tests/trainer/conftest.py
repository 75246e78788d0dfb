"""A bucket of the library's in memory, and one behind S3's protocol."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from tests.support.bucket import own_prefix, s3_server
from tests.trainer.conftest import *  # noqa: F403
from volley_bucket.objects import Bucket


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def s3(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A prefix of its own on the server."""
    return own_prefix(server, tmp_path, monkeypatch)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """In this process, of the same library: what is put at one address, everybody finds there."""
    stores = defaultdict[str, MemoryStore](MemoryStore)
    monkeypatch.setattr(Bucket, "_store", property(lambda self: stores[self.address]))
    return Bucket(f"s3://volley/memory-{tmp_path.name}")  # a thread that outlives its test writes to that test's
