"""An exported folder, as the installed transformers reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from packages.convert.tests.trainer.test_export import make_run
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from tests.support import families
from tests.support.tokenizer import FOLDER as TOKENIZER
from volley_convert import export

TEXTS = (
    "It's 12345 o'clock,  isn't it?\n\n\tCafé Café <answer>Right || Down</answer>",
    "<|im_start|>user\n_O_\nX12<|im_end|>\n",
    "你好 🙂 ▁x</s>",
)
TURNS = [{"role": "user", "content": "How  many?\n"}, {"role": "assistant", "content": "17"}]
TURNS += [{"role": "user", "content": "Sure?"}]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "description": "Größe <b>", "parameters": {"type": "object"}}}


def exported(folder: Path, name: str, **settings: Any) -> tuple[Path, dict[str, Any]]:
    """A run of the family with settings of its tokenizer beside the committed ones, as a folder."""
    case = families.case(name)
    make_run(folder, case, np.float32)
    change(folder / "model" / "tokenizer_config.json", **settings)
    return folder / "out", export.export(folder / "run", folder / "out", "latest")


def change(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(found | values), encoding="utf-8")


def assert_read_alike(folder: Path, theirs: Any) -> None:
    ours = ChatTokenizer(folder)
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    found = theirs.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert found == ours.encode(theirs.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False))
    for turns, tools in ((TURNS[:1], ()), (TURNS, ()), (TURNS, (TOOL,)), ([SYSTEM, *TURNS], (TOOL,))):
        options = {"tools": tools or None, "add_generation_prompt": True, "return_dict": False}
        assert theirs.apply_chat_template(turns, **options) == ours.render_prompt(turns, tools)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)


@pytest.mark.parametrize("name", [name for name in families.NAMES if not name.startswith("qwen2")])
@pytest.mark.parametrize("tokenizer_class", [None, "Qwen2Tokenizer", "LlamaTokenizerFast", "GPT2Tokenizer"])
def test_token_ids_are_the_same(name: str, tokenizer_class: str | None, tmp_path: Path) -> None:
    folder, told = exported(tmp_path, name, tokenizer_class=tokenizer_class)
    assert "warning" not in told
    assert_read_alike(folder, AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("tokenizer_class", "bos"), [(None, None), ("GPT2Tokenizer", "<|endoftext|>"), ("Qwen2Tokenizer", None)]
)
def test_special_tokens_of_the_tokenizers_class_are_written(
    tokenizer_class: str | None, bos: str | None, tmp_path: Path
) -> None:
    """The exported tokenizer has another class, and its template reads the same tokens."""
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    folder, told = exported(tmp_path, "llama-tied", tokenizer_class=tokenizer_class, chat_template=template)
    assert "warning" not in told
    theirs = AutoTokenizer.from_pretrained(folder)
    assert_read_alike(folder, theirs)
    assert theirs.bos_token == bos
    first = TURNS[:1]
    assert ChatTokenizer(folder).render_prompt(first) == ChatTokenizer(tmp_path / "model").render_prompt(first)


@pytest.mark.parametrize(
    ("template", "asked"),
    [
        ("{{ strftime_now('%H:%M:%S') }}", "user"),  # Volley writes the date alone
        ("{% if tools %}{{ strftime_now('%H:%M:%S') }}{% endif %}", "user with tools"),
        ("{% if messages[0].role == 'system' %}{{ strftime_now('%H:%M:%S') }}{% endif %}", "system, user"),
        ("{{ strftime_now('%Y-%m-%d') }}", None),
        ("{{ raise_exception('no') if messages[0].role == 'system' }}", None),
    ],
)
def test_a_template_that_transformers_renders_otherwise_is_named(
    template: str, asked: str | None, tmp_path: Path
) -> None:
    turns = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    _, told = exported(tmp_path, "llama-tied", chat_template=template + turns)
    assert (asked is None and "warning" not in told) or f"conversation of {asked}" in told["warning"]


@pytest.mark.parametrize("name", families.NAMES)
def test_the_model_is_the_same(name: str, tmp_path: Path) -> None:
    """The configuration is that of the fixture, whose log-probabilities transformers has computed."""
    folder, _ = exported(tmp_path, name)
    (tmp_path / "fixture").mkdir()
    shutil.copy(families.FOLDER / name / "config.json", tmp_path / "fixture")
    theirs, fixture = (AutoConfig.from_pretrained(path).to_dict() for path in (folder, tmp_path / "fixture"))
    spelled = ("architectures", "eos_token_id", "pad_token_id", "dtype", "transformers_version", "_name_or_path")
    for key in (*spelled, "torch_dtype"):
        theirs.pop(key, None)
        fixture.pop(key, None)
    assert {key: theirs.get(key) for key in fixture} == fixture
    ours = ChatTokenizer(folder)
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == sorted({*ModelConfig.read(folder).eos_token_ids, ours.eos_id})
    assert (generation.pad_token_id, generation.bos_token_id) == (ours.pad_id, 1)


def test_qwen2_is_read_alike_where_its_tokenizer_is_qwens(tmp_path: Path) -> None:
    """transformers 5 reads no other one of this model_type as it is, which the export says."""
    folder, told = exported(tmp_path, "qwen2")
    assert "as Qwen2Tokenizer, which gives other token ids" in told["warning"]
    assert_read_alike(folder, PreTrainedTokenizerFast.from_pretrained(folder))
    model = tmp_path / "model"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(model / "tokenizer.json"))
    told = export.export(tmp_path / "run", tmp_path / "second", "latest")
    assert "warning" not in told
    assert_read_alike(tmp_path / "second", AutoTokenizer.from_pretrained(tmp_path / "second"))


def test_settings_of_the_model_that_volley_does_not_use_are_left_out(tmp_path: Path) -> None:
    case = families.case("llama-tied")
    make_run(tmp_path, case, np.float32)
    model, out = tmp_path / "model", tmp_path / "out"
    change(model / "generation_config.json", eos_token_id=[2, 5], repetition_penalty=1.5, do_sample=True, top_k=1)
    change(model / "adapter_config.json", base_model_name_or_path="other")
    change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Y", None]})
    assert "warning" not in export.export(tmp_path / "run", out, "latest")
    generation = GenerationConfig.from_pretrained(out)
    assert generation.repetition_penalty in (None, 1.0)
    assert not generation.do_sample
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["tiny", "quickstart"])
def test_committed_models_are_read_alike(name: str) -> None:
    folder = TOKENIZER.parent / name
    assert_read_alike(folder, AutoTokenizer.from_pretrained(folder))
