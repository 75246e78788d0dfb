"""A command of `volley`, as the core and the packages describe theirs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A module with `add(parser)`, which names its arguments, and `run(arguments)`, which returns the exit code.

    `group` is the heading in `volley --help` under which a package's command stands. `outlives_output`: it trains or
    serves, and goes on if nobody reads its output any more. A setting that is written as an option is looked for in
    `section` first.
    """

    module: str
    help: str
    example: str
    outlives_output: bool = False
    group: str = "Packages"
    section: str = "trainer"
