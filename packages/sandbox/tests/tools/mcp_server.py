"""A server of the Model Context Protocol, made with its package: `python -m …tools.mcp_server [PORT]`."""

import asyncio
import os
import sys

from mcp.server.fastmcp import FastMCP, Image

PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 0
server = FastMCP("test", host="127.0.0.1", port=PORT, log_level="ERROR")
kept: list[str] = []


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def keep(word: str) -> str:
    """Keeps a word, and tells all that were kept."""
    kept.append(word)
    return " ".join(kept)


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("the wine is corked")


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def hang() -> str:
    """Answers nothing from now on."""
    import time

    time.sleep(60)
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


@server.tool()
def flood() -> str:
    """Says much."""
    return "x" * 1_000_000


@server.tool()
def secret(name: str) -> str:
    """A variable of its environment."""
    return os.environ.get(name, "not there")


@server.tool()
def picture() -> Image:
    """Draws."""
    return Image(data=b"png", format="png")


if __name__ == "__main__":
    server.run("streamable-http" if PORT else "stdio")
