"""As the env service's own tests: files of problems, and a service without a socket."""

from tests.env.conftest import *  # noqa: F403
