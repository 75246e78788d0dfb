"""Curve of a recipe as a small SVG, and the blocks of pages that show its figures.

A block stands between `<!-- NAME -->` and `<!-- end of NAME -->`, and follows from summary.json alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from shared.files.storage import replace
from shared.run.folder import RunFolder
from tools.recipes import records
from tools.recipes.records import RECIPES, Recipe, RecipeRun, RecipeSummary
from volley.layout import PROJECT
from volley.reporting.intervals import success_rates
from volley_dashboard.report import closing

GALLERY, README = PROJECT / "docs" / "recipes.md", PROJECT / "README.md"
FEATURED = ("frozen_lake", "short_sentences", "staleness")
"""Recipes whose curves README shows beside each other."""
LONG_S = 45 * 60.0
_COLORS = ("#1b6ca8", "#c65d21", "#2e8b57", "#8e4585")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 290, 46, 396, 54, 246
_LEGEND_EVERY, _BAR_EVERY = 18, 9
_STYLE = """text { font: 14px system-ui, sans-serif; fill: #24292f; } .s { font-size: 13px; fill: #57606a; }
.m { text-anchor: middle; } .e { text-anchor: end; } .g { stroke: #d0d7de; }
path { fill: none; stroke-width: 1; opacity: .5; } .mean { stroke-width: 3; opacity: 1; }
.b { stroke-width: 6; opacity: .35; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .s { fill: #a3acb8; } .g { stroke: #3d444d; } }"""

type Points = Sequence[tuple[int, float]]


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Replace blocks of a page, by name. Raises ValueError if it lacks one."""
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        text = filled(text, block, name)
    replace(page, text.encode())


def filled(text: str, block: str, name: str = "figures") -> str:
    """Text of a page with this block. Raises ValueError if it has none."""
    before, begin, rest = text.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not (begin and end):
        raise ValueError(f"the page has no block <!-- {name} -->")
    return f"{before}{begin}\n{block}\n{end}{after}"


def figures(recipe: Recipe, summary: RecipeSummary) -> str:
    """Table of a recipe's runs, and how they were measured."""
    rows = [
        "| run | before | after, each seed | one more run | seconds | CPU seconds | memory | trained tokens |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(label, summary) for label in recipe.runs),
    ]
    return "\n".join([*rows, "", _measured(recipe, summary)])


def _row(label: str, summary: RecipeSummary) -> str:
    runs, result = _of(summary, label), summary.results.get(label)
    success = ["–", "–", "–"]
    if result is not None:
        before = [f"{run.before * 100:.1f}" for run in runs]
        success = [
            f"{' · '.join(before if len({*before}) > 1 else before[:1])} %",
            f"{' · '.join(f'{run.after * 100:.1f}' for run in runs)} %",
            f"{result.low * 100:.1f}–{result.high * 100:.1f} %",
        ]
    cells = [
        f"`{label}`",
        *success,
        " · ".join(f"{run.seconds:,.0f}" for run in runs),
        " · ".join(f"{run.cpu_seconds:,.0f}" for run in runs),
        f"{max(run.memory_gb for run in runs):.1f} GB",
        f"{fmean(run.tokens for run in runs):,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _measured(recipe: Recipe, summary: RecipeSummary) -> str:
    tasks = sorted({run.tasks for run in summary.runs if run.evaluations})
    seeds = ", ".join(map(str, recipe.seeds))
    machine, seconds = summary.machine, sum(run.seconds for run in summary.runs)
    loads = [round(run.load) for run in summary.runs]
    size = f"{'**Long**: ' * is_long(summary)}{seconds / 60:.0f} minutes"
    alone = " With one seed, the interval is of its evaluation alone." if len(recipe.seeds) == 1 else ""
    load = f"load {min(loads)} to {max(loads)}" if min(loads) < max(loads) else f"load {loads[0]}"
    return (
        f"Seed{'s' * (len(recipe.seeds) > 1)} {seeds}; {' and '.join(map(str, tasks))} held-out tasks, greedy."
        f" {size} in all on {machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']} GB, {load},"
        f" {summary.date}. `volley verify` proved every run.{alone}"
    )


def is_long(summary: RecipeSummary) -> bool:
    """Return True if all runs together took more than 45 minutes."""
    return sum(run.seconds for run in summary.runs) > LONG_S


def gallery() -> str:
    """Title, curve, sentence and figures of each recipe that has results."""
    return "\n\n".join(_shown(name, records.load(name), records.read(name)) for name in _with_results())


def _with_results() -> list[str]:
    return [name for name in records.names() if (RECIPES / name / "summary.json").exists()]


def of_readme() -> dict[str, str]:
    """Blocks of README: the featured recipes, and the last words of the quickstart."""
    return {"figures": _featured(), "quickstart": _quickstart()}


def _quickstart() -> str:
    """Sentence that `make quickstart` ends with: the first seed of the recipe on FrozenLake."""
    known = records.read("frozen_lake")
    first = known.runs[0]
    where = f"On {known.machine['cores']} cores at load {first.load:.0f}, it ends with"
    rows = [{"step": step, "success": success, "n_tasks": tasks} for step, success, tasks in first.evaluations]
    summary = {
        "evaluations": [asdict(rate) for rate in success_rates(rows)],
        "steps": first.steps,
        "max_steps": first.steps,
        "finished": True,
        "elapsed_sec": first.seconds,
    }
    proof = {"ok": True, "by_disposition": {"trained": first.groups}}
    sentence = closing.sentence(RunFolder(PROJECT / "runs" / "quickstart"), summary, proof)
    return "\n".join([where, "", "```text", *textwrap.wrap(sentence, 104), "```"])


def _featured() -> str:
    """Table of the featured recipes' curves, for README."""
    known = [(name, records.load(name), records.read(name)) for name in FEATURED if name in _with_results()]
    rows = [
        [f"[{recipe.title}](recipes/{name}/README.md)" for name, recipe, _ in known],
        ["-"] * len(known),
        [f"![Curve](recipes/{name}/curve.svg)" for name, _, _ in known],
        [_sentence(recipe, summary) for _, recipe, summary in known],
    ]
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def _sentence(recipe: Recipe, summary: RecipeSummary) -> str:
    n = len(recipe.seeds)
    seconds = fmean(run.cpu_seconds for run in summary.runs)
    return f"{n} seeds, {seconds:.0f} CPU seconds each" if n > 1 else f"{n} seed, {seconds:.0f} CPU seconds"


def _shown(name: str, recipe: Recipe, summary: RecipeSummary) -> str:
    where = f"../recipes/{name}"
    return "\n\n".join(
        [
            f"## {recipe.title}",
            f"![Held-out success by optimizer step]({where}/curve.svg)",
            f"{recipe.shows} Its page: [`recipes/{name}`]({where}/README.md).",
            figures(recipe, summary),
        ]
    )


def _of(summary: RecipeSummary, label: str) -> list[RecipeRun]:
    return [run for run in summary.runs if run.label == label]


def curve(recipe: Recipe, summary: RecipeSummary) -> str:
    """SVG of held-out success by step: thin lines for seeds, a thick one for their mean, a bar for the interval."""
    labels = [label for label in recipe.runs if label in summary.results]
    last = max(run.evaluations[-1][0] for label in labels for run in _of(summary, label))
    extra = _LEGEND_EVERY * (len(labels) - 1)
    body = [_grid(last)]
    for i, (label, color) in enumerate(zip(labels, _COLORS, strict=False)):
        runs, result = _of(summary, label), summary.results[label]
        body += [_path([(step, success) for step, success, _ in run.evaluations], last, color) for run in runs]
        body.append(_path(_mean(runs), last, color, "mean"))
        x, y = _RIGHT + 8 + i * _BAR_EVERY, 38 - extra + i * _LEGEND_EVERY
        body.append(f'<path class="b" stroke="{color}" d="M{x} {_y(result.low)}V{_y(result.high)}"/>')
        text = f"{label}: {result.before * 100:.0f} → {result.after * 100:.0f} %"
        body.append(f'<text x="{_LEFT}" y="{y}" style="fill: {color}">{text}</text>')
    title = f"{recipe.title}: held-out success by optimizer step"
    size = f'viewBox="0 {-extra} {_WIDTH} {_HEIGHT + extra}" width="{_WIDTH}" height="{_HEIGHT + extra}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
    above = f'<text x="{_LEFT}" y="{18 - extra}" class="s">held-out success</text>'
    return "\n".join([head, f"<title>{title}</title>", f"<style>\n{_STYLE}\n</style>", above, *body, "</svg>\n"])


def _grid(last: int) -> str:
    lines = list[str]()
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        lines.append(f'<line class="g" x1="{_LEFT}" x2="{_RIGHT}" y1="{y}" y2="{y}"/>')
        lines.append(f'<text class="s e" x="{_LEFT - 6}" y="{y + 4}">{share:.0%}</text>')
    for step in range(0, last + 1, _every(last)):
        lines.append(f'<text class="s m" x="{_x(step, last)}" y="{_BOTTOM + 18}">{step}</text>')
    lines.append(f'<text class="s m" x="{(_LEFT + _RIGHT) // 2}" y="{_BOTTOM + 37}">optimizer step</text>')
    return "\n".join(lines)


def _every(last: int) -> int:
    """Distance of the steps that the axis names: at most eight of them."""
    return next(n for n in (1, 2, 4, 5, 8, 10, 16, 20, 25, 50, 100, 250, 1000, last) if last / n <= 8)


def _mean(runs: Sequence[RecipeRun]) -> list[tuple[int, float]]:
    """Mean success at the steps that all runs evaluated."""
    known = [{step: success for step, success, _ in run.evaluations} for run in runs]
    return [(step, fmean(one[step] for one in known)) for step in known[0] if all(step in one for one in known)]


def _path(points: Points, last: int, color: str, kind: str = "") -> str:
    drawn = "L".join(f"{_x(step, last)} {_y(share)}" for step, share in points)
    return f'<path class="{kind}" stroke="{color}" d="M{drawn}"/>'.replace(' class=""', "")


def _x(step: int, last: int) -> float:
    return round(_LEFT + (_RIGHT - _LEFT) * step / max(last, 1), 1)


def _y(share: float) -> float:
    return round(_BOTTOM - (_BOTTOM - _TOP) * share, 1)
