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
        case "configuration":
            raise ConfigError("the pool does not fit", "lower it")
        case "device":
            from jax.errors import JaxRuntimeError

            raise JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_INSTRUCTION")
    raise RuntimeError("a defect")


if __name__ == "__main__":
    worker._boot = fail
    sys.exit(worker.main(int(sys.argv[1])))
