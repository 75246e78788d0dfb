"""GRPO on one page: a tiny policy learns to cross frozen lakes, in one process, in seconds.

    .venvs/trainer/bin/python examples/loop.py [FOLDER]

The parts are those of a real run: environment, tokenizer, recorder, tickets, admission, advantages, loss, optimizer
step and ledger. Smaller are the model (embeddings of the last tokens), the engine (numpy) and the queue (in memory);
nothing is sent over HTTP. FOLDER gets the ledger. docs/how-it-works.md walks through this file.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path

import blake3
import jax
import jax.numpy as jnp
import numpy as np
from in_memory_queue import InMemoryQueue

from services.env.environments.games.frozen_lake import FrozenLakeConfig, frozen_lake
from services.env.episode_types import assistant
from services.orchestrator.episodes.recorder import Recorder
from services.trainer.algorithms.grpo import Grpo
from services.trainer.algorithms.terms.logprobs import token_scores
from services.trainer.batches.batch import BatchLayout, micro_batches
from services.trainer.groups.group_buffer import AdmissionRules, GroupBuffer
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.train_step import Learner
from services.trainer.learner.training_rows import group_rows
from services.trainer.loop.ledger import LedgerFile
from shared.algorithm_schema import GrpoSection
from shared.clients.rollout import Generation
from shared.models.chat import ChatTokenizer
from shared.outcomes import end_of_turn
from shared.queue.records import Reservation
from shared.run import ledger
from shared.run.progress import TicketProgress
from shared.run.seeding import TaskOrder, env_seed, sampling_seed
from shared.types import Group, VersionSpan, WeightVersion

SEED = 0
STEPS, GROUPS_PER_STEP, GROUP_SIZE = 40, 8, 8
MAX_STALENESS = 0  # steps between the weights that sampled a group and those that it trains; 0: synchronous
MAX_TURNS, MAX_RESPONSE_LENGTH = 6, 2  # a response is a move and the end of the turn
CONTEXT_LENGTH = 96  # tokens of an episode
LEASE_S = 600.0  # a ticket that is not published by then is issued again
WINDOW, WIDTH = 10, 64  # tokens that the model sees (the board, and its answer so far), and features that it computes
MODEL = Path(__file__).parents[1] / "configs/models/quickstart"  # only its tokenizer is used
LAKES = FrozenLakeConfig(
    size=3, talk="bare", protocol="plain", max_turns=MAX_TURNS, max_actions_per_turn=1, train_tasks=64
)


# ---------------------------------------------------------------------------------------------------------------------
# The model: one formula, computed by numpy in the engine and by JAX in the trainer


def initial_weights(vocab_size, likely):
    """Random weights that mostly write the `likely` tokens, as a model after a warm start would."""
    rng = np.random.default_rng(SEED)
    embedding, head = rng.normal(0, 0.3, (WINDOW, vocab_size, WIDTH)), rng.normal(0, 0.02, (vocab_size, WIDTH + 1))
    head[likely, -1] += 7.0  # the last feature is always 1
    return {"embedding": embedding.astype(np.float32), "head": head.astype(np.float32)}


def hidden_states(weights, ids, xp):
    """Compute features [B, T, WIDTH + 1] of ids [B, T], by numpy or jax.numpy: a position sees `WINDOW` tokens."""
    back = xp.arange(ids.shape[1])[:, None] - xp.arange(WINDOW)
    windows = xp.where(back >= 0, ids[:, back], 0)
    features = xp.tanh(weights["embedding"][xp.arange(WINDOW), windows].sum(-2))
    return xp.concatenate([features, xp.ones_like(features[..., :1])], -1)


# ---------------------------------------------------------------------------------------------------------------------
# The rollout server: samples tokens, and reports the log-probability and the weight version of each


class Engine:
    def __init__(self, end_ids):
        self.end_ids = end_ids

    def update_weights(self, version, weights):
        self.version, self.weights = version, {name: np.asarray(value) for name, value in weights.items()}

    def generate(self, prompt, seed):
        rng, ids, logprobs = np.random.default_rng(seed), list(prompt), []
        while len(logprobs) < MAX_RESPONSE_LENGTH and not (logprobs and ids[-1] in self.end_ids):
            logits = hidden_states(self.weights, np.array([ids[-WINDOW:]]), np)[0, -1] @ self.weights["head"].T
            log_softmax = logits - np.logaddexp.reduce(logits)
            ids.append(int(np.argmax(log_softmax + rng.gumbel(size=len(log_softmax)))))  # samples from the softmax
            logprobs.append(log_softmax[ids[-1]])
        return Generation(
            output_ids=np.array(ids[len(prompt) :], np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=(VersionSpan(str(self.version), 0, len(logprobs)),),
            finish_reason="stop" if ids[-1] in self.end_ids else "length",
        )


# ---------------------------------------------------------------------------------------------------------------------
# The orchestrator: model and environment take turns; all episodes of a task are a group, and each group has a ticket


def run_episode(env, engine, tokenizer, ticket, index, sample_index):
    """Reset; then generate, step and record until the environment ends the episode."""
    episode = env.reset("train", index, env_seed(SEED, ticket, sample_index))
    recorder = Recorder(tokenizer.render_prompt(episode.opening))
    while True:
        start = len(recorder)
        recorder.add_sampled(engine.generate(recorder.prompt(), sampling_seed(SEED, ticket, sample_index, start)))
        sampled = recorder.ids_since(start)
        result = episode.step(assistant(tokenizer.message_text(sampled)))
        recorder.end_turn(start, result.reward, result.info.reward_components, [result.info.error])
        if result.over:
            break
        # Only the environment's answer is tokenized: sampled ids stay as they are.
        recorder.add_environment(tokenizer.continue_after(sampled, result.messages), role="user")
    return recorder.trajectory(
        ticket=ticket,
        sample_index=sample_index,
        attempt=0,
        env="frozen_lake",
        task=env.task("train", index),
        success=result.info.success,
        status="completed" if result.terminated else "truncated",
        end=end_of_turn(result.info.error, cut=None) if result.terminated else "turns",
        failures={},
        timings={},
    )


async def generate_groups(queue, env, engine, tokenizer):
    """Publish a group for each ticket, until the queue refuses more: they would be too old when they are trained."""
    tasks = TaskOrder(SEED, env.num_tasks("train"))
    total = STEPS * GROUPS_PER_STEP
    while isinstance(lease := await queue.reserve(LEASE_S, GROUPS_PER_STEP, MAX_STALENESS, total), Reservation):
        ticket, index = lease.ticket, tasks.index(lease.ticket)  # the ticket alone decides the task
        episodes = tuple(run_episode(env, engine, tokenizer, ticket, index, i) for i in range(GROUP_SIZE))
        await queue.publish(ticket, Group(ticket, "frozen_lake", episodes[0].task, episodes).encode())


# ---------------------------------------------------------------------------------------------------------------------
# The trainer: advantages within each group, clipped loss, one optimizer step


class Trainer:
    def __init__(self, weights, pad_id):
        self.algorithm = Grpo(GrpoSection(), n_updates=1, max_response_length=MAX_RESPONSE_LENGTH)
        self.layout = BatchLayout(buckets=(CONTEXT_LENGTH,), rows=GROUPS_PER_STEP * GROUP_SIZE, pad_id=pad_id)
        options = OptimizerOptions(
            learning_rate=1e-2,
            schedule_type="constant",
            warmup_steps=0,
            total_steps=STEPS,
            b1=0.9,
            b2=0.99,
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
        device = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:1], "fsdp"), jax.sharding.PartitionSpec())
        self.learner = Learner(jax.device_put(weights, device), make_optimizer(options), self.objective)

    def objective(self, weights, batch):
        hidden = hidden_states(weights, batch.ids, jnp)
        scores = token_scores(hidden, weights["head"], batch.targets, temperature=1.0, entropy="value")
        return self.algorithm.loss(scores, batch)

    def step(self, groups, before):
        """Train on groups of trajectories; `before` is the version of the present weights."""
        with_advantages = group_rows(groups, before, self.algorithm)  # one row for each episode
        mode = self.algorithm.section.loss_agg_mode
        rows, weights = with_advantages.weighted(self.algorithm, mode, MAX_RESPONSE_LENGTH)
        return self.learner.update(micro_batches(rows, weights, self.layout, n_micro=1))


# ---------------------------------------------------------------------------------------------------------------------
# The run: generate, read, train, record, commit, update the weights


async def train(folder):
    """Train `STEPS` steps; return the mean reward of each."""
    tokenizer = ChatTokenizer(MODEL)
    moves = [tokenizer.encode(move)[0] for move in ("Left", "Down", "Right", "Up")]
    trainer = Trainer(initial_weights(tokenizer.vocab_size, [tokenizer.eos_id, *moves]), tokenizer.pad_id)
    env, engine, queue = frozen_lake(LAKES), Engine(tokenizer.end_ids), InMemoryQueue()
    ledger_file, rewards = LedgerFile(folder / "ledger.jsonl"), []

    epoch = await queue.begin(low=0, version=0, issued=0, void=0, done=(), epoch=0)  # a trainer's start is an epoch
    await queue.open(epoch)
    version = WeightVersion(epoch, step=0)
    engine.update_weights(version, trainer.learner.params)
    rules = AdmissionRules(
        order="ticket",
        max_staleness=MAX_STALENESS,
        longest=CONTEXT_LENGTH,
        vocab_size=tokenizer.vocab_size,
        group_size=GROUP_SIZE,
    )
    buffer = GroupBuffer(TicketProgress(), [(epoch, 0)], rules)

    print("step  oldest tokens    new weights      reward  success  |Δ log p|")
    while version.step < STEPS:
        await generate_groups(queue, env, engine, tokenizer)
        dropped = await buffer.receive(await queue.read(epoch, "trainer", count=64, block_ms=0))
        assert not dropped  # a group that breaks a rule would end its ticket untrained
        ready = buffer.take(GROUPS_PER_STEP)
        update = trainer.step([one.group.trajectories for one in ready], version)
        version = WeightVersion(epoch, version.step + 1)

        ledger_file.append(ledger_line(one, version) for one in ready)  # durable before the queue forgets the tickets
        await queue.commit(epoch, version.step, [one.finished for one in ready], void=0)
        engine.update_weights(version, trainer.learner.params)
        rewards.append(report(ready, version, update))
    return rewards


def ledger_line(ready, version):
    """Make the ledger's line of a group: trained once, by the step that made this version."""
    digest, sampled_by = blake3.blake3(ready.payload).hexdigest(), (ready.oldest, ready.newest)
    return ledger.line(ready.group.ticket, ledger.TRAINED, version, versions=sampled_by, digest=digest)


def report(ready, version, update):
    """Print every fourth step; return the mean reward."""
    episodes = [trajectory for one in ready for trajectory in one.group.trajectories]
    reward, success = (float(np.mean([getattr(one, name) for one in episodes])) for name in ("reward", "success"))
    if version.step % 4 == 0:
        oldest, mismatch = min(one.oldest for one in ready), update.statistics["logprob_abs_diff"]
        print(f"{version.step:4}  {oldest}  {version}  {reward:6.2f}  {success:7.0%}  {mismatch:9.1e}")
    return reward


def main(folder):
    if (folder / "ledger.jsonl").exists():
        sys.exit(f"{folder} has the ledger of another run: choose a new folder")
    rewards = asyncio.run(train(folder))
    means = np.reshape(rewards, (-1, 4)).mean(1)
    print("\nmean reward of four steps")
    for number, mean in enumerate(means, start=1):
        print(f"{4 * number:4}  {mean:5.2f}  {'█' * round(50 * max(0.0, mean))}")
    counts = Counter(line["ticket"] for line in LedgerFile(folder / "ledger.jsonl").read())
    once = sum(n == 1 for n in counts.values())
    print(f"\nMean reward rose from {means[0]:.2f} to {means[-1]:.2f}; {once} groups trained exactly once.")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
