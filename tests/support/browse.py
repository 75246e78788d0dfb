"""Drives the dashboard in Chromium with playwright, in an environment of its own; prints what it saw as JSON.

Arguments: scenario (`large` or `states`), the browser's program, the link, a folder for pictures, and that of the runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WIDE, PHONE = 1440, 390
STATE = "[document.title, document.querySelector('#live').textContent, document.querySelector('.tile b').textContent]"
PLACE = """() => {
  const opened = [...document.querySelectorAll('details[open]')].map((one) => one.id);
  return [opened, document.activeElement.textContent, getSelection().toString(), scrollY];
}"""


def main(scenario: str, program: str, link: str, folder: str, runs: str) -> None:
    base = link.split("/login")[0]
    seen: dict[str, Any] = {"console": [], "violations": [], "foreign_requests": [], "overflow": [], "states": {}}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        page = browser.new_context(viewport={"width": WIDE, "height": 900}).new_page()
        page.on("console", lambda message: seen["console"].append(message.text))
        page.on("pageerror", lambda error: seen["console"].append(str(error)))
        page.on("request", lambda one: one.url.startswith(base) or seen["foreign_requests"].append(one.url))
        page.goto(link)
        (large if scenario == "large" else states)(page, base, Path(folder), seen, Path(runs))
        browser.close()
    print(json.dumps(seen))


def large(page: Page, base: str, folder: Path, seen: dict[str, Any], _: Path) -> None:
    """List many episodes, and show one with hostile text and a long one."""
    look(page, "table tbody tr", "runs", folder, seen)
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


def states(page: Page, base: str, folder: Path, seen: dict[str, Any], runs: Path) -> None:
    """Look at every page on a screen and on a phone, at runs in each state, then at one that goes on and ends."""
    names = sorted(one.name for one in runs.iterdir())
    for width in (PHONE, WIDE):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{base}/#/")
        look(page, "table tbody tr", f"runs-{width}", folder, seen)
        rows = page.locator("tbody tr").all()
        listed = {row.locator("a").inner_text(): row.locator("td:nth-child(3)").inner_text() for row in rows}
        for name in names:
            page.goto(f"{base}/#/run/{name}")
            look(page, f"h1:text-is('{name}') ~ .tiles", f"{name}-{width}", folder, seen)
            seen["states"][f"{name} {width}"] = [*page.evaluate(STATE), listed[name]]
        page.goto(f"{base}/#/run/{names[0]}/episodes")
        look(page, "tbody a", f"episodes-{width}", folder, seen)
        page.click("tbody a")
        look(page, ".turn", f"ticket-{width}", folder, seen)
    page.goto(f"{base}/#/run/live")
    page.wait_for_selector("h1:text-is('live') ~ .tiles")
    follow(page, seen, runs / "live")


def follow(page: Page, seen: dict[str, Any], run: Path) -> None:
    """Open, select, focus and scroll, let the run go on, then end."""
    page.click("#settings summary")
    page.focus("#settings summary")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#settings td'))")
    page.evaluate("document.querySelector('#settings td:last-child').scrollIntoView({block: 'end'})")
    before = page.evaluate(PLACE)
    with (run / "evals.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "success": 0.75, "n_tasks": 4, "reward_mean": 1.0}\n')
    page.wait_for_selector(".tile b:text-is('75.0 %')", timeout=30_000)
    seen["place"] = [before, page.evaluate(PLACE)]
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps({**record, "finished": True}), encoding="utf-8")
    page.wait_for_selector(".tile b:text-is('finished')", timeout=30_000)
    seen["at_the_end"] = page.evaluate(STATE)


def look(page: Page, selector: str, name: str, folder: Path, seen: dict[str, Any]) -> None:
    """Take pictures in light and dark, check both with axe, and note pages that are wider than the screen."""
    page.wait_for_selector(selector, timeout=60_000)
    for theme in ("light", "dark"):
        if page.evaluate("document.documentElement.dataset.theme") != theme:
            page.click("#theme")
        page.wait_for_timeout(300)
        page.screenshot(path=f"{folder}/{name}-{theme}.png")
        found = Axe().run(page).response["violations"]
        seen["violations"] += [[name, theme, one["id"], one["nodes"][0]["html"][:200]] for one in found]
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        seen["overflow"].append(name)


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
    main(*sys.argv[1:6])
