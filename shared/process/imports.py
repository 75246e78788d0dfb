"""Imports without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For the large imports of a starting process. What an import makes, stays; the collector would walk it again and
    again while it grows, for a tenth of the CPU time of a start, and then at every full collection for as long as the
    process lives.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
