"""Online prompt filtering of PRIME (arXiv:2502.01456): train on tasks that are neither too easy nor too hard now.

A group is kept if 20 to 80 percent of its answers are right. DAPO's dynamic sampling only excludes 0 and 100.

    volley train --config configs/quickstart.yaml trainer.filters.custom=examples/rules/accuracy_bounds.py:keeps
"""

LEAST, MOST = 0.2, 0.8


def keeps(group):
    return LEAST <= group.success.mean() <= MOST
