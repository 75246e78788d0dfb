"""Assembly of the lines of metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from services.trainer.algorithms.terms.added import added_terms
from services.trainer.groups.filters import shares_without_variance
from services.trainer.metrics.step_metrics import StepMetrics, of_components, of_environments
from shared.run.chain import as_read
from shared.types import Group


def step_line(
    metrics: StepMetrics, groups: Sequence[Group], seconds: Mapping[str, float], main_env: str, *, mask_truncated: bool
) -> dict[str, Any]:
    """Return an RL step's line of metrics.jsonl, as it is read back from the file.

    Args:
        groups: groups of the step.
        seconds: by part of the step, at least `step` and `wait`.
        main_env: main environment; groups of it alone get no figures by environment.
        mask_truncated: truncated episodes are outside the loss.
    """
    line = asdict(metrics)
    more = line.pop("more") | shares_without_variance(groups, mask_truncated=mask_truncated)
    more |= of_environments(groups, main_env) | of_components(groups)
    if any(t.teacher_logprobs is not None or t.teacher_view is not None for one in groups for t in one.trajectories):
        more |= added_terms().teacher_metrics(groups)
    rate = metrics.tokens / (seconds["step"] + seconds["wait"])
    rounded = {f"{part}_s": round(took, 4) for part, took in seconds.items()}
    return as_read(line | more | {"time": time.time(), **rounded, "tokens_per_sec": round(rate, 1)})
