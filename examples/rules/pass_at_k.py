"""Advantages for pass@k (arXiv:2508.10751, eq. 12 to 15): an answer is worth what it adds to k answers of its task.

With n answers to a task, m of them wrong, k drawn at random solve it with probability R = 1 - C(m, k) / C(n, k):

    A(right) = (1 - R) / sd,    A(wrong) = (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / sd,    sd^2 = R (1 - R)

    volley train --config configs/quickstart.yaml algorithm.advantage=examples/rules/pass_at_k.py:advantage
"""

from math import comb

import numpy as np

K = 4


def advantage(group):
    right = group.rewards > 0
    n, m = len(right), int((~right).sum())
    k = min(K, n)
    solved = 1 - comb(m, k) / comb(n, k)
    if solved in (0, 1):
        return np.zeros(n)
    wrong = 1 - solved - comb(m - 1, k - 1) / comb(n - 1, k - 1)
    return np.where(right, 1 - solved, wrong) / np.sqrt(solved * (1 - solved))
