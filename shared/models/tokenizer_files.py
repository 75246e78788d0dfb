"""Tokenizer of a Hugging Face folder, with the settings that transformers applies to it.

tokenizer.json holds the tokenizer; tokenizer_config.json and special_tokens_map.json name special tokens and may change
flags of added tokens. Truncation and padding saved in tokenizer.json are off, because transformers resets both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from shared.errors import ConfigError
from shared.models.tokenizer_classes import TokenizerClass, class_of, prefix_space, replaced

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_FOLDER = "model.path must name a Hugging Face folder with a tokenizer"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Tokenizer and settings of a folder.

    Attributes:
        special: texts of the special tokens by name.
        end_ids: tokens that end a text, from config.json and generation_config.json.
        unnamed: special tokens that no file names, and whose default in the tokenizer's class is unknown or not in the
            vocabulary.
        note: a sentence if transformers 5 reads the folder differently.
    """

    tokenizer: Tokenizer
    settings: Mapping[str, Any]
    special: Mapping[str, str]
    end_ids: frozenset[int]
    unnamed: frozenset[str]
    note: str | None


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a folder. Raises ConfigError naming the file, and the token that it lacks."""
    settings = _object(folder / "tokenizer_config.json")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file} is missing", _FOLDER)
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises no other class
        raise ConfigError(f"{file} cannot be read as a tokenizer: {error}", _FOLDER) from error
    if settings.get("clean_up_tokenization_spaces") and type(tokenizer.model).__name__ != "BPE":
        raise ConfigError(
            f"{folder}/tokenizer_config.json: clean_up_tokenization_spaces removes spaces from the text of tokens",
            "set it to false, so that a text and its tokens stay the same",
        )
    config = _object(folder / "config.json") if (folder / "config.json").is_file() else None
    picked = class_of(settings, config)
    padding = tokenizer.padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
    parts = replaced(tokenizer, picked, settings)
    _check_space(tokenizer, picked, settings, folder)
    if "extra_special_tokens" in settings:
        settings.pop("additional_special_tokens", None)
    if "added_tokens_decoder" not in settings:
        settings |= _legacy(folder, tokenizer, settings)
    absent = _take_defaults(settings, picked, tokenizer)
    if padding:
        settings.setdefault("pad_token", padding["pad_token"])
    special = _special(settings)
    _add(tokenizer, settings, special, folder)
    ids = [_end_ids(folder / name) for name in ("config.json", "generation_config.json")]
    unnamed = frozenset(NAMES) - settings.keys() - special.keys() if picked.special is None else absent
    flagged = picked.plain and _flagged(tokenizer) & {*special.values(), *_extra(settings)}
    note = _note(folder, picked, [*parts, *["added_tokens"] * bool(absent or flagged)])
    return TokenizerFiles(tokenizer, settings, special, frozenset().union(*ids), unnamed, note)


def _take_defaults(settings: dict[str, Any], picked: TokenizerClass, tokenizer: Tokenizer) -> frozenset[str]:
    """Add the class's special tokens that no file names; return those that are not in the vocabulary."""
    missing = {name: text for name, text in (picked.special or {}).items() if name not in settings}
    absent = {name for name, text in missing.items() if text and tokenizer.token_to_id(text) is None}
    settings |= {name: text for name, text in missing.items() if name not in absent}
    return frozenset(absent)


def _check_space(tokenizer: Tokenizer, picked: TokenizerClass, settings: Mapping[str, Any], folder: Path) -> None:
    """Check that `add_prefix_space` agrees with tokenizer.json. Raises ConfigError."""
    asked, found = settings.get("add_prefix_space"), prefix_space(tokenizer)
    if picked.parts is not None and isinstance(asked, bool) and found is not None and asked != found:
        raise ConfigError(
            f"{folder}/tokenizer_config.json: add_prefix_space={str(asked).lower()}, but tokenizer.json"
            f" {'puts a' if found else 'puts no'} space before a text",
            "correct the one with which the model was not trained",
        )


def _legacy(folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the files of older versions: special tokens, and added tokens that tokenizer.json lacks."""
    names, added = (folder / name for name in ("special_tokens_map.json", "added_tokens.json"))
    found = _object(names) if names.is_file() else {}
    if added.is_file():
        named = {**settings, **found}
        special = {*map(_text, named.values()), *_extra(named)}
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        texts = [text for text in _object(added) if text not in known]
        found["added_tokens_decoder"] = {
            str(i): {"content": text, "normalized": text not in special, "special": text in special}
            for i, text in enumerate(texts)
        }
    return found


def _note(folder: Path, picked: TokenizerClass, parts: Sequence[str]) -> str | None:
    """Write a sentence if the class rebuilds parts that Volley takes from tokenizer.json."""
    if picked.special is not None and not parts:
        return None
    what = f"with another {' and '.join(dict.fromkeys(parts))}" if parts else "which Volley does not know"
    return (
        f"{folder}: AutoTokenizer of transformers 5 reads the tokenizer as {picked.name}, {what}: its token ids may"
        " differ. Volley reads tokenizer.json as it is, as transformers 4 does. If the model was trained with the ids"
        " of transformers 5, load the tokenizer there, write it with save_pretrained, and give that folder."
    )


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    """Collect the named special tokens, also those of single models, such as image_token."""
    named = {key: value for key, value in settings.items() if _is_named(key, value)}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(more := settings.get(key), dict):
            named = more | named
    return {name: text for name, value in named.items() if (text := _text(value))}


def _is_named(key: str, value: Any) -> bool:
    saved = isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")
    return key in NAMES or (key.endswith("_token") and saved)


def _add(tokenizer: Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str], folder: Path) -> None:
    """Apply flags of added tokens, and add the special tokens. Raises ConfigError for one outside the vocabulary."""
    known = tokenizer.get_added_tokens_decoder().values()
    flags = {repr(token) for token in known}
    given: Mapping[str, Any] = settings.get("added_tokens_decoder") or {}
    try:
        tokens = [AddedToken(**given[i]) for i in sorted(given, key=int)]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{folder}/tokenizer_config.json: added_tokens_decoder: {error}") from error
    tokens = [token for token in tokens if repr(token) not in flags]
    present = {token.content for token in (*known, *tokens)}
    values = [*settings.values(), *_more(settings)]
    saved = {text: value for value in values if isinstance(value, dict) and (text := _text(value))}
    for text in dict.fromkeys([*special.values(), *_extra(settings)]):
        if text not in present:
            flags_of = {key: value for key, value in saved.get(text, {}).items() if key in _FLAGS}
            tokens.append(AddedToken(text, special=True, **flags_of))
    for token in tokens:
        if tokenizer.token_to_id(token.content) is None:
            named = next((f"{name} " for name, text in special.items() if text == token.content), "")
            raise ConfigError(
                f"{folder}: {named}{token.content!r} is not in the vocabulary",
                "tokenizer.json must hold every token that tokenizer_config.json names",
            )
        token.special = token.special or token.content in special.values()
    tokenizer.add_tokens(tokens)


def _flagged(tokenizer: Tokenizer) -> set[str]:
    """Added tokens that have one of the flags."""
    known = tokenizer.get_added_tokens_decoder().values()
    return {token.content for token in known if any(getattr(token, name) for name in _FLAGS)}


def _extra(settings: Mapping[str, Any]) -> list[str]:
    """Special tokens without a name."""
    return [text for one in _more(settings) if (text := _text(one))]


def _more(settings: Mapping[str, Any]) -> list[Any]:
    both = (settings.get(key) for key in ("extra_special_tokens", "additional_special_tokens"))
    return next((found for found in both if isinstance(found, list) and found), [])


def _text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _end_ids(file: Path) -> frozenset[int]:
    """Read `eos_token_id` of a file: one id or a list."""
    value = _object(file).get("eos_token_id") if file.is_file() else None
    ids = value if isinstance(value, list) else [value]
    return frozenset(i for i in ids if type(i) is int and i >= 0)


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", _FOLDER) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return found
