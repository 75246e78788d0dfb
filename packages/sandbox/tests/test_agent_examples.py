"""The examples of agents, with the real packages: each solves its tasks when the model gives its demonstration."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shared.errors import Forbidden
from tests.docs.commands import example_of
from volley.layout import PROJECT
from volley_sandbox.agents.trial import TRIAL_S
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.submissions.templates import files, source_of

TEMPLATE = files()["agent"]
EXAMPLES = [TEMPLATE, *sorted((PROJECT / "examples" / "agents").glob("*.py"))]


@pytest.fixture
async def can_start_programs() -> None:
    async with Sandboxes() as sandboxes:
        try:
            await sandboxes.probe_programs()
        except Forbidden as error:
            pytest.skip(error.detail)


@pytest.mark.long
@pytest.mark.parametrize("file", EXAMPLES, ids=[file.stem for file in EXAMPLES])
def test_an_example_solves_its_tasks(file: Path, can_start_programs: None) -> None:
    command = [str(PROJECT / ".venvs" / "base" / "bin" / "volley"), "env", "test", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=8 * TRIAL_S, check=False)
    if ended.returncode == 2 and "the package index cannot be reached" in ended.stderr:
        pytest.skip("the package index cannot be reached")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "every reward was" not in ended.stdout, "the demonstration's rewards are equal"
    agent = next(line for line in ended.stdout.splitlines() if line.split()[:2] == ["ok", "agent:"])
    assert agent.count("reward 1") == 2


def test_the_template_is_the_page_s_example() -> None:
    assert source_of("agent").decode() == example_of("docs/agents.md")
