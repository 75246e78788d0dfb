from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.rollout.server import RolloutProcess, running_server
from tests.support import models


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutProcess]:
    """One server for all tests of the engine; each test makes the versions it needs."""
    folder: Path = tmp_path_factory.mktemp("rollout")
    with running_server(folder, models.tiny_config()) as server:
        yield server


@pytest.fixture
def prompts() -> list[list[int]]:
    """Twelve prompts of 5 to 40 tokens."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, 500, int(n)).tolist() for n in rng.integers(5, 40, 12)]
