"""Trial compilation of a grammar in a process of its own, which limits of CPU time and memory end.

llguidance counts no fuel while it intersects expressions, so twenty of them may take hours, and a thread cannot be
ended. `python -m volley_serving.constraints.grammar_trial` reads a grammar in llguidance's own
format and compiles it for a vocabulary of single bytes, because the time does not depend on the vocabulary.
"""

from __future__ import annotations

import resource
import subprocess
import sys

from llguidance import LLMatcher, LLTokenizer

CPU_S = 3
_MEMORY = 2 << 30
_WALL_S = 60.0


def compiles_in_time(grammar: str) -> bool:
    """Return whether compiling ends within `CPU_S` seconds and 2 GiB; a grammar with errors ends as well."""
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", __name__]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=_WALL_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)


if __name__ == "__main__":
    _main()
