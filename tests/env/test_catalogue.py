import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.env.app import open_catalogue, open_extension, try_out_all
from services.env.catalogue import MAX_VARIANTS, Catalogue, CatalogueEntry
from services.env.environments.games import layouts
from services.env.environments.kinds import kinds
from services.env.episode_types import Environment
from services.env.settings import MAX_BODY, EnvSettings, from_config
from services.env.threads import ThreadRunner
from shared.config import load, validate
from shared.environments import built_in, datasets
from shared.errors import ConfigError, Conflict, Forbidden, InputError, NotFound, Unavailable
from tests.support.committed import CONFIGS, ROOT

RUNNER = ThreadRunner(2, 60.0, max_waiting=8)


def register(catalogue: Catalogue, name: str, base: str, config: dict[str, Any]) -> tuple[CatalogueEntry, bool]:
    return asyncio.run(catalogue.register(name, base, config))


def opened(chosen: EnvSettings) -> Catalogue:
    """The catalogue of a service that starts."""
    catalogue = open_catalogue(chosen, RUNNER, open_extension(chosen, RUNNER))
    try_out_all(chosen, catalogue)
    return catalogue


def environment(catalogue: Catalogue, name: str) -> Environment:
    backend = catalogue.built_in(name)
    assert backend is not None
    return backend.environment


def test_an_unknown_environment_is_answered_with_those_there_are() -> None:
    with pytest.raises(NotFound, match=r"'maze'.*frozen_lake, blocksworld, gymnasium"):
        Catalogue(RUNNER).get("maze")


def test_a_run_s_environments_are_known_without_the_service() -> None:
    assert kinds().keys() == built_in()
    assert {name for name, kind in kinds().items() if "train" in kind.private} == datasets()


def test_a_variant_changes_some_settings_of_its_base() -> None:
    catalogue = Catalogue(RUNNER, {"frozen_lake": {"render": "spaced"}})
    entry, new = register(catalogue, "lake8", "frozen_lake", {"size": 8, "max_actions": 20})
    assert new
    assert catalogue.get("lake8") is entry
    assert entry.describe()["config"].items() >= {"size": 8, "max_actions": 20, "render": "spaced"}.items()
    smaller, _ = register(catalogue, "lake5", "lake8", {"size": 5})
    assert smaller.describe()["config"].items() >= {"size": 5, "max_actions": 20}.items()
    assert smaller.kind == "frozen_lake"


def test_registering_again_changes_nothing_and_otherwise_conflicts() -> None:
    catalogue = Catalogue(RUNNER)
    first, _ = register(catalogue, "a", "sokoban", {"num_boxes": 2})
    again, new = register(catalogue, "a", "sokoban", {"num_boxes": 2})
    assert again is first
    assert not new
    for base, config in (("sokoban", {}), ("frozen_lake", {})):
        with pytest.raises(Conflict):
            register(catalogue, "a", base, config)
    with pytest.raises(Conflict):
        register(catalogue, "sokoban", "sokoban", {"num_boxes": 2})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sizes": 8}, "unknown setting sizes .*size"),
        ({"size": 99}, "size=99"),
        ({"size": 9}, "size=9 needs at least 16 actions"),
        ({"size": "big"}, "size='big'"),
        ({"render": "ascii"}, "render='ascii'"),
    ],
)
def test_bad_settings_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        register(Catalogue(RUNNER), "a", "frozen_lake", config)


@pytest.mark.parametrize("name", ["", "a b", "../a", "é", "x" * 65, "-a"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="not a name"):
        register(Catalogue(RUNNER), name, "frozen_lake", {})


def test_a_request_cannot_make_the_service_read_files(gsm8k_files: dict[str, Path]) -> None:
    catalogue = Catalogue(RUNNER, {"gsm8k": gsm8k_files})
    with pytest.raises(Forbidden, match="train"):
        register(catalogue, "a", "gsm8k", {"train": "/etc/passwd"})
    register(catalogue, "a", "gsm8k", {"tool": "calculator"})
    assert environment(catalogue, "a").num_tasks("train") == 2


def test_variants_are_bounded() -> None:
    catalogue = Catalogue(RUNNER)
    for i in range(MAX_VARIANTS):
        register(catalogue, f"v{i}", "frozen_lake", {})
    with pytest.raises(Unavailable):
        register(catalogue, "one-more", "frozen_lake", {})
    assert len(catalogue.entries()) == len(kinds()) + MAX_VARIANTS


def test_a_variant_whose_tasks_are_too_rare_is_refused_when_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MAX_EFFORT", layouts.MAX_EFFORT // 10)
    catalogue = Catalogue(RUNNER)
    rare = {"dim_room": (12, 12), "num_boxes": 4, "min_solution": 100, "max_turns": 100, "max_actions": 1000}
    with pytest.raises(InputError, match=r"sokoban found no layout for train task 0 in \d+ draws .*min_solution"):
        register(catalogue, "rare", "sokoban", rare)
    assert len(catalogue.entries()) == len(kinds())


def test_the_documents_know_how_many_variants_there_may_be() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert f"registered variants {MAX_VARIANTS}" in " ".join(
        (docs / "environment-api.md").read_text(encoding="utf-8").split()
    )
    assert f"register {MAX_VARIANTS} variants of environments" in " ".join(
        (docs / "security.md").read_text(encoding="utf-8").split()
    )


def settings(**data: Any) -> Any:
    return from_config(validate({"model": {"path": "m"}, "data": data}).config)


def test_the_runs_configuration_reaches_its_environment(gsm8k_files: dict[str, Path]) -> None:
    catalogue = opened(settings(env="gsm8k", env_config={"tool": "calculator"}, **gsm8k_files))
    assert environment(catalogue, "gsm8k").num_tasks("eval") == 1
    assert catalogue.get("gsm8k").describe()["config"]["tool"] == "calculator"


def test_a_mixture_configures_built_ins_and_names_variants_of_them() -> None:
    mixture = {
        "frozen_lake": 3,
        "sokoban": {"weight": 1, "env_config": {"spaced": True}},
        "small": {"base": "frozen_lake", "env_config": {"size": 3}},
    }
    catalogue = opened(settings(env="frozen_lake", env_config={"talk": "bare"}, mixture=mixture))
    configs = {name: catalogue.get(name).describe()["config"] for name in mixture}
    assert (configs["frozen_lake"]["size"], configs["small"]["size"], configs["sokoban"]["spaced"]) == (4, 3, True)
    assert (configs["frozen_lake"]["talk"], configs["small"]["talk"]) == ("bare", "bare")
    assert catalogue.get("small").describe()["weight"] == 0
    with pytest.raises(Conflict):
        register(catalogue, "small", "frozen_lake", {"size": 5})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"env": "frozen_lake", "mixture": {"maze": 1}}, "data.mixture.maze: there is no environment"),
        ({"env": "frozen_lake", "mixture": {"m": {"base": "maze"}}}, "data.mixture: there is no environment 'maze'"),
        ({"env": "frozen_lake", "mixture": {"a/b": {"base": "sokoban"}}}, "'a/b' is not a name"),
        ({"env": "frozen_lake", "mixture": {"sokoban": {"env_config": {"sise": 4}}}}, "unknown setting sise"),
        ({"env": "frozen_lake", "mixture": {"gsm8k": 1}}, "gsm8k has no data"),
        ({"env": "maze"}, "data.env=maze: there is no environment"),
        ({"env": "frozen_lake", "env_config": {"sise": 4}}, "unknown setting sise"),
        (
            {"env": "frozen_lake", "env_config": {"size": 8}},
            "size=8 needs at least 14 actions, but an episode allows 10",
        ),
        ({"env": "gsm8k"}, "gsm8k has no data"),
        ({"env": "gsm8k", "train": "/nowhere.jsonl"}, "data file /nowhere.jsonl: No such file"),
        ({"env": "sokoban", "env_config": {"dim_room": [4, 4]}}, "no room for num_boxes=1"),
    ],
)
def test_a_wrong_configuration_ends_the_start(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(settings(**data))


OF_CATALOGUE = [path for path in CONFIGS if not load([path], ["data.train=t", "data.eval=e"]).config.data.sources]


@pytest.mark.parametrize("path", OF_CATALOGUE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_committed_configuration_opens_its_environment(path: Path, gsm8k_files: dict[str, Path]) -> None:
    loaded = load([path], [f"data.{split}={file}" for split, file in gsm8k_files.items()])
    catalogue = opened(from_config(loaded.config))
    shown = environment(catalogue, loaded.config.data.env).demonstration("train", 0)
    assert shown.messages[-1]["role"] == "assistant"


def test_a_body_is_no_larger_than_a_message_needs() -> None:
    assert settings(env="frozen_lake").limits.max_body_bytes == MAX_BODY
