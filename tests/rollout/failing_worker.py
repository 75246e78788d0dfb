"""An engine's process that fails while it boots, as the variable FAILS says."""

import os
import signal
import sys
from typing import NoReturn

from services.rollout.engines.base import EngineSpec
from services.rollout.engines.sglang_jax import worker
from services.rollout.engines.sglang_jax.link import EngineLink
from shared.errors import ConfigError


def fail(_spec: EngineSpec, _link: EngineLink) -> NoReturn:
    match os.environ["FAILS"]:
        case "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(1)
        case "configuration":
            raise ConfigError("the pool does not fit", "lower it")
    raise AssertionError(os.environ["FAILS"])


if __name__ == "__main__":
    worker._boot = fail
    sys.exit(worker.main(int(sys.argv[1])))
