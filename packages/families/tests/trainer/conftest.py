"""As the trainer's own tests: virtual devices, quick compilation, and collected in its environment only."""

from tests.trainer.conftest import *  # noqa: F403
