"""Tunix's RL trainer and losses as `trainer.backend: tunix`."""

from shared.backend_kinds import BackendKind
from volley_tunix.limits import problem

TUNIX = BackendKind("volley_tunix.learner:TunixLearner", n_logits=5, problem=problem)
"""The number of arrays of logits is measured (docs/measurements.md)."""
