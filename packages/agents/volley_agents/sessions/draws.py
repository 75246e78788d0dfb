"""Number the samples of one prompt, so that each has its own seed."""

from __future__ import annotations

from volley_agents.sessions.messages import Digest


class Draws:
    """Last number of each prompt, by the digest of its request."""

    def __init__(self) -> None:
        self._last: dict[Digest, int] = {}

    def reserve(self, prompt: Digest, after: int, n: int) -> range:
        """Reserve numbers for n samples, above `after` and all that are reserved."""
        first = max(after, self._last.get(prompt, -1)) + 1
        self._last[prompt] = first + n - 1
        return range(first, first + n)

    def free(self, prompt: Digest, numbers: range) -> None:
        """Release the last numbers of an abandoned call, so that its repetition samples the same."""
        if self._last.get(prompt) == numbers[-1]:
            self._last[prompt] = numbers[0] - 1
