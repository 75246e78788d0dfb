"""Makes the folders of the small models: configs/models/NAME/{config,tokenizer,tokenizer_config}.json.

    .venvs/base/bin/python configs/models/make_models.py {tiny,quickstart,agent} [--text FILE ...]

`tiny` reads all the built-in games; `quickstart` spells the rows of a frozen lake with one token each; `agent` reads
examples/agents, and its chat template has tools.

A byte-level BPE of 512 tokens, trained on what the built-in environments say (and on the files given), so that a grid,
an answer or a number costs few tokens, and any text can still be written. The weights are random: there are none in the
folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from services.env.environments.games.frozen_lake import FrozenLakeConfig, frozen_lake  # noqa: E402
from volley_environments.games.sokoban import SokobanConfig, sokoban  # noqa: E402

VOCABULARY = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# A tag, an action separator, a word with the space before it, a digit, any other sign (also a capital) or a space, each
# alone.
WORDS = r" ?[A-Z]?[a-z]+|[0-9]| ?[^\s0-9]|\s"
MARKS = r"</?[a-z_]+>| \|\| |####"
ROWS = r"(?:user|assistant|system)\n|[_OPGX*]{3,}\n?"
"""A role, or a row of a lake, with the end of its line: a turn of two moves on a lake of 4 x 4 is 12 tokens, not 30."""
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
END
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
TOOLS = """\
{%- if tools -%}
<|im_start|>tools
{% for tool in tools -%}
{{ tool.function | tojson }}
{% endfor -%}
<|im_end|>
{% endif -%}
"""
CALLS = """\
{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>"""


@dataclass(frozen=True, slots=True)
class SmallModel:
    """`pieces` are what no token reaches beyond; `end` closes a message in the chat template."""

    pieces: str
    end: str
    heads: int
    kv_heads: int
    head_dim: int
    rows: bool
    tools: bool = False

    @property
    def template(self) -> str:
        plain = TEMPLATE.replace("END", self.end)
        return TOOLS + plain.replace("{{ message.content }}<|im_end|>", CALLS) if self.tools else plain


MODELS = {
    "tiny": SmallModel(f"{MARKS}|{WORDS}", "{% endfor -%}", 2, 1, 128, rows=False),
    "quickstart": SmallModel(f"{MARKS}|{ROWS}|{WORDS}", "{%- endfor -%}", 4, 2, 16, rows=True),
    "agent": SmallModel(f"{MARKS}|{WORDS}", "{% endfor -%}", 4, 2, 16, rows=False, tools=True),
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "initializer_range": 0.05,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
}


def conversations(*, rows: bool) -> Iterator[str]:
    """Demonstrations of the games, in the text a model sees. `rows`: with enough lakes to meet every row of them."""
    lakes = frozen_lake(FrozenLakeConfig(talk="bare", protocol="plain", max_turns=8, demo_actions_per_turn=1))
    for index in range(8000 if rows else 0):
        for message in lakes.demonstration("train", index).messages:
            yield f"{message['role']}\n{message['content']}"
    for talk in ("bare", "chat"):
        lake = frozen_lake(FrozenLakeConfig(talk=talk, demo_actions_per_turn=1))
        around = frozen_lake(FrozenLakeConfig(talk=talk, render="grid+around", max_turns=10, demo_actions_per_turn=1))
        boxes = sokoban(SokobanConfig(talk=talk))
        for environment, n in ((lake, 150), (around, 150), (boxes, 60)):
            for index in range(n):
                for message in environment.demonstration("train", index).messages:
                    yield f"{message['role']}\n{message['content']}"
    yield "√" * 1000  # Sokoban's rarest sign is three bytes, and should still be one token


def train(texts: list[str], pieces: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument(
        "--text", type=Path, action="append", default=[], help="more text to train on, e.g. problems of GSM8K"
    )
    parser.add_argument("--out", type=Path, help="another folder than configs/models/NAME")
    arguments = parser.parse_args()
    model, out = MODELS[arguments.name], arguments.out or ROOT / "configs" / "models" / arguments.name
    texts = [*conversations(rows=model.rows), *(path.read_text(encoding="utf-8") for path in arguments.text)]
    if model.tools:
        texts += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples/agents").glob("*.py"))] * 20
    out.mkdir(parents=True, exist_ok=True)
    train(texts, model.pieces).save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings |= {"chat_template": model.template}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    heads = {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
    (out / "config.json").write_text(json.dumps(CONFIG | heads, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
