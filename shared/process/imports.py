"""Imports without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import large libraries without garbage collection.

    Imported objects stay; the collector would walk them repeatedly during the import, a tenth of a start's CPU time,
    and at every full collection afterwards.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
