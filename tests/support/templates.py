"""Published chat templates, and model folders that use them."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

from tests.support.tokenizer import FOLDER

_TOKENS = re.compile(r"<\|[\w▁]+\|>|<\|?(?:tool|turn|tool_call|tool_response|channel)\|?>|<｜[\w▁]+｜>|<\w+_of_turn>")
_ENDS = (
    "<|tool_response>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
)


def published() -> dict[str, str]:
    """Texts of the templates that the package trl carries, by name; those ending in _training are trl's own."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def model_folder(to: Path, template: str, *, special: tuple[str, ...] = ("<s>", "</s>")) -> Path:
    """The tiny tokenizer with the special tokens that a template writes."""
    to.mkdir()
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    added = tokenizer["added_tokens"]
    known = {one["content"] for one in added}
    first = 1 + max(max(tokenizer["model"]["vocab"].values()), *(one["id"] for one in added))
    new = [text for text in dict.fromkeys([*_TOKENS.findall(template), *special]) if text not in known]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added += [{"id": first + i, "content": text, **flags} for i, text in enumerate(new)]
    ends = [one["id"] for one in added if one["content"] in _ENDS and one["content"] in template]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(to / "tokenizer.json", tokenizer)
    write_json(to / "tokenizer_config.json", settings)
    write_json(to / "generation_config.json", {"eos_token_id": ends})
    (to / "chat_template.jinja").write_text(template, encoding="utf-8")
    return to


def tiny_folder(to: Path, **settings: object) -> Path:
    """A copy of the tiny model's tokenizer, with other values in tokenizer_config.json."""
    to.mkdir()
    shutil.copy(FOLDER / "tokenizer.json", to)
    config = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    return write_json(to / "tokenizer_config.json", config | settings).parent


def change_json(path: Path, **values: object) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | values)


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path
