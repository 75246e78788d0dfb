"""An environment in which any model earns something: each turn's reward is the share of letters in the answer.

What the environment answers is drawn from the episode's seed.
"""

import random


class Letters:
    splits = {"train": 16, "eval": 4}  # noqa: RUF012

    def reset(self, split, index, seed):
        self.random, self.turn = random.Random(seed), 0
        return f"{split} {index}: letters?"

    def step(self, text):
        self.turn += 1
        reward = sum(c.isalpha() for c in text) / max(1, len(text)) + self.random.randrange(2) / 8
        over = self.turn == 3
        return f"{self.random.randrange(10**6)}", reward, over, False, {"success": reward > 1}
