"""Tokenizer and generation settings of an exported folder, for transformers 4 and 5 to read as Volley does.

Volley reads tokenizer.json unchanged. AutoTokenizer of transformers 5 does so only for some values of
`tokenizer_class`: for others, or without one, it builds the pre-tokenizer from the model's type, which gives other
token ids.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import orjson

from shared.errors import InputError, WeightsError
from shared.models.chat import ChatTokenizer
from shared.models.config import GENERATION_CONFIG
from shared.models.templates import Messages, Tools
from shared.models.tokenizer_files import NAMES, read_tokenizer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
_COPIED = (TOKENIZER, "special_tokens_map.json", "*.jinja", "additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*")
_CODE = ("auto_map", "backend", "tokenizer_file", "name_or_path", "_commit_hash", "processor_class")
"""Keys that lead transformers to other code or files."""
_TOKENS = ("bos_token_id", "pad_token_id")
_ASKED = [{"role": "user", "content": "How many are 3 x 17?\n\n  Say it's so."}]
_TURNS = [*_ASKED, {"role": "assistant", "content": "It's 51."}, {"role": "user", "content": " Sure? "}]
_CONVERSATIONS = (_ASKED, _TURNS, [{"role": "system", "content": "Be brief.\n"}, *_TURNS])
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "größe": {"type": "number"}}}
_TOOL = {"type": "function", "function": {"name": "add", "description": "Größe <b>", "parameters": _PARAMETERS}}
_TEXTS = (
    "Hello, world! I'm sure you'll see\tthat it's 12345.678 or 1,000",
    "  two spaces,\n\n\nthree lines \r\n and the end  ",
    "naïve Café Ｆｕｌｌ ﬁne Å 你好，世界 שלום привет 🙂👩‍👩‍👧",
    "def f(x):\n    return {'a': [x**2, -1.5e-3]}  # </think><|im_end|></s><eos>",
    "_O_X\nPG_*\n<answer>Right || Down</answer> ▁x ĠY",
)


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy the tokenizer of the model's folder to `target`; False if there is none. Raises WeightsError."""
    if not (source / TOKENIZER).is_file():
        return False
    for pattern in _COPIED:
        for file in source.glob(pattern):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(file, copy)
    try:
        settings: dict[str, Any] = orjson.loads((source / TOKENIZER_CONFIG).read_bytes())
        kept = {key: value for key, value in settings.items() if key not in _CODE}
        special = {name: text for name, text in read_tokenizer(source).special.items() if name in NAMES}
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError(f"the model's {source / TOKENIZER_CONFIG} cannot be read any more: {error}") from error
    write_json(target / TOKENIZER_CONFIG, {**special, **kept, "tokenizer_class": TOKENIZER_CLASS})
    return True


def token_ids(folder: Path, end_ids: Iterable[int], config: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens for config.json and generation_config.json: `end_ids` and the tokenizer's own end a text.

    generation_config.json has nothing else, which means greedy decoding, as in Volley's evaluation. Neither training
    nor evaluation used the penalties and sampling settings of the model's own file.
    """
    tokens: dict[str, Any] = {key: config[key] for key in _TOKENS if key in config}
    ends = set(end_ids)
    if (folder / TOKENIZER).is_file():
        tokenizer = ChatTokenizer(folder)
        ends |= tokenizer.end_ids
        tokens["pad_token_id"] = tokenizer.pad_id
    return {**tokens, "eos_token_id": sorted(ends) or None}


def difference(folder: Path) -> str | None:
    """Load the folder with transformers; describe a difference in tokenizer, chat template or end tokens, if any."""
    from transformers import AutoTokenizer, GenerationConfig

    ours = ChatTokenizer(folder, datetime.datetime.now().astimezone().date())  # the date that transformers writes
    try:
        theirs: Any = AutoTokenizer.from_pretrained(folder)
        generation: Any = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - transformers documents no exceptions
        return f"transformers cannot read it: {type(error).__name__}: {error}"
    if any(theirs.encode(text, add_special_tokens=False) != ours.encode(text) for text in _TEXTS):
        return (
            f"transformers reads the {TOKENIZER} of this model_type as {type(theirs).__name__}, which gives other token"
            f" ids: load it with transformers.{TOKENIZER_CLASS}.from_pretrained"
        )
    for turns, tools in product(_CONVERSATIONS, ([], [_TOOL])):
        if (rendered := _rendered(theirs, turns, tools)) != _prompt(ours, turns, tools):
            what = "refuses" if rendered is None else "makes other tokens of"
            roles = ", ".join(turn["role"] for turn in turns)
            return f"transformers' apply_chat_template {what} a conversation of {roles}{' with tools' * bool(tools)}"
    written = orjson.loads((folder / GENERATION_CONFIG).read_bytes())
    if generation.eos_token_id != written["eos_token_id"]:
        return f"transformers ends a text with {generation.eos_token_id}, Volley with {written['eos_token_id']}"
    return None


def _rendered(tokenizer: Any, turns: Messages, tools: Tools) -> list[int] | None:
    """Render the prompt's ids with transformers; None if the template refuses the conversation."""
    try:
        return tokenizer.apply_chat_template(turns, tools=tools or None, add_generation_prompt=True, return_dict=False)
    except Exception:  # noqa: BLE001 - raised by the template, or by Python within it
        return None


def _prompt(tokenizer: ChatTokenizer, turns: Messages, tools: Tools) -> list[int] | None:
    """Render the prompt's ids with Volley; None if the template refuses the conversation."""
    with suppress(InputError):
        return tokenizer.render_prompt(turns, tools)
    return None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
