"""The committed tiny tokenizer: byte-level BPE with a ChatML template."""

from functools import cache
from pathlib import Path

from shared.models.chat import ChatTokenizer

FOLDER = Path(__file__).parents[2] / "configs" / "models" / "tiny"


@cache
def tiny_tokenizer() -> ChatTokenizer:
    return ChatTokenizer(FOLDER)
