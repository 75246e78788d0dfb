"""Play an episode with OpenEnv's own client: python play.py URL ACTION…. Prints its results as one line of JSON.

Runs in a Python that has OpenEnv's package and nothing of this project. $TOKEN holds the role's token, if any.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from openenv.core import GenericEnvClient


async def played(url: str, actions: list[str]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {os.environ['TOKEN']}"} if "TOKEN" in os.environ else None
    async with GenericEnvClient(base_url=url, headers=headers) as client:
        result = await client.reset(split="eval", index=3, seed=1)
        seen = [{"observation": result.observation, "reward": result.reward, "done": result.done}]
        for action in actions:
            result = await client.step({"message": action})
            seen.append({"observation": result.observation, "reward": result.reward, "done": result.done})
        return {"seen": seen, "metadata": result.metadata, "state": await client.state()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(played(sys.argv[1], sys.argv[2:]))) + "\n")
