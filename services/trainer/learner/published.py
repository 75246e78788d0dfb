"""Weights for checkpoints and rollout servers: check that they are finite, make their probe, cast them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.learner.scoring import Scorer
from services.trainer.learner.train_step import Params, PolicyLearner
from services.trainer.models.arrays import CheckpointContents
from services.trainer.models.sharding import to_host
from services.trainer.publishing.publications import Arrays
from shared.errors import NonFinite
from shared.run.checkpoint_files import ManifestLeaf, Probe

_PROBE_LENGTH = 64
_COMPUTED = "the log-probabilities of the probe"
_NAMED = 4


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Prepares one model's weights; `config` is its config.json, `dtype` that of published parameters."""

    scorer: Scorer
    config: Mapping[str, Any]
    dtype: str

    def probed(self, learner: PolicyLearner, of: str, wrong: Sequence[str] = ()) -> Probe:
        """Make the probe of the learner's present weights.

        Raises NonFinite if `wrong` names anything, or if a parameter, the optimizer state or the probe is not finite;
        `of` is what the message calls the weights.
        """
        what = [*wrong, *learner.non_finite(self.dtype)]
        ids = _probe_ids(self.config["vocab_size"])
        logprobs, noise = self.scorer.probe(learner.params, ids)
        if not np.isfinite([logprobs, noise]).all():
            what.append(_COMPUTED)
        if what:
            raise NonFinite(f"{of}: {named(what)} not finite", "a lower learning rate may help", what)
        return Probe(*(tuple(values.tolist()) for values in (ids, logprobs, noise)))

    def contents(self, learner: PolicyLearner, probe: Probe, more: Mapping[str, Any]) -> CheckpointContents:
        """Collect the contents of a checkpoint; with adapters, only those.

        `more` is training state other than the optimizer's.
        """
        params: Mapping[str, Any] = learner.trained
        master = None
        if self.dtype != "float32" and not learner.frozen:
            master, params = params, {k: v.astype(jnp.dtype(self.dtype)) for k, v in params.items()}
        return CheckpointContents(params, learner.optimizer_state() | dict(more), master, self.config, probe)

    def published(self, learner: PolicyLearner) -> tuple[list[ManifestLeaf], Arrays]:
        """Describe the trained parameters for servers, with functions that copy them, valid until the next step."""
        return on_host(learner.trained, None if learner.frozen else self.dtype)


def _probe_ids(vocab_size: int) -> np.ndarray:
    """Return a fixed prompt, int32 [n], spread over the vocabulary."""
    ids = (np.arange(_PROBE_LENGTH, dtype=np.int64) * 7919 + 11) % vocab_size
    return ids.astype(np.int32)


def on_host(params: Params, dtype: str | None = None) -> tuple[list[ManifestLeaf], Arrays]:
    """List the arrays' names and shapes, and functions that copy each to the host, cast to `dtype` if given."""
    leaves = [ManifestLeaf(name, tuple(value.shape), dtype or str(value.dtype)) for name, value in params.items()]
    return leaves, {leaf.key: partial(_copy_to_host, params[leaf.key], leaf.dtype) for leaf in leaves}


def _copy_to_host(value: jax.Array, dtype: str) -> np.ndarray:
    return to_host(value.astype(dtype))


def named(what: Sequence[str]) -> str:
    """Join names for a sentence, with its verb: the first few, and the number of others."""
    shown = ", ".join(what[:_NAMED])
    more = f" and {len(what) - _NAMED} more" if len(what) > _NAMED else ""
    return f"{shown}{more} {'is' if len(what) == 1 else 'are'}"
