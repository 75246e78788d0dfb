"""Time a run's page in Chromium by playwright, and print the figures as JSON. Runs in an environment of its own.

Arguments: the browser's program, the server's link, and the server's /proc/PID/stat.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from playwright.sync_api import Request, sync_playwright

OPTIONS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
# Milliseconds since the navigation at the second frame after the first chart is in the page.
WATCH = """
const watcher = new MutationObserver(() => {
  if (!document.querySelector("canvas")) return;
  watcher.disconnect();
  requestAnimationFrame(() => requestAnimationFrame(() => { window.picture = performance.now(); }));
});
watcher.observe(document, { childList: true, subtree: true });
"""


def cpu_ms(stat: str) -> float:
    fields = Path(stat).read_text(encoding="utf-8").rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sent(request: Request) -> int:
    sizes = request.sizes()
    return sizes["responseBodySize"] + sizes["responseHeadersSize"]


def main(program: str, link: str, stat: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        context.request.get(link, max_redirects=0)
        context.add_init_script(WATCH)
        page = context.new_page()
        measured = context.new_cdp_session(page)
        measured.send("Performance.enable", {"timeDomain": "threadTicks"})
        sizes = list[int]()
        page.on("requestfinished", lambda one: sizes.append(sent(one)))
        before = cpu_ms(stat)
        page.goto(f"{link.split('/login')[0]}/#/run/long")
        page.wait_for_function("() => window.picture", polling=5)
        metrics = {one["name"]: one["value"] for one in measured.send("Performance.getMetrics")["metrics"]}
        seen = {
            "picture_ms": page.evaluate("window.picture"),
            "server_ms": cpu_ms(stat) - before,
            "task_ms": 1000 * metrics["TaskDuration"],
            "script_ms": 1000 * metrics["ScriptDuration"],
            "requests": len(sizes),
            "bytes": sum(sizes),
        }
        browser.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:4])
