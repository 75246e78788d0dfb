# /// script
# requires-python = ">=3.12"
# dependencies = []
# ///
"""One short sentence that holds two given words, for the configuration beside it. Right is: both words, one sentence
with its full stop, and no more than `MOST` words, which is some more than are asked for.
"""

import re

MOST = 16
WORDS = re.findall(
    r"\w+",
    """apple bread bridge candle chair cloud doctor dog engine farmer forest garden guitar hammer horse island jacket
    kitchen ladder lemon market mirror mountain needle orange pencil queen rabbit river school table teacher train
    umbrella valley window""",
)
PAIRS = [(a, b) for a in WORDS for b in WORDS if a < b]
HELD_OUT, LEARNT = PAIRS[::5], [pair for number, pair in enumerate(PAIRS) if number % 5]


class ShortSentences:
    splits = {"train": len(LEARNT), "eval": len(HELD_OUT)}

    def reset(self, split, index, seed):
        pairs = LEARNT if split == "train" else HELD_OUT
        self.words = pairs[index * 97 % len(pairs)]  # 97 divides neither number: every pair comes once
        a, b = self.words
        return f'Write a short sentence of at most ten words that contains the words "{a}" and "{b}".'

    def step(self, text):
        said = re.findall(r"[a-z']+", text.lower())
        sentence = re.fullmatch(r"[^.!?\n]+[.!?]", text.strip()) is not None
        right = sentence and len(said) <= MOST and all(word in said for word in self.words)
        return "", float(right), True, False, {"success": right}
