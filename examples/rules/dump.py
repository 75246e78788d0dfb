"""DUMP (arXiv:2504.09710): a bandit plays the environment whose groups have the largest advantages, or are least known,

    UCB = mean |A| + sqrt(2 log(n + 1) / (n_env + 1)),    share ~ exp(UCB / tau)

with n_env of all n groups. Of a group whose share p of answers is right, the mean of |A| is 2 sqrt(p (1 - p)).

    volley train --config configs/quickstart.yaml data.mixture.sokoban=1 \
        data.curriculum.custom=examples/rules/dump.py:curriculum
"""

import numpy as np

TAU = 0.5


def curriculum(mixture):
    n, scores = sum(one.tickets for one in mixture.envs.values()), {}
    for name, one in mixture.envs.items():
        advantage = 2 * np.sqrt(one.success * (1 - one.success))
        known = advantage.mean() if len(advantage) else 0
        scores[name] = known + np.sqrt(2 * np.log(n + 1) / (one.tickets + 1))
    best = max(scores.values())
    return {name: np.exp((score - best) / TAU) for name, score in scores.items()}
