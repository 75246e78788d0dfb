"""A training loop with the real `tinker` SDK, run in an environment of its own.

It prints `pass N` after each forward_backward and waits for a line before the optimizer step, then prints its findings
as JSON.
"""

import json
import sys

import numpy as np
import tinker
from tinker import types


def datum(seed, **inputs):
    ids = np.random.default_rng(seed).integers(8, 60, 12)
    arrays = {name: np.full(11, value, np.float32) for name, value in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={"target_tokens": ids[1:].astype(np.int64), **arrays},
    )


def main(base, steps):
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base, rank=4, seed=3).result()
    losses = []
    for step in range(steps):
        passed = training.forward_backward([datum(1, weights=1.0), datum(2, weights=1.0)], "cross_entropy").result()
        losses.append(passed.metrics["loss:sum"])
        print("pass", step, flush=True)
        sys.stdin.readline()
        training.optim_step(types.AdamParams(learning_rate=0.01)).result()
    sampled = {"logprobs": -2.0, "advantages": 0.5}
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        training.forward_backward([datum(3, **sampled)], loss).result()
    forward = training.forward([datum(1, weights=1.0)], "cross_entropy").result()
    saved = training.save_state("kept").result().path
    prompt = types.ModelInput.from_ints(datum(1).model_input.to_ints())
    sampler = training.save_weights_and_get_sampling_client().result()
    answer = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])).result()
    before = service.create_sampling_client(base_model=base).result().compute_logprobs(prompt).result()
    after = sampler.compute_logprobs(prompt).result()
    try:
        training.forward_backward([datum(3, **sampled)], "gspo").result()
    except tinker.TinkerError as error:
        refused = str(error)
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    same = again.forward([datum(1, weights=1.0)], "cross_entropy").result()
    rest = tinker.RestClient()
    found = {
        "losses": losses,
        "model": training.model_id,
        "trained": forward.loss_fn_outputs[0]["logprobs"].data[:-1],
        "reloaded": same.loss_fn_outputs[0]["logprobs"].data[:-1],
        "scored": after[1:],
        "base": before[1:],
        "samples": [list(one.tokens) for one in answer.sequences],
        "sampled_logprobs": list(answer.sequences[0].logprobs),
        "checkpoints": [one.tinker_path for one in rest.list_checkpoints(training.model_id).result().checkpoints],
        "refused": refused,
    }
    service.close("success").result()
    print(json.dumps(found, default=float), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
