"""The environment of the tutorial, run as it is printed."""

from pathlib import Path

from services.env.environments.kinds import kinds
from tests.docs.commands import first_example
from tests.env.conftest import OpenClient
from tests.support.submitted import decided, play, submit

DOCS = Path(__file__).parents[2] / "docs" / "builtin-environments.md"


async def test_the_documented_environment_is_taken_and_played(open_client: OpenClient) -> None:
    async with open_client() as client:
        await submit(client, first_example(), name="compass")
        row = await decided(client, "compass")
        assert (row["state"], row["report"]["warnings"]) == ("active", []), row
        replies = ("Left", "Down", "Right", "Up")
        rewards = [(await play(client, "compass", reply, reply)).json()["reward"] for reply in replies]
        assert sorted(rewards) == [0.0, 0.0, 0.0, 1.0]


def test_every_setting_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for kind in kinds().values():
        for name in kind.config.model_fields:
            assert f"`{name}" in text or f"{name}:" in text or f".{name}`" in text, name
