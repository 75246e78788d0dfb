"""Train with TRL's GRPOTrainer alone on the task of recipes/short_sentences/config.yaml, to compare it with Volley.

python bridges/trl/examples/alone.py models/smollm2 recipes/short_sentences/short_sentences.py --steps 8
volley train --config recipes/short_sentences/config.yaml orchestrator.eval_every_n_steps=2

Model, prompts, rewards, answers a step, temperature, optimizer and held-out tasks are the same. Each line is JSON: a
step or an evaluation, with seconds and CPU seconds since the start, and the most memory so far.
"""

import argparse
import importlib.util
import json
import resource
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

BEGAN = time.monotonic()
GROUPS, ANSWERS, TOKENS, HELD_OUT = 6, 8, 28, 60


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("environment", help="recipes/short_sentences/short_sentences.py")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=2, help="steps between two evaluations")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    task = Task(given.environment)
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    config = GRPOConfig(
        output_dir="trl-output",
        max_steps=given.steps,
        per_device_train_batch_size=GROUPS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=TOKENS,
        temperature=0.7,
        learning_rate=2e-5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        adam_beta2=0.95,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        seed=given.seed,
    )
    rows = [{"prompt": task.prompt("train", index), "index": index} for index in range(task.n_train)]
    evaluation = Evaluation(task, model, tokenizer, given.every)
    GRPOTrainer(
        model=model,
        reward_funcs=task.rewards,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[evaluation],
    ).train()


class Task:
    """The environment of the configuration, in this process."""

    def __init__(self, path):
        spec = importlib.util.spec_from_file_location("short_sentences", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.new, self.n_train = module.ShortSentences, module.ShortSentences.splits["train"]

    def prompt(self, split, index):
        return [{"role": "user", "content": self.new().reset(split, index, 0)}]

    def reward(self, split, index, text):
        episode = self.new()
        episode.reset(split, index, 0)
        return episode.step(text)[1]

    def rewards(self, completions, index, **_):
        return [self.reward("train", i, one[0]["content"]) for i, one in zip(index, completions, strict=True)]


class Evaluation(TrainerCallback):
    """Plays the held-out tasks greedily, and prints the progress."""

    def __init__(self, task, model, tokenizer, every):
        self.task, self.model, self.tokenizer, self.every = task, model, tokenizer, every

    def on_train_begin(self, args, state, control, **_):
        self.evaluate(0)

    def on_step_end(self, args, state, control, **_):
        show(step=state.global_step)
        if state.global_step % self.every == 0:
            self.evaluate(state.global_step)

    @torch.no_grad()
    def evaluate(self, step):
        started, training = time.monotonic(), self.model.training
        self.model.eval()
        prompts = [self.task.prompt("eval", index) for index in range(HELD_OUT)]
        texts = self.tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        pad = self.tokenizer.pad_token_id
        ids = self.model.generate(**batch, do_sample=False, max_new_tokens=TOKENS, pad_token_id=pad, use_cache=True)
        answers = self.tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        self.model.train(training)
        success = sum(self.task.reward("eval", i, text) for i, text in enumerate(answers)) / HELD_OUT
        show(evaluated=step, success=round(success, 4), evaluation_s=round(time.monotonic() - started, 1))


def show(**values):
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s, most = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    elapsed_s = time.monotonic() - BEGAN
    print(json.dumps({**values, "s": round(elapsed_s, 1), "cpu_s": round(cpu_s, 1), "GB": round(most, 1)}), flush=True)


if __name__ == "__main__":
    main()
