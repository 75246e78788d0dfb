# /// script
# requires-python = ">=3.12"
# dependencies = []
# ///
"""Sums of two numbers. Change it, then: volley env test FILE; volley env submit FILE --weight 1"""


class Sums:
    splits = {"train": 1000, "eval": 100}  # number of tasks of each split

    def reset(self, split, index, seed):
        """Begin an episode of one task; return the text that the model reads first.

        The same (split, index) is the same task everywhere; `seed` drives everything random after its choice.
        """
        task = 2 * index + (split == "eval")  # no evaluation task is a training task
        self.a, self.b = task // 47, task % 47
        return f"{self.a}+{self.b}="

    def step(self, text):
        """Answer the model's text with (text it reads next, reward, terminated, truncated, info)."""
        right = text.strip() == str(self.a + self.b)
        return "", float(right), True, False, {"success": right}

    def demonstration(self, split, index):
        """Optional: a conversation to learn from."""
        prompt = self.reset(split, index, 0)
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": str(self.a + self.b)}]
