"""DAPO (arXiv:2503.14476): GRPO's advantages, with a higher upper bound of the ratio (`epsilon_high`) that leaves rare
tokens room to grow, the same weight for every token of the step (`token-mean`), and a soft punishment of overlong
episodes (see `Overlong`). Its fourth part, dynamic sampling, replaces groups whose rewards do not differ: that is a
filter, not a loss.
"""

from __future__ import annotations

from services.trainer.algorithms.terms.policy_gradient import GroupRelative


class Dapo(GroupRelative):
    """Its options say all that is particular."""

    estimator = "grpo"
