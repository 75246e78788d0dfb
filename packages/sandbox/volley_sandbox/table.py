"""Commands of the package."""

from volley.command import Command

ENV = Command(
    "volley_sandbox.commands.environments",
    "write, test, submit and manage your own environments",
    "env init maze.py",
    group="Models and environments",
)
