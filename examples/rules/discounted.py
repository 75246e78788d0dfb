"""Discounted credit of turns, as in GiGPO (arXiv:2505.10978): a turn is worth its reward and a share of what follows,

    R_k = r_k + gamma R_{k+1}

so that early turns are compared by how fast they led to success: of two episodes that succeed, the shorter is better.

    volley train --config configs/quickstart.yaml algorithm.credit=examples/rules/discounted.py:credit
"""

import numpy as np

GAMMA = 0.95


def credit(turns):
    worth = np.array(turns.rewards)
    for k in range(len(worth) - 2, -1, -1):
        worth[k] += GAMMA * worth[k + 1]
    return worth
