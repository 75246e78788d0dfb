"""`python -m volley_sandbox.sandbox.probing`: print the tier that this machine allows, as JSON."""

from __future__ import annotations

import asyncio
import sys

import orjson

from volley_sandbox.sandbox.sandboxes import Sandboxes


async def _main() -> None:
    async with Sandboxes() as sandboxes:
        tier = await sandboxes.probe()
    sys.stdout.write(orjson.dumps(tier.describe()).decode() + "\n")


if __name__ == "__main__":
    asyncio.run(_main())
