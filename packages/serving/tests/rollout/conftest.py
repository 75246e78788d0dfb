"""As the rollout server's own tests."""

from tests.rollout.conftest import *  # noqa: F403
