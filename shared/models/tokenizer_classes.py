"""Classes of transformers 5 that take only vocabulary and merges from a tokenizer.json, and rebuild the rest.

Volley reads tokenizer.json as it is, as transformers 4 does. If `AutoTokenizer` of transformers 5 picks one of these
classes, its token ids may differ: `replaced` names the parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from shared.models.families import families

GENERIC = "PreTrainedTokenizerFast"
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")  # without "Fast"
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_STEPS = ("normalizers", "pretokenizers", "decoders")
_OFF = ("ignore_merges", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
"""Settings of BPE that no class keeps."""
_END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """One class.

    Attributes:
        name: without "Fast".
        special: special tokens if the files name none; None for an unknown class.
        parts: function from tokenizer_config.json to normalizer, pre_tokenizer and decoder; None: all are kept.
        pieces: tokens are SentencePiece's, and unknown letters become bytes.
        plain: special tokens never absorb neighbouring spaces, whatever the files say.
    """

    name: str
    special: Mapping[str, str | None] | None
    parts: Callable[[Mapping[str, Any]], tuple[Any, Any, Any]] | None = None
    pieces: bool = False
    plain: bool = False


def _qwen2(settings: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    words = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")), use_regex=False)
    return normalizers.NFC(), pre_tokenizers.Sequence([words, level]), decoders.ByteLevel()


def _gpt2(settings: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    level = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    return None, level, decoders.ByteLevel()


def _llama(settings: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    space = settings.get("add_prefix_space") in (None, True)
    scheme = "never" if not space else "always" if settings.get("legacy") else "first"
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    written = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    return None, pre_tokenizers.Metaspace("▁", scheme, split=False), decoders.Sequence(written)


def _gemma(_: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    written = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    words = pre_tokenizers.Split(" ", "merged_with_previous")
    return normalizers.Replace(" ", "▁"), words, decoders.Sequence(written)


_CLASSES = {
    one.name: one
    for one in (
        TokenizerClass(GENERIC, {}),
        TokenizerClass(
            "Qwen2Tokenizer",
            {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END},
            _qwen2,
            plain=True,
        ),
        TokenizerClass(
            "GPT2Tokenizer", {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}, _gpt2
        ),
        TokenizerClass(
            "LlamaTokenizer", {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, _llama, pieces=True
        ),
        TokenizerClass(
            "GemmaTokenizer",
            {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
            _gemma,
            pieces=True,
        ),
    )
}


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any] | None) -> TokenizerClass:
    """Find the class that AutoTokenizer picks, from tokenizer_config.json and config.json (None: no such file)."""
    described = config or {}
    family = families().get(str(described.get("model_type")))
    own = family.tokenizer if family else "" if described.get("model_type") else GENERIC
    named = settings.get("tokenizer_class") or described.get("tokenizer_class")
    if family and family.forces_tokenizer and "auto_map" not in settings:
        named = own
    name = str(named or own).removesuffix("Fast")
    name = GENERIC if name in _GENERIC else name
    return _CLASSES.get(name) or TokenizerClass(name, None)


def replaced(tokenizer: Tokenizer, picked: TokenizerClass, settings: Mapping[str, Any]) -> list[str]:
    """Name the parts of a tokenizer.json that the class rebuilds differently."""
    if picked.parts is None:
        return []
    names = ("normalizer", "pre_tokenizer", "decoder")
    made = zip(names, picked.parts(settings), strict=True)
    found = [name for name, part in made if _steps(getattr(tokenizer, name)) != _steps(part)]
    model: Any = tokenizer.model
    if type(model).__name__ != "BPE" or model.byte_fallback != picked.pieces or any(map(model.__getattribute__, _OFF)):
        found.append("model")
    kept = settings.get("added_tokens_decoder")
    if isinstance(kept, dict) and _normalized(tokenizer) - _given(kept):
        found.append("added_tokens")
    return found


def _normalized(tokenizer: Tokenizer) -> set[tuple[Any, Any]]:
    return {(token.content, token.normalized) for token in tokenizer.get_added_tokens_decoder().values()}


def _given(tokens: Mapping[str, Any]) -> set[tuple[Any, Any]]:
    """Same pairs from added_tokens_decoder, with the default of an AddedToken."""
    known = [one for one in tokens.values() if isinstance(one, dict)]
    return {(str(one.get("content")), one.get("normalized", not one.get("special"))) for one in known}


def prefix_space(tokenizer: Tokenizer) -> bool | None:
    """True if a tokenizer.json puts a space before a text; None if it has no step that can."""
    steps = [*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)]
    found = [
        step.get("add_prefix_space", step.get("prepend_scheme") != "never")
        for step in steps
        if step["type"] in ("ByteLevel", "Metaspace", "Prepend")
    ]
    return any(found) if found else None


def _steps(part: Any) -> list[dict[str, Any]]:
    """List the steps of a tokenizer's part, without settings that change neither ids nor text."""
    steps = [] if part is None else _flat(json.loads(part.__getstate__()))
    return [{"type": one["type"]} if _is_level(one, part) else one for one in steps]


def _is_level(step: Mapping[str, Any], part: Any) -> bool:
    """True for the byte-level decoder, which has the settings of the pre-tokenizer but uses none."""
    return step["type"] == "ByteLevel" and isinstance(part, decoders.Decoder)


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] == "Sequence":
        inner = next(step[key] for key in _STEPS if key in step)
        return [one for each in inner for one in _flat(each)]
    return [{key: value for key, value in step.items() if key != "trim_offsets"}]
