"""Spot checks: tokens of some episodes scored again, exactly, with the weights that sampled them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.batches.batch import Batch, BatchLayout, arranged, assembled, by_row, policy_rows
from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.learner.scoring import HOST, Scorer, exact_scores, with_rounded_vectors
from services.trainer.learner.train_step import Params, PolicyLearner
from services.trainer.models.family import Model
from services.trainer.models.sharding import replicated
from shared.types import Trajectory, VersionSpan, WeightVersion
from volley_proof.spot_checks.servers import ServerTokens


class SpotScorer:
    """Scores a share of the episodes with the present weights and with those before the newest step.

    Older tokens are not scored: their weights are gone. The weights before the step are copied to host memory, and lie
    on the devices only while they score. Episodes are scored in whole micro-batches, because padding costs as much.
    """

    def __init__(self, model: Model, scorer: Scorer, temperature: float, layout: BatchLayout) -> None:
        self._scorer, self._layout, self._dtype = scorer, layout, model.config.dtype
        everywhere = replicated(scorer.mesh)
        self._score_exactly = jax.jit(exact_scores(model, temperature, "value"), out_shardings=everywhere)
        is_exact = self._dtype == jnp.float32 and scorer.mesh.devices.flat[0].platform == "cpu"
        self._computes_exactly = is_exact and model.lora is None and model.described.routing is None
        self._former: tuple[WeightVersion, Params] | None = None
        self._due = 0.0  # episodes to score

    def keep(self, version: WeightVersion, learner: PolicyLearner) -> None:
        """Copy the trained parameters, which a step is about to change."""
        kept = {
            name: jax.device_put(value, value.sharding.with_memory_kind(HOST))
            for name, value in learner.trained.items()
        }
        self._former = version, jax.block_until_ready(kept)

    def forget(self) -> None:
        """Drop the copy: the present weights are not those of the step after it."""
        self._former = None

    def compare(
        self, held: Sequence[ReadyGroup], share: float, present: WeightVersion, learner: PolicyLearner
    ) -> list[ServerTokens]:
        """Compare tokens of a share of the episodes; no weight changes."""
        former = self._former if self._former is not None and self._former[0].step == present.step - 1 else None
        versions = [present] if former is None else [present, former[0]]
        known = [t for h in held for t in h.group.trajectories if any(_sampled_at(t, one) for one in versions)]
        chosen = self._chosen(known, share)
        found = self._compared(chosen, present, learner.params)
        if former is not None and any(_sampled_at(t, former[0]) for t in chosen):
            like = learner.trained
            placed = {name: jax.device_put(value, like[name].sharding) for name, value in former[1].items()}
            found += self._compared(chosen, former[0], learner.frozen | placed)
        return found

    def _chosen(self, known: Sequence[Trajectory], share: float) -> list[Trajectory]:
        """Choose by ticket and sample alone: never by length, reward or server."""
        if share == 1:
            return list(known)
        ranked = sorted(known, key=lambda t: zlib.crc32(f"{t.ticket}/{t.sample_index}".encode()))
        self._due += share * len(known)
        chosen = ranked[: int(self._due // self._layout.rows) * self._layout.rows]
        self._due -= len(chosen)
        return chosen

    def _compared(self, chosen: Sequence[Trajectory], version: WeightVersion, params: Params) -> list[ServerTokens]:
        episodes = [t for t in chosen if _sampled_at(t, version)]
        rows = [row for t in episodes for row in policy_rows(t, version)]
        if not rows:
            return []
        parts = arranged(rows, self._layout, self._layout.n_micro(len(rows)))
        batches = assembled(rows, np.zeros(len(rows)), parts, self._layout.pad_id)
        scored = [self._scores(params, batch) for batch in batches]
        tables = zip(*(by_row([one[i] for one in scored], rows, parts) for i in range(3)), strict=True)
        return [one for t in episodes for one in _of_episode(t, version, tables)]

    def _scores(self, params: Params, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Score `batch.targets` in float32 from the parameters as published, and in the model's dtype.

        Returns:
            float32 [B, T] each: exact log-probabilities, the model's own, and the exact entropies in nats.
        """
        published = with_rounded_vectors(params, self._dtype)
        with self._scorer.mesh:
            exact, entropy = map(np.asarray, self._score_exactly(published, *self._scorer.placed(batch)))
        return exact, exact if self._computes_exactly else self._scorer.logprobs(params, batch), entropy


def _of_episode(
    episode: Trajectory, version: WeightVersion, tables: Iterator[tuple[np.ndarray, ...]]
) -> list[ServerTokens]:
    """Sum over an episode's tokens by server; `tables` has log-probabilities, own ones and entropies of each row."""
    sums: dict[tuple[str, str], np.ndarray] = {}
    for sequence in episode.sequences():
        exact, own, entropy = (np.asarray(table, np.float64) for table in next(tables))
        goes_on = np.append(sequence.loss_mask[1:], 0) > 0  # not the last token of a turn
        differences = np.abs(sequence.logprobs - exact), np.abs(own - exact)
        columns = np.stack([np.ones(len(exact)), *differences, -exact * goes_on, entropy * goes_on])
        for before, span in zip((None, *sequence.versions), sequence.versions, strict=False):
            if _is_checked(span, version) and not (before is not None and _goes_on(before, span)):
                at = columns[:, span.start : span.end].sum(1)
                sums[span.server, span.version] = sums.get((span.server, span.version), 0) + at
    return [ServerTokens(*key, int(n), *map(float, rest)) for key, (n, *rest) in sums.items()]


def _sampled_at(episode: Trajectory, version: WeightVersion) -> bool:
    """True if a known server sampled a token of the episode with these weights, under any epoch's name."""
    return any(_is_checked(span, version) for span in episode.all_spans())


def _is_checked(span: VersionSpan, version: WeightVersion) -> bool:
    return span.server != "" and WeightVersion.parse(span.version).step == version.step


def _goes_on(before: VersionSpan, span: VersionSpan) -> bool:
    """True if new weights came while a server sampled: it may have kept keys and values of the old ones (in_place)."""
    return before.end == span.start and before.server == span.server
