# /// script
# requires-python = ">=3.12"
# dependencies = []
# ///
"""Nim, played by the model against itself: take one, two or three; the player who takes the last one wins."""

import random

SEATS = ["first", "second"]
MOST = 3


class Nim:
    """Two seats of a game. In an evaluation, one of them is played here, at random.

    Args:
        opponent, eval_opponent: plays the other seat of training and evaluation tasks: `model`, `random` or `perfect`.
        demo_blind: share of the demonstrations that always take one; the others are perfect.
    """

    splits = {"train": 2000, "eval": 200}

    def __init__(self, opponent="model", eval_opponent="random", demo_blind=0.57):
        self.opponents, self.demo_blind = {"train": opponent, "eval": eval_opponent}, demo_blind

    def reset(self, split, index, seed):
        """Begin a game; return what the seat `info["seat"]` reads first."""
        self.start = 8 + 2 * (index // 2 % 4) + (split == "train")  # no evaluation game is a training game
        self.left = self.start
        self.random, self.opponent = random.Random(f"{split}/{index}/{seed}"), self.opponents[split]
        self.turn = 0
        # The seats that models play; the others are played here.
        self.seats = SEATS if self.opponent == "model" else [SEATS[index % 2]]
        if SEATS[0] not in self.seats:
            self.take(self.move(self.opponent))
        return self.shown(), {"seat": SEATS[self.turn]}

    def step(self, text):
        """Answer the text of the seat whose turn it is. What is returned is read by the next seat."""
        number = text.strip()
        if number not in ("1", "2", "3") or int(number) > self.left:
            return self.ended(winner=1 - self.turn, error="invalid_action" if number.isdecimal() else "format")
        self.take(int(number))
        if self.left and SEATS[self.turn] not in self.seats:
            self.take(self.move(self.opponent))
        if not self.left:
            return self.ended(winner=1 - self.turn)
        return self.shown(), 0.0, False, False, {"seat": SEATS[self.turn]}

    def shown(self):
        return f"{self.left} of {self.start} left"

    def take(self, n):
        self.left, self.turn = self.left - n, 1 - self.turn

    def move(self, player):
        if player == "blind":
            return 1
        best = self.left % (MOST + 1)
        return best if best and player == "perfect" else self.random.randint(1, min(MOST, self.left))

    def ended(self, winner, error=None):
        rewards = {seat: 1.0 if seat == SEATS[winner] else -1.0 for seat in self.seats}
        return "", 0.0, True, False, {"rewards": rewards, "error": error}

    def demonstration(self, split, index):
        """Optional: a game against random moves as one seat sees it, for the warm start of a random model."""
        _, info = self.reset(split, index, 0)
        me, messages = SEATS.index(info["seat"]), []
        mine = "blind" if self.random.random() < self.demo_blind else "perfect"
        while self.left:
            if self.turn != me:
                self.take(self.move("random"))
                continue
            n = self.move(mine)
            messages += [{"role": "user", "content": self.shown()}, {"role": "assistant", "content": str(n)}]
            self.take(n)
        return messages, False
