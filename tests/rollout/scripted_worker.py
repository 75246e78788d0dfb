"""An engine's process without an engine: requests and, told by a file's presence, stages, commits and the boot never
end.
"""

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from services.rollout.engines.sglang_jax.link import EngineLink, ServiceGone
from services.rollout.engines.sglang_jax.worker import beat

INFO = {
    "vocab_size": 512,
    "context_length": 256,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
    "eos_token_ids": [2],
    "boot_s": 0.0,
}


def answer(op: str, message: dict[str, Any], state: dict[str, Any]) -> Any:
    live = {"version": state.get("current"), "checksum": "c", "logprobs": None}
    match op:
        case "stage":
            state["staged"] = message["version"]
            return {"checksum": "c", "timings": {}}
        case "commit":
            previous, state["current"] = state.get("current"), state["staged"]
            live["version"] = state["current"]
            counts = {"continued": 0, "aborted": 0, "pause_s": 0.0}
            return {"version": state["current"], "previous": previous, "live": live, **counts}
        case "audit":
            return live
        case "status":
            return {"current": state.get("current")}
        case _:
            return 0


def run(link: EngineLink) -> None:
    state: dict[str, Any] = {}
    link.receive(60.0)
    script = Path(os.environ["SCRIPT"])
    if not (script / "hang-boot").exists():
        link.send({"op": "ready", "info": {**INFO, "pid": os.getpid()}})
    (script / "pid").write_text(str(os.getpid()), encoding="utf-8")
    while True:
        for message in link.receive(60.0):
            op = message["op"]
            if op != "generate" and not (script / f"hang-{op}").exists():
                link.send({"op": "reply", "call": message["call"], "value": answer(op, message, state)})
            else:
                (script / f"reached-{op}").touch()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = EngineLink(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(target=beat, args=(link,), daemon=True).start()
    try:
        run(link)
    except ServiceGone:
        os._exit(0)
