"""Recipes: their figures follow from the committed summaries, and these from the committed configurations."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from shared import config
from shared.errors import ConfigError
from shared.run.folder import RunFolder
from tools.recipes import pages, records, training
from tools.recipes.__main__ import main
from tools.recipes.records import RECIPES, Recipe, RecipeRun, RecipeSummary
from tools.recipes.training import commands, trained
from volley.__main__ import parse_arguments
from volley.layout import PROJECT
from volley.reporting.intervals import wilson
from volley.runs.run_file import RunRecord, write_record

NAMES = records.names()
SHORT = (("frozen_lake", "0"),)
"""Recipe and seed of runs that end within about two minutes."""


def run(label: str = "grpo", seed: int = 0, before: float = 0.25, after: float = 0.9, tasks: int = 200) -> RecipeRun:
    evaluations = ((0, before, tasks), (8, (before + after) / 2, tasks), (16, after, tasks))
    return RecipeRun(label, seed, 16, 256, 1000, evaluations, {}, 0.0, 60.0, 110.0, 1.6, 2.0)


def committed(*runs: RecipeRun) -> RecipeSummary:
    return RecipeSummary("", "", {}, {}, records.results(runs), runs)


def test_one_run_has_the_interval_of_its_evaluation() -> None:
    assert records.interval([0.9], 200) == wilson(180, 200)


def test_several_runs_have_the_interval_of_one_more_run() -> None:
    low, high = records.interval([0.5, 0.6, 0.7], 1_000_000)
    half = 4.303 * 0.1 * (4 / 3) ** 0.5  # Student's t with two degrees of freedom
    assert (low, high) == (pytest.approx(0.6 - half, abs=1e-3), pytest.approx(min(1.0, 0.6 + half), abs=1e-3))


def test_equal_runs_keep_the_width_of_one_evaluation() -> None:
    assert records.interval([0.9, 0.9, 0.9], 200) == wilson(180, 200)


def test_the_mean_of_several_further_runs_has_a_narrower_interval() -> None:
    low, high = records.interval([0.5, 0.6, 0.7], 1_000_000, 3)
    half = 4.303 * 0.1 * (2 / 3) ** 0.5
    assert (low, high) == (pytest.approx(0.6 - half, abs=1e-3), pytest.approx(0.6 + half, abs=1e-3))
    assert records.interval([0.9, 0.9, 0.9], 200, 3) == wilson(540, 600)


@pytest.mark.parametrize(("after", "agrees"), [(0.9, True), (0.86, True), (0.8, False), (0.99, False)])
def test_a_repeated_run_is_compared_with_the_interval(after: float, agrees: bool) -> None:
    (line,), found = records.compared(committed(run()), [run(after=after)])
    assert found is agrees
    assert ("agrees with" in line, "DIFFERS from" in line) == (agrees, not agrees)


def test_the_mean_over_seeds_is_compared() -> None:
    known = committed(run())
    assert not records.compared(known, [run(after=0.84)])[1]
    assert records.compared(known, [run(after=0.84), run(seed=1, after=0.94)])[1]
    assert not records.compared(known, [run(seed=seed, after=0.86) for seed in range(12)])[1]


def test_a_missing_evaluation_is_a_difference() -> None:
    (line,), agree = records.compared(committed(run()), [replace(run(), evaluations=())])
    assert not agree
    assert "DIFFERS from" in line


def test_an_interval_that_contains_the_start_is_noted() -> None:
    (_, note), agree = records.compared(committed(run(after=0.3)), [run(after=0.3)])
    assert agree
    assert note.startswith("note: grpo would agree without training")


def test_supervised_runs_have_no_result() -> None:
    sft = RecipeRun("sft", 0, 10, 0, 1000, (), {"loss": (2.0, 1.0)}, None, 10.0, 10.0, 1.0, 2.0)
    assert set(records.results([sft, run()])) == {"grpo"}


@pytest.mark.parametrize(("after", "made_with", "code"), [(None, "now", 0), (0.3, "now", 1), (None, "before", 2)])
def test_the_exit_code_says_whether_finished_runs_agree(
    after: float | None, made_with: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of another configuration are refused, and none is trained again."""
    known = records.read("frozen_lake")
    digest = known.digest if made_with == "now" else made_with
    figures = asdict(run(after=after or known.results["grpo"].after))
    (tmp_path / "frozen_lake-grpo-0.json").write_text(json.dumps({"digest": digest, **figures}), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["frozen_lake", "--seeds", "0", "--dir", str(tmp_path)])
    assert ended.value.code == code
    said = capsys.readouterr()
    assert {0: "agrees with", 1: "DIFFERS from", 2: "another recipe"}[code] in said.out + said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--seeds 0 1 0", "each once"),
        ("--seeds 0 1 2 3 4 5 6 7 8 9 10", "up to 10"),
        ("--write --seeds 2 1 0", "in order"),
        ("--write --seeds 0", "in order"),
    ],
)
def test_seeds_are_refused_before_training(
    arguments: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["frozen_lake", *arguments.split(), "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_recipe_has_ten_seeds_at_most() -> None:
    with pytest.raises(ValidationError, match="at most 10"):
        Recipe(title="", shows="", seeds=tuple(range(11)), runs={"a": "train"})


def test_figures_of_another_configuration_are_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "digest", lambda _: "another")
    with pytest.raises(SystemExit) as ended:
        main(["frozen_lake", "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert "renew them with --write" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_digest_covers_the_files_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PROJECT", tmp_path)
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("model: {path: models/a, name: models}", encoding="utf-8")
    recipe = Recipe(title="", shows="", seeds=(0,), runs={"a": "train --config config.yaml"})
    digests = {records.digest(recipe)}
    for text in ("1", "2"):
        (tmp_path / "models" / "a" / "config.json").write_text(text, encoding="utf-8")
        digests.add(records.digest(recipe))
    assert len(digests) == 3
    (tmp_path / "models" / "other").write_text("", encoding="utf-8")
    assert records.digest(recipe) in digests


_USAGE = ("cpu_seconds", "memory_gb", "load")


class Program:
    """`trained` with a program in place of `volley`, which fails `verify` while `refuses`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.recipe = folder, records.load("frozen_lake")
        self.run = folder / "frozen_lake-grpo-0"
        self.trainings, self.refuses = 0, True
        monkeypatch.setattr(training, "_watched", self._train)
        monkeypatch.setattr(training, "_proven", self._verify)

    def __call__(self, *, whole: bool = False) -> list[RecipeRun]:
        return list(trained("frozen_lake", self.recipe, [0], self.folder, whole=whole))

    def begin(self, *, finished: bool = False) -> None:
        self.run.mkdir(exist_ok=True)
        write_record(RunFolder(self.run), RunRecord("", 0, {}, {}, 0.0, 1.0, finished))

    def _train(self, _: list[str]) -> dict[str, float]:
        self.trainings += 1
        self.begin(finished=True)
        return {"cpu_seconds": 110.0, "memory_gb": 1.6, "load": 2.0}

    def _verify(self, _: RunFolder, label: str, seed: int) -> dict[str, object]:
        if self.refuses:
            raise SystemExit(1)
        return {key: value for key, value in asdict(run(label, seed)).items() if key not in _USAGE}


def test_a_run_whose_verification_failed_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(tmp_path, monkeypatch)
    with pytest.raises(SystemExit):
        program()
    program.refuses = False
    assert program(whole=True) == program() == [run()]
    assert program.trainings == 1


def test_a_finished_run_without_usage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(tmp_path, monkeypatch)
    program.begin(finished=True)
    with pytest.raises(ConfigError, match="was not measured"):
        program()
    assert program.trainings == 0


def test_an_interrupted_run_is_compared_but_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(tmp_path, monkeypatch)
    program.begin()
    with pytest.raises(ConfigError, match="was interrupted"):
        program(whole=True)
    assert program.trainings == 0
    program.refuses = False
    assert program() == [run()]
    with pytest.raises(ConfigError, match="was interrupted"):
        program(whole=True)


def test_what_a_recipe_needs_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts by its path alone: the digest is the same with and without it."""
    monkeypatch.setattr(training, "PROJECT", tmp_path)
    monkeypatch.setattr(records, "PROJECT", tmp_path)
    runs = {"a": "train model.path=models/a"}
    recipe = Recipe(title="", shows="", seeds=(0,), runs=runs, needs={"models/a": "volley model get a models/a"})
    with pytest.raises(ConfigError, match=r"needs models/a, which is not here \(volley model get a models/a\)"):
        list(trained("one", recipe, [0], tmp_path / "runs"))
    missing = records.digest(recipe)
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "models" / "a" / "config.json").write_text("{}", encoding="utf-8")
    assert records.digest(recipe) == missing


def test_one_seed_has_no_interval_over_seeds() -> None:
    recipe = records.load("frozen_lake")
    summary = replace(records.read("frozen_lake"), runs=(run(),), results=records.results([run()]))
    assert "evaluation alone" in pages.figures(recipe.model_copy(update={"seeds": (0,)}), summary)
    assert "evaluation alone" not in pages.figures(recipe, summary)


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
        given = parse_arguments(arguments)
        overrides = [one for one in arguments if re.match(r"[\w.]+=", one) and "@latest" not in one]
        if "--data" in arguments:
            overrides += ["model.path=m", "data.env=none"]
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
