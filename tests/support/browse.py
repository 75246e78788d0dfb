"""Drives the dashboard in Chromium with playwright, in an environment of its own; prints what it saw as JSON.

Arguments: the browser's program, the link, and a folder for screenshots.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


def main(program: str, link: str, folder: str) -> None:
    base = link.split("/login")[0]
    seen: dict[str, Any] = {"console": [], "violations": [], "foreign_requests": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
        page.on("console", lambda message: seen["console"].append(message.text))
        page.on("pageerror", lambda error: seen["console"].append(str(error)))
        page.on("request", lambda one: one.url.startswith(base) or seen["foreign_requests"].append(one.url))
        page.goto(link)
        look(page, "table tbody tr", "runs", folder, seen)
        page.goto(f"{base}/#/run/r")
        look(page, ".tiles", "run", folder, seen)
        page.goto(f"{base}/#/run/r/episodes")
        page.wait_for_selector("tbody tr", timeout=60_000)
        page.wait_for_function("() => !document.body.innerText.includes('more steps')", timeout=60_000)
        look(page, "tbody tr", "episodes", folder, seen)
        seen["total"] = int(page.locator("span", has_text=" of ").first.inner_text().split(" of ")[1].replace(",", ""))
        page.goto(f"{base}/#/run/r/ticket/e000009-s000006.90001.1")
        look(page, ".turn", "hostile", folder, seen)
        seen["title"] = page.title()
        seen["raw"] = page.evaluate("/[\\u202e\\u001b]/.test(document.body.innerText)")
        page.goto(f"{base}/#/run/r/ticket/e000009-s000006.90001.0")
        look(page, ".turn", "long", folder, seen)
        walk(page, seen)
        browser.close()
    print(json.dumps(seen))


def look(page: Page, selector: str, name: str, folder: str, seen: dict[str, Any]) -> None:
    """Take pictures in light and dark, and check both with axe."""
    page.wait_for_selector(selector, timeout=60_000)
    for theme in ("light", "dark"):
        if page.evaluate("document.documentElement.dataset.theme") != theme:
            page.click("#theme")
        page.wait_for_timeout(300)
        page.screenshot(path=f"{folder}/{name}-{theme}.png")
        found = Axe().run(page).response["violations"]
        seen["violations"] += [[name, theme, one["id"], one["nodes"][0]["html"][:200]] for one in found]


def walk(page: Page, seen: dict[str, Any]) -> None:
    """Choose tokens by keys, then scroll to the end of the long turn."""
    seen["drawn_at_first"] = page.locator(".tokens span[data-i]").count()
    page.click(".turn.assistant span[data-i='3']")
    chosen = "Number(document.querySelector('.chosen').dataset.i)"
    places = [page.evaluate(chosen)]
    page.keyboard.press("ArrowRight")
    seen["chosen_by_keys"] = [*places, page.evaluate(chosen)]
    page.evaluate("document.querySelector('.turn:last-of-type .part:last-child').scrollIntoView({block: 'end'})")
    last = ".turn:last-of-type .part:last-child span[data-i]:last-child"
    page.wait_for_selector(last, timeout=30_000)
    seen["last_position"] = page.evaluate(f"Number(document.querySelector({last!r}).dataset.i)")


if __name__ == "__main__":
    main(*sys.argv[1:4])
