"""Recipes: their figures follow from the committed summaries, and these from the committed configurations."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from shared import config
from shared.errors import ConfigError
from tools.recipes import pages, records
from tools.recipes.__main__ import main
from tools.recipes.records import RECIPES, RecipeResult, RecipeRun
from tools.recipes.training import commands
from volley.__main__ import parser
from volley.layout import PROJECT
from volley.reporting.intervals import wilson

NAMES = records.names()
SHORT = (("frozen_lake", "0"),)
"""Recipe and seed of runs that end within about two minutes."""


def run(label: str = "grpo", seed: int = 0, before: float = 0.25, after: float = 0.9, tasks: int = 200) -> RecipeRun:
    evaluations = ((0, before, tasks), (8, (before + after) / 2, tasks), (16, after, tasks))
    return RecipeRun(label, seed, 16, 256, 1000, evaluations, {}, 0.0, 60.0, 110.0, 1.6, 2.0)


def test_one_run_has_the_interval_of_its_evaluation() -> None:
    assert records.interval([0.9], 200) == wilson(180, 200)


def test_several_runs_have_the_interval_of_one_more_run() -> None:
    low, high = records.interval([0.5, 0.6, 0.7], 1_000_000)
    half = 4.303 * 0.1 * (4 / 3) ** 0.5  # Student's t with two degrees of freedom
    assert (low, high) == (pytest.approx(0.6 - half, abs=1e-3), pytest.approx(min(1.0, 0.6 + half), abs=1e-3))


def test_equal_runs_keep_the_width_of_one_evaluation() -> None:
    assert records.interval([0.9, 0.9, 0.9], 200) == wilson(180, 200)


@pytest.mark.parametrize(("after", "agrees"), [(0.9, True), (0.84, True), (0.79, False), (0.99, False)])
def test_a_repeated_run_is_compared_with_the_interval(after: float, agrees: bool) -> None:
    (line,), found = records.compared({"grpo": RecipeResult(0.25, 0.9, 0.8, 0.95)}, [run(after=after)])
    assert found is agrees
    assert ("agrees with" in line, "DIFFERS from" in line) == (agrees, not agrees)


def test_the_mean_over_seeds_is_compared() -> None:
    committed = {"grpo": RecipeResult(0.25, 0.9, 0.8, 0.95)}
    _, agrees = records.compared(committed, [run(seed=0, after=0.78), run(seed=1, after=0.94)])
    assert agrees


def test_supervised_runs_have_no_result() -> None:
    sft = RecipeRun("sft", 0, 10, 0, 1000, (), {"loss": (2.0, 1.0)}, None, 10.0, 10.0, 1.0, 2.0)
    assert set(records.results([sft, run()])) == {"grpo"}


@pytest.mark.parametrize(("after", "made_with", "code"), [(None, "now", 0), (0.3, "now", 1), (None, "before", 2)])
def test_the_exit_code_says_whether_finished_runs_agree(
    after: float | None, made_with: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of another configuration are refused, and none is trained again."""
    committed = records.read("frozen_lake")
    known = committed.digest if made_with == "now" else made_with
    figures = asdict(run(after=after or committed.results["grpo"].after))
    (tmp_path / "frozen_lake-grpo-0.json").write_text(json.dumps({"digest": known, **figures}), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["frozen_lake", "--seeds", "0", "--dir", str(tmp_path)])
    assert ended.value.code == code
    said = capsys.readouterr()
    assert {0: "agrees with", 1: "DIFFERS from", 2: "another recipe"}[code] in said.out + said.err


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no recipe frozen_lak"):
        records.load("frozen_lak")


def test_a_block_of_a_page_is_replaced_alone() -> None:
    text = "a\n<!-- figures -->\nold\n<!-- end of figures -->\nb"
    assert pages.filled(text, "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="has no"):
        pages.filled("a", "new")


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_recipe_parse(name: str, tmp_path: Path) -> None:
    recipe = records.load(name)
    for arguments in commands(name, recipe, 7, tmp_path).values():
        given = parser().parse_args(arguments)
        overrides = [one for one in arguments if re.match(r"[\w.]+=", one) and "@latest" not in one]
        found = config.load(given.config, overrides).config.run
        assert (found.seed, found.dir) == (7, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_summary_is_complete_and_of_the_committed_configuration(name: str) -> None:
    recipe, summary = records.load(name), records.read(name)
    assert summary.digest == records.digest(recipe), f'make recipes ARGS="{name} --write"'
    assert [(one.seed, one.label) for one in summary.runs] == [
        (s, label) for s in recipe.seeds for label in recipe.runs
    ]
    assert summary.results == records.results(summary.runs)
    for one in summary.runs:
        assert min(one.steps, one.tokens, one.seconds, one.cpu_seconds, one.memory_gb) > 0
        if one.evaluations:
            assert (one.evaluations[0][0], one.evaluations[-1][0]) == (0, one.steps)
    assert {"jax", "volley", "python"} <= summary.versions.keys()


@pytest.mark.parametrize("name", NAMES)
def test_page_and_curve_follow_from_the_summary(name: str) -> None:
    recipe, summary, folder = records.load(name), records.read(name), RECIPES / name
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert page == pages.filled(page, pages.figures(recipe, summary))
    assert page.startswith(f"# {recipe.title}\n")
    assert f"make recipes ARGS={name}\n" in page
    assert (folder / "curve.svg").read_text(encoding="utf-8") == pages.curve(recipe, summary)


def test_gallery_and_readme_show_the_recipes() -> None:
    gallery, readme = (page.read_text(encoding="utf-8") for page in (pages.GALLERY, pages.README))
    assert gallery == pages.filled(gallery, pages.gallery())
    for name, block in pages.of_readme().items():
        assert readme == pages.filled(readme, block, name)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "seed"), SHORT)
def test_a_short_recipe_agrees_again(name: str, seed: str, tmp_path: Path) -> None:
    command = f"-m tools.recipes {name} --seeds {seed} --dir {shlex.quote(str(tmp_path))}"
    done = subprocess.run([sys.executable, *shlex.split(command)], cwd=PROJECT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agrees with" in done.stdout
