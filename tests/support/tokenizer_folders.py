"""Small tokenizers in the forms of published ones, trained in a moment, and model folders that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.templates import write_json

CORPUS = (
    "How many are 3 x 17? It's 12345.678 or 1,000, I'm sure you'll see that it is so.",
    "The quick brown fox jumps over the lazy dog, and the dog thinks about the fox.",
    "def f(x):\n    return {'a': [x**2, -1.5e-3]}\n\n\nprint(f(2024))\n",
    "Café naïve größe 数学 你好 привет, weather and whether; hello hello world world.",
) * 4
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_level(*before: Any, regex: bool, normalizer: Any = None, ignore_merges: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    return _trained(made, pre_tokenizers.ByteLevel.alphabet(), [])


def _pieces(normalizer: Any, pre_tokenizer: Any, decoder: list[Any]) -> Tokenizer:
    """As converted from SentencePiece: spaces are ▁, unknown letters are bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *decoder])
    return _trained(made, [], [f"<0x{i:02X}>" for i in range(256)])


def _trained(made: Tokenizer, alphabet: list[str], byte_tokens: list[str]) -> Tokenizer:
    names = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    learner = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=[*names, *byte_tokens], show_progress=False
    )
    made.train_from_iterator(CORPUS, learner)
    said = json.loads(made.to_str())
    said["added_tokens"] = [one for one in said["added_tokens"] if one["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(said))


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


FORMS: Mapping[str, Callable[[], Tokenizer]] = {
    "qwen": lambda: _byte_level(_split(QWEN), regex=False, normalizer=normalizers.NFC()),
    "llama3": lambda: _byte_level(_split(LLAMA3), regex=False, ignore_merges=True),
    "gpt2": lambda: _byte_level(regex=True),
    "smollm2": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True), regex=True),
    "llama2": lambda: _pieces(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        [decoders.Strip(" ", 1, 0)],
    ),
    "metaspace": lambda: _pieces(
        None, pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False), [decoders.Strip(" ", 1, 0)]
    ),
    "gemma": lambda: _pieces(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), []),
}


@cache
def made(form: str) -> Tokenizer:
    return FORMS[form]()


def folder(to: Path, form: str, model_type: str | None = None, **settings: Any) -> Path:
    """A model folder with the tokenizer; settings of tokenizer_config.json."""
    to.mkdir(parents=True)
    made(form).save(str(to / "tokenizer.json"))
    known = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    write_json(to / "tokenizer_config.json", known | settings)
    if model_type is not None:
        write_json(to / "config.json", {"model_type": model_type})
    return to
