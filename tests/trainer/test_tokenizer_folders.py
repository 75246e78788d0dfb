"""Folders of tokenizers give the ids of transformers' AutoTokenizer, or the difference is noted or refused at start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from shared.errors import ConfigError
from shared.models.chat import ChatTokenizer
from tests.support.templates import change_json, write_json
from tests.support.tokenizer_folders import FORMS, folder, made

transformers.logging.set_verbosity_error()
TEXTS = (
    "It's 12345 o'clock,  isn't it?\n\n\tCafé Cafe\u0301 Right || Down",
    "HELLO World .  , don 't",
    "<|im_start|>user\n_O_\nX12<|im_end|>\nthe <s> x</s>y",
    "你好 🙂 ▁x",
    " lead",
    "a<new>b <two> c, whether weather wet hether",
    "a <unk> <bos> <eos> <mask>",
)
TURNS = [{"role": "user", "content": "How  many?\n"}, {"role": "assistant", "content": "17"}]
TURNS += [{"role": "user", "content": "<new> whether"}]
OWN = {"Qwen2Tokenizer": "qwen", "GPT2Tokenizer": "gpt2", "LlamaTokenizer": "metaspace", "GemmaTokenizer": "gemma"}
"""Form that each class makes."""
UNKNOWN, NO_BOS = "NoSuchTokenizer", {"bos_token": None}
CLASSES = (
    None,
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    UNKNOWN,
    "Qwen2TokenizerFast",
    "LlamaTokenizerFast",
    *OWN,
)


def is_read_alike(path: Path, ours: ChatTokenizer) -> bool:
    theirs: Any = transformers.AutoTokenizer.from_pretrained(path)
    ids = [ours.encode(text) for text in TEXTS]
    return (
        ids == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
        and [*map(ours.decode, ids)] == [*map(theirs.decode, ids)]
        and theirs.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
        == ours.render_prompt(TURNS)
        and (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    )


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_that_reads_tokenizer_json_otherwise_is_noted(name: str | None, model_type: str | None, tmp_path: Path):
    for form in FORMS:
        path = folder(tmp_path / form, form, model_type, tokenizer_class=name, **NO_BOS if name == UNKNOWN else {})
        tokenizer = ChatTokenizer(path)
        alike = is_read_alike(path, tokenizer)
        assert alike or tokenizer.note, form
        picked = type(transformers.AutoTokenizer.from_pretrained(path)).__name__
        if picked == "TokenizersBackend":
            assert alike, form
            assert name == UNKNOWN or tokenizer.note is None, form
        else:
            assert (tokenizer.note is None) == (OWN[picked] == form), form
            assert tokenizer.note is None or picked in tokenizer.note


@pytest.mark.parametrize(
    ("form", "picked", "model_type", "noted"),
    [
        ("qwen", "Qwen2Tokenizer", "qwen2", False),
        ("qwen", "Qwen2Tokenizer", "qwen3", False),
        ("llama3", "PreTrainedTokenizerFast", "llama", False),
        ("gemma", "GemmaTokenizer", "gemma2", False),
        ("smollm2", "GPT2Tokenizer", "llama", True),  # digits one by one
        ("llama2", "LlamaTokenizer", "llama", True),  # a space after each special token
        ("llama3", "LlamaTokenizerFast", "llama", True),  # DeepSeek's distillations
        ("qwen", "LlamaTokenizerFast", "qwen2", False),
    ],
)
def test_published_models_are_read_as_their_authors_did(
    form: str, picked: str, model_type: str, noted: bool, tmp_path: Path
):
    path = folder(tmp_path / "model", form, model_type, tokenizer_class=picked)
    tokenizer = ChatTokenizer(path)
    assert bool(tokenizer.note) == noted
    for text in TEXTS:
        assert tokenizer.encode(text) == made(form).encode(text, add_special_tokens=False).ids


def token(text: str, **flags: bool) -> dict[str, Any]:
    known = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": text, **known, **flags}


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"add_prefix_space {value}": ({"add_prefix_space": value}, {}) for value in (True, False)},
    **{f"legacy {value}": ({"legacy": value}, {}) for value in (True, False)},
    "legacy, no space": ({"legacy": True, "add_prefix_space": False}, {}),
    "add_bos_token": ({"add_bos_token": True, "add_eos_token": True}, {}),
    "do_lower_case": ({"do_lower_case": True}, {}),
    "clean_up_tokenization_spaces": ({"clean_up_tokenization_spaces": True}, {}),
    "split_special_tokens": ({"split_special_tokens": True}, {}),
    "model_max_length": ({"model_max_length": 3}, {}),
    "unk_token": ({"unk_token": "<unk>"}, {}),
    "no unk_token": ({"unk_token": None, "bos_token": None}, {}),
    "a new special token": ({"extra_special_tokens": ["<new>"]}, {}),
    "a known special token": ({"additional_special_tokens": ["<s>"]}, {}),
    "a special word that strips": (
        {"additional_special_tokens": [token("hether", lstrip=True) | {"__type": "AddedToken"}]},
        {},
    ),
    "a named word that strips": ({"cls_token": token("hether", lstrip=True) | {"__type": "AddedToken"}}, {}),
    "added_tokens_decoder, new": ({"added_tokens_decoder": {"900": token("<new>")}}, {}),
    "added_tokens_decoder, stripping": (
        {"added_tokens_decoder": {"8": token("<|im_start|>", lstrip=True, rstrip=True)}},
        {},
    ),
    "added_tokens_decoder, a word": ({"added_tokens_decoder": {"77": token("hether", special=False)}}, {}),
    "added_tokens_decoder, empty": ({"added_tokens_decoder": {}}, {}),
    "added_tokens.json, new": ({}, {"added_tokens.json": {"<new>": 700}}),
    "added_tokens.json, known": ({}, {"added_tokens.json": {"<|im_start|>": 8}}),
    "added_tokens.json, a word": ({}, {"added_tokens.json": {"hether": 77}}),
    "added_tokens.json, a special word": ({"cls_token": "hether"}, {"added_tokens.json": {"hether": 77}}),
    "added_tokens.json beside added_tokens_decoder": (
        {"added_tokens_decoder": {"8": token("<|im_start|>")}},
        {"added_tokens.json": {"<new>": 700}},
    ),
    "special_tokens_map.json": ({}, {"special_tokens_map.json": {"bos_token": token("hether")}}),
    "two kinds of special tokens": (
        {"extra_special_tokens": {"image": "<s>"}},
        {"special_tokens_map.json": {"additional_special_tokens": ["<new>"]}},
    ),
    "auto_map": ({"auto_map": {"AutoTokenizer": ["a.B", "a.C"]}}, {}),
    "vocab.json": ({}, {"vocab.json": {"a": 0}}),
}
SPACES = {
    **dict.fromkeys(("Qwen2Tokenizer", "GPT2Tokenizer"), ("add_prefix_space True",)),
    "LlamaTokenizer": ("add_prefix_space False", "legacy, no space"),
}
"""Settings that are not those of tokenizer.json."""
NEW = ("a new special token", "two kinds of special tokens", "added_tokens_decoder, new", "added_tokens.json, new")


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("picked", ["PreTrainedTokenizerFast", *OWN])
def test_settings_of_a_tokenizer_are_read_noted_or_refused(picked: str, name: str, tmp_path: Path):
    settings, files = SETTINGS[name]
    path = folder(tmp_path / "model", OWN.get(picked, "qwen"), tokenizer_class=picked, **settings)
    for file, content in files.items():
        write_json(path / file, content)
    if name in NEW or name in SPACES.get(picked, ()):
        with pytest.raises(ConfigError, match="<new>" if name in NEW else "add_prefix_space"):
            ChatTokenizer(path)
        return
    tokenizer = ChatTokenizer(path)
    assert tokenizer.note or is_read_alike(path, tokenizer)
    noted = name.startswith("added_tokens_decoder") or name.endswith("added_tokens_decoder") or "legacy T" in name
    noted |= picked == "Qwen2Tokenizer" and name.endswith("strips")
    assert noted or tokenizer.note is None


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_class_named_in_config_json_counts(model_type: str, tmp_path: Path):
    path = folder(tmp_path / "model", "gpt2", model_type)
    write_json(path / "config.json", {"model_type": model_type, "tokenizer_class": "GPT2Tokenizer"})
    tokenizer = ChatTokenizer(path)
    assert (tokenizer.note is None) == is_read_alike(path, tokenizer) == (model_type == "qwen3")


def test_a_class_that_is_not_known_is_noted(tmp_path: Path):
    path = folder(tmp_path / "model", "gpt2", tokenizer_class="BertTokenizer", bos_token=None)
    assert "as BertTokenizer" in str(ChatTokenizer(path).note)


@pytest.mark.parametrize("picked", ["PreTrainedTokenizerFast", *OWN])
@pytest.mark.parametrize("key", ["bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "sep_token"])
def test_a_template_reads_the_special_tokens_of_the_class(picked: str, key: str, tmp_path: Path):
    template = "[{{ " + key + " }}]{% if " + key + " is defined %}!{% endif %}{{ messages[0].content }}"
    for given in ({}, {key: None}, {key: "<s>"}):
        path = folder(tmp_path / f"{len(given)}{given.get(key)}", OWN.get(picked, "qwen"), tokenizer_class=picked)
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings.pop(key, None)
        write_json(path / "tokenizer_config.json", settings | given | {"chat_template": template})
        theirs: Any = transformers.AutoTokenizer.from_pretrained(path)
        if theirs.eos_token is None:
            with pytest.raises(ConfigError, match="names no eos_token"):
                ChatTokenizer(path)
            continue
        ours = ChatTokenizer(path)
        expected = theirs.apply_chat_template(TURNS[:1], tokenize=False)
        assert ours.decode(ours.render_prompt(TURNS[:1])) == theirs.decode(theirs.encode(expected)), given
        assert ours.decode(ours.render_prompt(TURNS[:1])) == expected or picked == "LlamaTokenizer", given


def test_a_default_that_is_no_token_is_refused_where_the_template_reads_it(tmp_path: Path):
    path = folder(tmp_path / "model", "gpt2", tokenizer_class="GPT2Tokenizer")
    text = (path / "tokenizer.json").read_text(encoding="utf-8").replace("<|endoftext|>", "<|end_of_text|>")
    (path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="the chat template reads bos_token"):
        ChatTokenizer(path)
    change_json(path / "tokenizer_config.json", bos_token=None)
    assert "added_tokens" in str(ChatTokenizer(path).note)
