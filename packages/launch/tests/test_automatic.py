"""Values that Volley chooses where a configuration leaves them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.config import LoadedConfig, load
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.run.folder import RunFolder
from tests.support.large_models import QWEN3_4B, SMOLLM2
from volley import choices
from volley.local.preflight import prepared
from volley.runs.record import claimed
from volley_commands.configuration import sources
from volley_launch.planning import automatic
from volley_launch.planning.automatic import PromptLengths
from volley_launch.planning.devices import parse
from volley_launch.planning.evaluation import PlannedDevices, evaluate

GIVEN = ("model.path=m", "data.env=frozen_lake", "orchestrator.max_turns=1")
PROMPTS = PromptLengths(n=40, longest=120)
QWEN2_HALF = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
QUICKSTART = orjson.loads(Path("configs/models/quickstart/config.json").read_bytes())
MODELS = {"smollm2": SMOLLM2, "qwen2-0.5b": QWEN2_HALF, "quickstart": QUICKSTART, "qwen3-4b": QWEN3_4B}


def devices(text: str) -> PlannedDevices:
    here = parse(text, "cpu")
    return PlannedDevices(here, here, is_shared=text == "h100:1")


def fitted(model: Any, machine: str, *overrides: str, prompts: PromptLengths | None = PROMPTS) -> LoadedConfig:
    return automatic.fit(
        load([], [*GIVEN, *overrides]),
        ModelConfig.parse(dict(model)),
        prompts,
        None if not machine else devices(machine),
    )


@pytest.mark.parametrize("machine", ["cpu=16GiB", "cpu=24GiB", "cpu=64GiB"])
def test_smollm2_fits_with_its_data_and_nothing_else(machine: str) -> None:
    loaded = fitted(SMOLLM2, machine)
    config = loaded.config
    assert (config.rollout.engine.context_length, config.grpo_config.max_response_length) == (384, 256)
    assert config.trainer.length_buckets == (256, 384)
    assert evaluate(config, ModelConfig.parse(dict(SMOLLM2)), devices(machine)).problems == {}
    assert "the longest of 40 prompts has 120 tokens" in loaded.choices["rollout.engine.context_length"]
    assert choices.lines(loaded)[0].startswith("grpo_config.max_response_length=256: ")


def test_batches_shrink_with_the_memory_and_never_grow_above_the_defaults() -> None:
    rows = [fitted(SMOLLM2, f"cpu={n}GiB").config.trainer.train_micro_batch_size or 64 for n in (12, 16, 24, 200)]
    assert rows == sorted(rows)
    assert rows[0] < rows[-1] == 64


@pytest.mark.parametrize(
    ("name", "machine", "rows"),
    [
        ("smollm2", "cpu=16GiB", 4),
        ("smollm2", "cpu=24GiB", 16),
        ("smollm2", "h100:1", None),
        ("smollm2", "v5e:8", 32),
        ("qwen2-0.5b", "h100:1", None),
        ("qwen2-0.5b", "v5e:8", 4),
        ("quickstart", "cpu=16GiB", None),
        ("quickstart", "v5e:8", None),
    ],
)
def test_models_fit_on_these_machines(name: str, machine: str, rows: int | None) -> None:
    here, model = devices(machine), ModelConfig.parse(dict(MODELS[name]))
    platform = here.trainer.type.platform
    given = () if platform == "cpu" else (f"rollout.engine.device={platform}", "model.dtype=bfloat16")
    loaded = automatic.fit(load([], [*GIVEN, *given]), model, PROMPTS, here)
    assert evaluate(loaded.config, model, here).problems == {}
    assert automatic.shortages(loaded, model, here) == {}
    assert loaded.config.trainer.train_micro_batch_size == rows


@pytest.mark.parametrize(
    ("name", "machine"),
    [("qwen2-0.5b", "cpu=16GiB"), ("qwen2-0.5b", "cpu=24GiB"), ("qwen3-4b", "h100:1"), ("qwen3-4b", "v5e:8")],
)
def test_two_settings_that_help_are_named_where_nothing_fits(name: str, machine: str) -> None:
    here, model = devices(machine), ModelConfig.parse(dict(MODELS[name]))
    platform = here.trainer.type.platform
    given = () if platform == "cpu" else (f"rollout.engine.device={platform}", "model.dtype=bfloat16")
    loaded = automatic.fit(load([], [*GIVEN, *given]), model, PROMPTS, here)
    error = automatic.shortages(loaded, model, here)["training"]
    for way in (error.hint or "").split(" or "):
        settings = way.split(" with ")
        assert 1 <= len(settings) <= 2
        changed = automatic.fit(load([], [*GIVEN, *given, *settings]), model, PROMPTS, here)
        assert "training" not in evaluate(changed.config, model, here).problems


def test_a_run_without_memory_is_refused_before_it_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Path("configs/models/tiny").absolute()
    asked = [f"model.path={tiny}", "model.initial_weights=random", f"run.dir={tmp_path / 'runs'}", *GIVEN[1:]]
    few, most = devices("cpu=10MiB"), devices("cpu=64GiB")
    monkeypatch.setattr(automatic, "_devices", lambda run: few)
    with pytest.raises(ConfigError, match=r"training takes .* has 10\.00 MiB"):
        prepared(load([], asked))
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(automatic, "_devices", lambda run: most)
    assert prepared(load([], asked))[1] == tiny


def test_a_run_that_fits_nowhere_keeps_the_defaults() -> None:
    loaded = fitted(QWEN3_4B, "cpu=16GiB")
    assert not {"trainer.train_micro_batch_size", "model.remat"} & loaded.choices.keys()


@pytest.mark.parametrize(
    "given",
    [
        "trainer.train_micro_batch_size=64",
        "trainer.micro_batch_tokens=4096",
        "rollout.engine.context_length=200",
        "grpo_config.max_response_length=20",
        "trainer.length_buckets=[512]",
        "rollout.engine.device=cpu",
    ],
)
def test_a_given_value_is_kept(given: str) -> None:
    key, _, value = given.partition("=")
    loaded = fitted(SMOLLM2, "cpu=12GiB", given)
    assert key not in loaded.choices
    asked: Any = loaded.config
    for part in key.split("."):
        asked = getattr(asked, part)
    assert str(list(asked) if isinstance(asked, tuple) else asked) == value


def test_several_turns_take_more_context_up_to_the_models() -> None:
    assert fitted(SMOLLM2, "", "orchestrator.max_turns=4").config.rollout.engine.context_length == 1536
    short = {**SMOLLM2, "max_position_embeddings": 512}
    config = fitted(short, "", "orchestrator.max_turns=4").config
    assert (config.rollout.engine.context_length, config.trainer.length_buckets) == (512, (256, 512))


def test_prompts_longer_than_the_model_reads_are_refused() -> None:
    with pytest.raises(ConfigError, match="the longest prompt has 3000 tokens, and the model reads at most 2048"):
        fitted(SMOLLM2, "", prompts=PromptLengths(1, 3000))
    with pytest.raises(ConfigError, match=r"120 tokens, and rollout\.engine\.context_length=100"):
        fitted(SMOLLM2, "", "rollout.engine.context_length=100")


@pytest.mark.parametrize(
    ("given", "context", "buckets"),
    [
        ([], 512, (256, 512)),
        (["rollout.engine.context_length=3000"], 3000, (256, 512, 1024, 2048, 3000)),
        (["rollout.engine.context_length=100"], 100, (100,)),
        (["trainer.length_buckets=[128,64]"], 128, (128, 64)),
        (["trainer.length_buckets=[4096]"], 512, (4096,)),
        (["mode=sft", "rollout.engine.context_length=100"], 100, (256, 512, 1024, 2048, 4096)),
    ],
)
def test_row_lengths_and_context_follow_each_other(given: list[str], context: int, buckets: tuple[int, ...]) -> None:
    config = load([], [*GIVEN, *given]).config
    assert (config.rollout.engine.context_length, config.trainer.length_buckets) == (context, buckets)


def test_a_run_keeps_what_was_chosen_at_its_start(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{path: configs/models/tiny, initial_weights: random}}\nrun: {{dir: {tmp_path}}}\n", encoding="utf-8"
    )
    tiny = ModelConfig.read(Path("configs/models/tiny"))
    first = automatic.fit(load([config], [*GIVEN[1:]]), tiny, PromptLengths(3, 20), devices("cpu=64GiB"))
    with claimed(first) as claim:
        choices.record(first, claim.folder)
    again = automatic.fit(load([config], [*GIVEN[1:]]), tiny, PromptLengths(3, 300), devices("cpu=64GiB"))
    assert again.config.rollout.engine == first.config.rollout.engine
    assert again.choices == {}
    with pytest.raises(ConfigError, match=r"the longest prompt has 9999 tokens.*or choose another run\.name: "):
        automatic.fit(load([config], [*GIVEN[1:]]), tiny, PromptLengths(3, 9999), devices("cpu=64GiB"))
    folder = str(claim.folder.path)
    shown = sources(load([claim.folder.config], []), [folder], [])
    assert shown["rollout.engine.context_length"]["source"].startswith("chosen: the longest of 3 prompts")
    own = sources(load([config], GIVEN[1:]), [str(config)], GIVEN[1:])
    assert own["rollout.engine.context_length"]["source"] == "default"


def test_reasons_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert choices.reasons(folder) == {}
    folder.choices.write_bytes(b"[1")
    assert choices.reasons(folder) == {}
    folder.choices.write_bytes(orjson.dumps([1]))
    assert choices.reasons(folder) == {}


def test_own_data_is_packed_into_one_shape_on_cpus() -> None:
    model = ModelConfig.parse(dict(SMOLLM2))
    trainer = automatic.fit(load([], GIVEN), model, PROMPTS, devices("cpu=24GiB"), packs=True).config.trainer
    assert (trainer.length_buckets, trainer.micro_batch_tokens, trainer.train_micro_batch_size) == ((512,), 512, None)
    given = load([], [*GIVEN, "trainer.train_micro_batch_size=2"])
    assert (
        automatic.fit(given, model, PROMPTS, devices("cpu=24GiB"), packs=True).config.trainer.micro_batch_tokens is None
    )
