"""`make recipes ARGS=NAME`: train the runs of a recipe, verify them, and compare their success with the committed one.

make recipes ARGS="frozen_lake --seeds 0"

A recipe is a folder in `recipes/`: `recipe.yaml` names its `volley` commands and seeds, `summary.json` and `curve.svg`
hold the results, README.md shows them. A repeated recipe agrees if the mean held-out success of its runs lies in the
interval that the committed runs give for the mean of as many. `--write` renews the results instead. Figures come from
the runs' records; this tool adds CPU seconds, memory and the machine's load. A finished run is not trained again:
remove `runs/recipes` to start over.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from shared.errors import ConfigError
from shared.files.storage import replace
from tools.recipes import pages, records
from tools.recipes.records import RECIPES, Recipe, RecipeSummary
from tools.recipes.training import summarize, trained
from volley.layout import PROJECT
from volley.program import run_program
from volley.runs.run_file import write_json


def main(argv: Sequence[str] | None = None) -> None:
    """Exit code 0 if every run is proven and every result agrees, else 1."""
    run_program(lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make recipes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", help=f"one of {', '.join(records.names())}; without it, all are listed")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="default: those of the recipe")
    parser.add_argument("--write", action="store_true", help="renew summary.json, curve.svg and the pages' figures")
    parser.add_argument("--dir", type=Path, default=PROJECT / "runs" / "recipes", help="folder of the runs")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError."""
    if arguments.name is None:
        print("\n".join(f"{name:<20} {records.load(name).shows}" for name in records.names()))
        return 0
    name, recipe = arguments.name, records.load(arguments.name)
    seeds = tuple(arguments.seeds or recipe.seeds)
    if len(set(seeds)) < len(seeds) or len(seeds) > records.MOST_SEEDS:
        raise ConfigError(f"seeds {', '.join(map(str, seeds))}", f"give up to {records.MOST_SEEDS}, each once")
    if arguments.write and seeds != recipe.seeds:
        raise ConfigError("--write needs the recipe's seeds in order", "leave --seeds out, or change recipe.yaml")
    committed = None if arguments.write else records.read(name)
    if committed and committed.digest != records.digest(recipe):
        raise ConfigError(f"the figures of {name} were made with another configuration", "renew them with --write")
    runs = tuple(trained(name, recipe, seeds, arguments.dir.absolute(), whole=arguments.write))
    if committed is None:
        last = arguments.dir / f"{name}-{runs[-1].label}-{runs[-1].seed}"
        write(name, recipe, summarize(recipe, runs, last))
        return 0
    lines, agree = records.compared(committed, runs)
    print("\n".join(lines))
    return int(not agree)


def write(name: str, recipe: Recipe, summary: RecipeSummary) -> None:
    """Write summary, curve, and the figures of the recipe's page, the gallery and README."""
    folder = RECIPES / name
    write_json(folder / "summary.json", summary)
    replace(folder / "curve.svg", pages.curve(recipe, summary).encode())
    pages.fill(folder / "README.md", {"figures": pages.figures(recipe, summary)})
    pages.fill(pages.GALLERY, {"figures": pages.gallery()})
    pages.fill(pages.README, pages.of_readme())


if __name__ == "__main__":
    main()
