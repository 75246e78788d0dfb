"""Models, adapters, optimizers and samplers as torch, transformers and PEFT compute them, in float64.

A program of the environment `tests.support.foreign.torch`, which knows nothing of this project. It answers the
questions of `tests.support.torch_client`: each line names a function below, its arguments and a folder with its arrays.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    logging,
)
from transformers.generation import logits_process

Arrays = dict[str, np.ndarray]
_OF_CAST = torch.float32, torch.Tensor.float


def load(folder: str, **given: Any) -> Any:
    """A model in float64: transformers computes norms, softmax and angles in float32, and here in float64 too."""
    torch.float32, torch.Tensor.float = _OF_CAST
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager", **given
    )
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    return model.double().train()


def logprobs_of(model: Any, ids: list[int], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of ids[1:] given the ids before each, and the logarithms of the whole distributions."""
    table = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1] / temperature, -1)
    return table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])], table


# Samplers


class Penalties(LogitsProcessor):
    """OpenAI's frequency and presence penalties, which transformers lacks, on the tokens after the prompt."""

    def __init__(self, n_prompt: int, frequency: float, presence: float) -> None:
        self.n_prompt, self.frequency, self.presence = n_prompt, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        made = scores.clone()
        for token, count in Counter(input_ids[0, self.n_prompt :].tolist()).items():
            made[0, token] -= self.frequency * count + self.presence
        return made


def generate(arguments: dict[str, Any], _arrays: Arrays) -> Arrays:
    """Greedy ids of each prompt by `transformers.generate`, and their log-probabilities without penalties."""
    model, options, found = load(arguments["folder"]).eval(), dict(arguments["options"]), Arrays()
    frequency, presence = options.pop("frequency_penalty", 0.0), options.pop("presence_penalty", 0.0)
    if bias := options.pop("logit_bias", None):
        options["sequence_bias"] = [[[token], float(value)] for token, value in bias]
    options.setdefault("eos_token_id", None)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=options["eos_token_id"])
    config = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=arguments["n"], **options)
    torch.set_default_dtype(_OF_CAST[0])  # which the processor of biases takes for granted
    for i, prompt in enumerate(arguments["prompts"]):
        more = LogitsProcessorList([Penalties(len(prompt), frequency, presence)])
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), generation_config=config, logits_processor=more)[0].tolist()
            logprobs, _ = logprobs_of(model, ids)
        found |= {f"ids {i}": np.array(ids[len(prompt) :]), f"logprobs {i}": logprobs.numpy()[len(prompt) - 1 :]}
    torch.set_default_dtype(torch.float64)
    return found


def filtered(arguments: dict[str, Any], arrays: Arrays) -> Arrays:
    """Logits [n, V] after each of the named processors of transformers, one row of `cases` after the other."""
    made = []
    for case in arguments["cases"]:
        scores = torch.tensor(arrays["logits"], dtype=torch.float64)
        for name, value in case:
            scores = getattr(logits_process, name)(value)(torch.zeros(len(scores), 1, dtype=torch.long), scores)
        made.append(scores.numpy())
    return {"logits": np.stack(made)}


# Training


def train(arguments: dict[str, Any], arrays: Arrays) -> Arrays:
    """Optimizer steps on given sequences: of each step losses, log-probabilities and gradients, and the parameters.

    A step is a list of `sequences`, or of `groups` of episodes. With an `adapter`, only PEFT's parameters are trained,
    from their values in `arrays`; `gradients` are the clipped ones.
    """
    model, reference, found = load(arguments["folder"]), None, Arrays()
    if arguments.get("reference"):
        reference = load(arguments["reference"]).eval()
    if arguments.get("adapter"):
        model = adapted(model, arguments["adapter"], arrays)
    trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(list(trained.values()), **arguments["adamw"])
    schedule = scheduled(optimizer, **arguments["schedule"])
    for number, step in enumerate(arguments["steps"]):
        sequences = step if isinstance(step[0], dict) else of_groups(step, arguments["aggregation"])
        optimizer.zero_grad()
        total = 0.0
        for i, one in enumerate(sequences):
            loss, logprobs = sequence_loss(model, reference, one, arguments)
            loss.backward()
            total += loss.item()
            found[f"{number} logprobs {i}"] = logprobs.detach().numpy()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), arguments["max_grad_norm"])
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
        found |= {f"{number} loss": np.array(total), f"{number} norm": norm.numpy()}
        found |= {f"{number} gradient {k}": v.numpy().copy() for k, v in by_files(gradients).items()}
        optimizer.step()
        schedule.step()
    return found | {f"after {k}": v.detach().numpy() for k, v in by_files(trained).items()}


def adapted(model: Any, options: dict[str, Any], arrays: Arrays) -> Any:
    """PEFT's model with these values. Of a model with experts PEFT takes the dense layers' projections for theirs."""
    from peft import LoraConfig, get_peft_model

    modules, dense = options.pop("modules"), list[str]()
    if any(".experts." in name for name, _ in model.named_parameters()):
        dense = [f"{name}.weight" for name in modules if ".mlp." in name]
        modules = [name for name in modules if ".mlp." not in name]
    wanted = {"target_modules": modules, "target_parameters": dense or None, "lora_dropout": 0.0}
    made = get_peft_model(model, LoraConfig(**wanted, **options)).double().train()
    state = {name: torch.tensor(value, dtype=torch.float64) for name, value in arrays.items()}
    parameters = {n.replace(".default", ""): p for n, p in made.named_parameters() if p.requires_grad}
    assert parameters.keys() == state.keys(), sorted(parameters.keys() ^ state.keys())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
    return made


def scheduled(optimizer: Any, warmup: int, total: int, kind: str) -> Any:
    """Warm-up from 1 / warmup of the rate, then constant, or down to 0 at `total` along a line or a cosine."""
    schedulers = torch.optim.lr_scheduler
    rest = {
        "constant": lambda: schedulers.ConstantLR(optimizer, 1.0),
        "linear": lambda: schedulers.LinearLR(optimizer, 1.0, 0.0, total - warmup),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, total - warmup),
    }[kind]
    if not warmup:
        return rest()
    rising = schedulers.LinearLR(optimizer, 1 / warmup, 1.0, warmup)
    return schedulers.SequentialLR(optimizer, [rising, rest()], [warmup])


def of_groups(groups: list[Any], aggregation: str) -> list[dict[str, Any]]:
    """The sequences of GRPO's episodes, each token with its advantage and its weight in the loss.

    A branch is the first `shared` tokens of sequence `parent`, which do not count again, and its own ones.
    """
    made, episodes = [], [episode for group in groups for episode in group]
    n_all = sum(sum(one["mask"]) for episode in episodes for one in episode["sequences"])
    for group in groups:
        rewards = np.array([episode["reward"] for episode in group])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for episode, advantage in zip(group, advantages, strict=True):
            n = sum(sum(one["mask"]) for one in episode["sequences"])
            weight = {"token-mean": 1 / n_all, "sequence-mean-token-mean": 1 / (n * len(episodes))}[aggregation]
            whole: list[list[int]] = []
            for one in episode["sequences"]:
                shared = one["shared"]
                before = whole[one["parent"]][:shared] if shared else []
                whole.append(before + one["ids"])
                mask = np.array([0] * shared + one["mask"])
                behaviour = [0.0] * shared + one["behaviour"]
                made.append(
                    {"ids": whole[-1], "weights": (mask * weight).tolist(), "behaviour": behaviour}
                    | {"advantages": (mask * advantage).tolist()}
                )
    return made


def sequence_loss(model: Any, reference: Any, one: dict[str, Any], options: dict[str, Any]) -> Any:
    """The sum over ids[1:] of weight times loss, and their log-probabilities."""
    temperature = options.get("temperature", 1.0)
    p, table = logprobs_of(model, one["ids"], temperature)
    w, a, q = (torch.tensor(one.get(k, [0.0] * len(one["ids"])))[1:] for k in ("weights", "advantages", "behaviour"))
    ratio, (low, high) = torch.exp(p - q), options.get("clip", (0.8, 1.2))
    loss = {
        "cross_entropy": lambda: -p,
        "importance_sampling": lambda: -ratio * a,
        "ppo": lambda: -torch.minimum(ratio * a, ratio.clamp(low, high) * a),
    }[one.get("loss") or options["loss"]]()
    if reference is not None:  # k3 of Schulman's "Approximating KL divergence", and an entropy bonus
        with torch.no_grad():
            delta = logprobs_of(reference, one["ids"], temperature)[0] - p.detach()
        delta = delta + p.detach() - p
        entropy = -(table.exp() * table).sum(-1)
        loss = loss + options["beta"] * (delta.exp() - delta - 1) - options["entropy_coef"] * entropy
    return (w * loss).sum(), p


def by_files(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of files, in which the experts of a layer are one by one."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        *prefix, leaf = name.split(".")
        if "experts" not in prefix or leaf not in ("gate_up_proj", "down_proj"):
            found[name] = value
            continue
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        for i, one in enumerate(value):
            for key, half in zip(leaves, one.chunk(len(leaves)), strict=True):
                found[".".join([*prefix, str(i), key, "weight"])] = half
    return found


def adamw(arguments: dict[str, Any], arrays: Arrays) -> Arrays:
    """One vector after each of `n` steps with given gradients [n, size]."""
    parameter = torch.nn.Parameter(torch.tensor(arrays["start"], dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], **arguments["adamw"])
    schedule, after = scheduled(optimizer, **arguments["schedule"]), []
    for gradient in arrays["gradients"]:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([parameter], arguments["max_grad_norm"])
        optimizer.step()
        schedule.step()
        after.append(parameter.detach().numpy().copy())
    return {"after": np.stack(after)}


# Exports


def exported(arguments: dict[str, Any], _arrays: Arrays) -> Arrays:
    """Log-probabilities under a folder of weights, or of PEFT's adapters, of which every tensor has its place."""
    folder = Path(arguments["folder"])
    torch.float32, torch.Tensor.float = _OF_CAST
    if (folder / "adapter_config.json").exists():
        from peft import PeftConfig, PeftModel
        from safetensors.torch import load_file

        base = load(PeftConfig.from_pretrained(folder).base_model_name_or_path)
        torch.float32, torch.Tensor.float = _OF_CAST
        model = PeftModel.from_pretrained(base, folder)
        placed = {n.replace(".default", ""): p for n, p in model.named_parameters() if ".lora_" in n}
        tensors = load_file(folder / "adapter_model.safetensors")
        assert placed.keys() == tensors.keys(), sorted(placed.keys() ^ tensors.keys())
        assert all(torch.equal(placed[name].double(), value.double()) for name, value in tensors.items())
        torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
        model = model.double()
    else:
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        model = load(str(folder))
    with torch.no_grad():
        return {"logprobs": logprobs_of(model.eval(), arguments["ids"])[0].numpy()}


# Files


def gguf(arguments: dict[str, Any], _arrays: Arrays) -> Arrays:
    """Log-probabilities under a GGUF file, with `rounded` weights in bfloat16, and token ids of texts.

    The package gguf is the one of the folder `packages`; `config` has what transformers does not read from the file.
    """
    if arguments["packages"] not in sys.path:
        sys.path.append(arguments["packages"])
    file, found = Path(arguments["file"]), Arrays()
    model = load(str(file.parent), gguf_file=file.name, **arguments["config"]).eval()
    with torch.no_grad():
        for parameter in model.parameters() if arguments["rounded"] else ():
            parameter.copy_(parameter.to(torch.bfloat16))
        found["logprobs"] = logprobs_of(model, arguments["ids"])[0].numpy()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = (tokenizer.encode(text, add_special_tokens=False) for text in arguments["texts"])
    return found | {f"ids {i}": np.array(ids, np.int64) for i, ids in enumerate(texts)}


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_default_dtype(torch.float64)
    for line in sys.stdin:
        asked = json.loads(line)
        folder = Path(asked["in"])
        try:
            with np.load(folder / "given.npz") as given:
                found = globals()[asked["name"]](asked["arguments"], dict(given))
            np.savez(folder / "found.npz", **found)
            error = ""
        except Exception:  # noqa: BLE001 - the test that asked raises it
            error = traceback.format_exc()
        print(json.dumps({"error": error}), file=OUT, flush=True)


if __name__ == "__main__":
    OUT, sys.stdout = sys.stdout, sys.stderr  # libraries print
    main()
