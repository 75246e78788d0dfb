"""Run helpers provided by packages, such as the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shared import packages
from shared.run.folder import RunFolder
from shared.schema import RunConfig


@contextmanager
def sidecars(folder: RunFolder, config: RunConfig) -> Iterator[None]:
    """Run the helpers of the installed packages inside the context. Raises ConfigError if one cannot be loaded."""
    with ExitStack() as started:
        for sidecar in packages.loaded(packages.SIDECARS).values():
            started.enter_context(sidecar(folder, config))
        yield
