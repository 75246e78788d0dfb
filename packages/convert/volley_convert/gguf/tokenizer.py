"""Tokenizer of a GGUF file: byte-level BPE ("gpt2"), or SentencePiece's BPE ("llama")."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import generate_merges

from shared.errors import ConfigError
from shared.models.tokenizer_classes import QWEN2_WORDS
from volley_convert.gguf.metadata import Metadata

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens; those of other types are found by merges or stand for a byte."""
_LLAMA3_WORDS = QWEN2_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_WORDS: dict[str, Any] = {
    "default": None,
    "gpt-2": None,
    "smollm": pre_tokenizers.Digits(individual_digits=True),
    **dict.fromkeys(_QWEN2, pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")),
    **dict.fromkeys(_LLAMA3, pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated")),
}
"""Cut of a text into words, by `tokenizer.ggml.pre`; None: GPT-2's, which the byte level has."""
_SPACE = "▁"


def tokenizer_of(metadata: Metadata) -> Tokenizer:
    """Make the tokenizer. Raises ConfigError for one of another kind."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens: list[str] = metadata.of("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if kind == "llama":
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        tokenizer = _sentencepiece(metadata, tokens)
    elif kind == "gpt2" and pre in _WORDS:
        tokenizer = _byte_level(metadata, tokens, pre)
    else:
        raise ConfigError(
            f"{metadata.file}: its tokenizer is of the kind {kind!r}, {pre!r}",
            f"converted are llama, and gpt2 with {', '.join(_WORDS)}",
        )
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if _is_added(token, kind)]
    tokenizer.add_tokens([AddedToken(token, special=kind != _USER_DEFINED, normalized=False) for token, kind in added])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _LLAMA3):
        first = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, bos)]
        )
    return tokenizer


def _is_added(token: str, kind: int) -> bool:
    """True for a token that is cut out of a text first. Runs of spaces are made by merges, as in Gemma's own files."""
    return kind in (_UNKNOWN, _CONTROL) or (kind == _USER_DEFINED and bool(token.strip(_SPACE)))


def _byte_level(metadata: Metadata, tokens: list[str], pre: str) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.of("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _LLAMA3))
    words = _WORDS[pre]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None or pre == "smollm")
    tokenizer.pre_tokenizer = level if words is None else pre_tokenizers.Sequence([words, level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """Merge the pairs whose token has the highest score first, as SentencePiece does."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = zip(tokens, metadata.of("tokenizer.ggml.scores"), strict=True)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = generate_merges(vocabulary, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces, text = normalizers.Replace(" ", _SPACE), [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        tokenizer.decoder = decoders.Sequence([*text, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence([*text, decoders.Fuse()])
    return tokenizer
