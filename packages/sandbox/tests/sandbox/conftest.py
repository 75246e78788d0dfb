"""Sandboxes in every way this machine allows; a test module shares one set of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.sandbox.tier import NAMESPACED, RESTRICTED

LOWEST_LANDLOCK = 1
VARIANTS = {
    "namespaces": {"namespaces": True},
    "landlock": {"namespaces": False},
    "oldest-landlock": {"namespaces": False, "landlock": LOWEST_LANDLOCK},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=VARIANTS)
async def sandboxes(request: pytest.FixtureRequest) -> AsyncIterator[Sandboxes]:
    """Skips where this machine does not have the tier."""
    async with Sandboxes(**VARIANTS[request.param]) as opened:
        tier = await opened.probe()
        wanted = NAMESPACED if request.param == "namespaces" else RESTRICTED
        if tier.level < wanted:
            pytest.skip(f"tier {wanted} is not to be had here: {'; '.join(tier.missing)}")
        yield opened
