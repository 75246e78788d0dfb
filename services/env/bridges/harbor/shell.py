"""Commands of a model in a container."""

import contextlib
import shlex
import time
import uuid
from typing import Any

from folders import MAX_WHY
from harbor.environments.base import BaseEnvironment

PROBE_S = 30.0
MAX_OUTPUT = 2**16
"""Bytes of a command's output; the middle of longer output is dropped."""
COMMAND = """
o=/tmp/.volley-{nonce}; {{ timeout -k 2 {timeout_s:g} bash -c {command} </dev/null; }} >"$o" 2>&1; c=$?
if [ "$(wc -c <"$o")" -gt {most} ]; then
head -c {half} "$o"; printf '\\n[middle of the output left out]\\n'; tail -c {half} "$o"
else cat "$o"; fi; rm -f "$o"; printf '\\n{nonce} %d' "$c"
"""
DISK = {"output": "", "exit": 137, "ended": "disk", "seconds": 0.0}
"""Answer to a command in a container that was removed for its files."""
NOTE = "cd /proc && echo [0-9]*"
"""List the processes of a container."""
END_OTHERS = """
cd /proc; for n in 1 2 3; do for p in [0-9]*; do
  case " {kept} " in *" $p "*) continue;; esac; [ "$p" = 1 ] || [ "$p" = $$ ] && continue
  a=$p; while :; do
    a=$(sed -n 's/^PPid:[^0-9]*//p' "$a/status" 2>/dev/null); [ "${{a:-0}}" -le 1 ] && break
    [ "$a" = $$ ] && break; case " {kept} " in *" $a "*) break;; esac
  done
  [ "${{a:-0}}" -gt 1 ] || kill -9 "$p" 2>/dev/null
done; done; true
"""
"""Kill every process but the first one, the `kept` ones and their descendants, and this shell.

Only for containers that surely have processes of their own.
"""
MARK = "VOLLEY_EPISODE"
"""Variable of a model's commands, the number of the episode."""
END_MARKED = """
for p in /proc/[0-9]*; do grep -qsz '^VOLLEY_EPISODE={number}$' "$p/environ" && kill -9 "${{p#/proc/}}"; done; true
"""
"""Kill the processes of a model's commands, except those that have dropped the variable."""


class Lost(Exception):
    """The container, or what runs it, does not answer."""


async def run_command(environment: BaseEnvironment, number: str, command: str, timeout_s: float) -> dict[str, Any]:
    """Run a command of the model. Raises Lost.

    The nonce at the end of the output proves that the container ran it to its end: Harbor reports an engine that does
    not answer as a command that failed.
    """
    nonce, began = uuid.uuid4().hex, time.monotonic()
    limits = {"timeout_s": timeout_s, "most": MAX_OUTPUT, "half": MAX_OUTPUT // 2}
    script = COMMAND.format(nonce=nonce, command=shlex.quote(command), **limits)
    text = ""
    with contextlib.suppress(RuntimeError):  # Harbor's time-out; the container itself ends the command before
        found = await environment.exec(script, env={MARK: number}, timeout_sec=int(timeout_s + PROBE_S))
        text = found.stdout or ""
    output, mark, code = text.rpartition(f"\n{nonce} ")
    if mark and code.isdigit():
        is_late = int(code) in (124, 137) and time.monotonic() - began >= timeout_s
        return {"output": output, "exit": int(code), "ended": "time" if is_late else ""}
    await probe(environment, text)
    return {"output": text, "exit": 137, "ended": ""}  # the command has killed its own shell


async def probe(environment: BaseEnvironment, seen: str = "") -> None:
    """Raise Lost unless the container answers."""
    nonce, text = uuid.uuid4().hex, ""
    try:
        found = await environment.exec(f"echo {nonce}", user="root", timeout_sec=int(PROBE_S))
        text = found.stdout or ""
    except Exception as error:  # noqa: BLE001 - told to the service
        text = str(error)
    if nonce not in text:
        raise Lost((text.strip() or seen.strip() or "it gave no answer")[-MAX_WHY:])
