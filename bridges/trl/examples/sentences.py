"""Train with TRL's GRPOTrainer on tokens that a Volley server samples: short sentences with two given words.

volley serve models/smollm2 --weights-root /tmp/weights rollout.engine.max_running_requests=16
VOLLEY_TOKEN=… python examples/sentences.py models/smollm2 http://127.0.0.1:8102 /tmp/weights --steps 8
"""

import argparse
import os
import re

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from volley_trl import VolleyClient, use_volley

WORDS = [
    "apple",
    "bread",
    "bridge",
    "candle",
    "chair",
    "cloud",
    "doctor",
    "dog",
    "engine",
    "farmer",
    "forest",
    "garden",
    "guitar",
    "horse",
    "island",
    "kitchen",
    "ladder",
    "lemon",
    "market",
]
PAIRS = [(a, b) for a in WORDS for b in WORDS if a < b]
ASKED = 'Write a short sentence of at most ten words that contains the words "{}" and "{}".'


def right(completions, words, **_):
    """Reward 1 for one sentence of at most 16 words with both words."""
    return [float(_is_right(one[0]["content"], pair)) for one, pair in zip(completions, words, strict=True)]


def _is_right(text, pair):
    found = re.findall(r"[a-z']+", text.lower())
    sentence = re.fullmatch(r"[^.!?\n]+[.!?]", text.strip())
    return sentence is not None and len(found) <= 16 and all(word in found for word in pair)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model that the server serves")
    parser.add_argument("server", help="address of the Volley server")
    parser.add_argument("weights", help="the server's --weights-root")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=6, help="prompts of a step; each gets eight answers")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--output", default="trl-output")
    given = parser.parse_args()
    rows = [{"prompt": [{"role": "user", "content": ASKED.format(*pair)}], "words": list(pair)} for pair in PAIRS]
    config = GRPOConfig(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=8 * given.prompts,
        num_generations=8,
        max_completion_length=28,
        learning_rate=given.learning_rate,
        lr_scheduler_type="constant",
        temperature=0.7,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(given.model, reward_funcs=right, args=config, train_dataset=Dataset.from_list(rows))
    client = VolleyClient(given.server, given.weights, token=os.environ.get("VOLLEY_TOKEN"))
    use_volley(trainer, client)
    trainer.train()


if __name__ == "__main__":
    main()
