"""Make README's moving picture: a real quickstart in a terminal, then its page.

It needs Chromium, and other packages than Volley:
    .venvs/base/bin/uv run --no-project --with playwright,pillow,rich python tools/docs/moving_picture.py
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.text import Text

PROJECT = Path(__file__).resolve().parents[2]
VOLLEY = PROJECT / ".venvs/base/bin/volley"
TARGET = PROJECT / "docs/images/quickstart.webp"
COLUMNS, ROWS, WIDTH, HEIGHT = 96, 26, 900, 540  # characters, pixels
SECONDS, A_SECOND, HOLD_S = 15, 4, 4
_CLICKED = ("a:has-text('·')", "a:has-text('beside')", "details[open] summary", ".assistant .tokens span[data-i]")
_CODE = re.compile(r"\x1b\[(?P<number>\d*)(?P<code>[AK])|\x1b\[\?\d+[hl]|(?P<char>\r|\n|\x1b\[[\d;]*m|[^\r\n\x1b]+)")
_PAGE = """<style>
body {{ margin: 0; background: #16191c; color: #d8dee0; font: 14px/1.36 "DejaVu Sans Mono", monospace; }}
header {{ background: #23282c; padding: 5px 14px; position: sticky; top: 0; }}
pre {{ font: inherit; margin: 8px 14px; white-space: pre-wrap; word-break: break-all; }}
</style><header>$ volley quickstart · {clock}</header>{screen}"""


def record() -> list[tuple[float, str]]:
    """Run the quickstart on a terminal; return its output, with seconds since the first."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    written, began = [], 0.0
    with subprocess.Popen([VOLLEY, "quickstart"], cwd=PROJECT, stdout=end, stderr=end, env=environment):
        os.close(end)
        with suppress(OSError):  # the program has ended
            while data := os.read(terminal, 2**16):
                began = began or time.monotonic()
                text = data.decode(errors="replace").replace(str(PROJECT), "~/volley")
                written.append((time.monotonic() - began, text))
    return written


def screens(written: Sequence[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """Yield the screen at equal distances of time, as lines with colour codes, and the last one."""
    lines, row, shown = [""], 0, -1.0
    step = written[-1][0] / (SECONDS * A_SECOND)
    for at, text in written:
        if at - shown >= step:
            yield at, "\n".join(lines[-ROWS:])
            shown = at
        for found in _CODE.finditer(text):
            if found["code"] == "A":
                row = max(0, row - int(found["number"] or 1))
            elif found["code"] == "K":
                lines[row] = ""
            elif found["char"] == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif found["char"] not in (None, "\r"):
                lines[row] += found["char"]
    yield written[-1][0], "\n".join(lines[-ROWS:])


def picture(page: Page, at: float, screen: str, whole: float) -> bytes:
    console = Console(record=True, file=io.StringIO(), width=10_000)
    console.print(Text.from_ansi(screen), soft_wrap=True)
    shown = console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
    clock = f"{int(at) // 60}:{int(at) % 60:02}, {whole / SECONDS:.0f} × as fast"
    page.set_content(_PAGE.format(clock=clock, screen=shown))
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    return page.screenshot()


def of_page(page: Page, link: str) -> Iterator[bytes]:
    """Yield pictures of the run's page and of two episodes of a group."""
    page.goto(link)
    page.goto(link.partition("/login")[0] + "/#/run/quickstart")
    page.wait_for_selector(".card canvas")
    for top in (0, 330):
        page.evaluate(f"scrollTo(0, {top})")
        page.wait_for_timeout(300)
        yield page.screenshot()
    page.goto(link.partition("/login")[0] + "/#/run/quickstart/episodes?success=false")
    for place in _CLICKED:
        page.locator(place).first.click()
    page.evaluate("scrollTo(0, 230)")
    yield page.screenshot()


def main() -> None:
    written = record()
    server = subprocess.Popen([VOLLEY, "dashboard"], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    with sync_playwright() as playwright, server:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light").new_page()
        frames = [picture(page, at, screen, written[-1][0]) for at, screen in screens(written)]
        seen = [*of_page(page, server.stdout.readline().split()[-1])] if server.stdout else []
        server.terminate()
    durations = [1000 // A_SECOND] * (len(frames) - 1) + [1000 * HOLD_S] * (1 + len(seen))
    first, *others = (Image.open(io.BytesIO(one)).convert("RGB") for one in (*frames, *seen))
    first.save(TARGET, save_all=True, append_images=others, duration=durations, loop=0, quality=70, method=6)


if __name__ == "__main__":
    main()
