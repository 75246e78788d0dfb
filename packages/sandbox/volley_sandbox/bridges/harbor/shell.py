"""Commands in a container, with limits that hold on a busy machine.

A limit is seconds in which the container has a processor. Beside each command a clock runs in the container; every
second it measures how much longer a loop takes than the loop's own CPU time, and counts the second by that share. (The
loop is longer than a slice of the scheduler, because a process that wakes up gets its first slice at once. A command
that has used 10 s is looked at less often, up to every 5 s, because each look takes 30 ms of CPU time.)
So a command that waits for a processor keeps its time, while one that computes, or sleeps, for ever uses it up. A
command whose own processes crowd out the clock uses up as much as the container's share of all processors.
"""

import asyncio
import shlex
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from folders import MAX_WHY
from harbor.environments.base import BaseEnvironment

PROBE_S = 180.0
LOOK_S = 60.0
"""Seconds after which a container in which a command runs is asked for an answer."""
SLOWEST = 60.0
"""A command that has not used up its limit after this many times as long is given up."""
MAX_OUTPUT = 2**16
"""Bytes of a command's output; the middle of longer output is dropped."""
ENDED, KILLED = (124, 137, 143), 137
"""Exit codes of commands that the clock has ended, and of killed ones."""
RUN = r"""
n=$1 c=$2 limit=$3 longest=$4 most=$5
exec 2>/dev/null
spent() {
  v1=/sys/fs/cgroup/cpuacct v2=/sys/fs/cgroup u=0 # neither of the whole machine
  if [ -e "$v2/cgroup.events" ]; then read -r _ u <"$v2/cpu.stat"; u=$((u / 10000))
  elif [ ! -e "$v1/release_agent" ]; then read -r u <"$v1/cpuacct.usage"; u=$((u / 10000000)); fi
  echo "$((u / $(nproc || echo 1)))"
}
clock() {
  trap '[ "$used" -lt "$limit" ] && echo 2 >"$o.end" || echo 1 >"$o.end"; kill -TERM "$t"' EXIT
  LC_ALL=C; TIMEFORMAT='%R %U %S'; used=0; failed=0
  read -r a _ </proc/uptime; a=${a/./}; first=$a; before=$(spent)
  while [ "$used" -lt "$limit" ] && [ "$((a - first))" -lt "$longest" ]; do
    s=$((used / 1000 + 1)); left=$(((limit - used) / 100 + 1)); [ "$s" -le 5 ] || s=5; [ "$s" -le "$left" ] || s=$left
    sleep "$s" || { failed=$((failed + 1)); [ "$failed" -lt 50 ] || break; }
    r=$({ time for ((i = 0; i < 25000; i++)); do :; done; } 2>&1); r=(${r//./})
    real=$((10#${r[0]})); cpu=$((10#${r[1]} + 10#${r[2]}))
    [ "$cpu" -gt 0 ] || cpu=1; [ "$real" -ge "$cpu" ] || real=$cpu
    read -r b _ </proc/uptime; b=${b/./}
    used=$((used + (b - a) * cpu / real)); a=$b; own=$(($(spent) - before))
    [ "$own" -le "$used" ] || used=$own; echo "$used" >"$o.used"
  done
}
o=/tmp/.volley-$n; echo "$n"; set -m
timeout -k 2 "$((longest / 100 + 60))" bash -c "$c" </dev/null >"$o" 2>&1 & t=$!
clock </dev/null >/dev/null & k=$!
set +m; wait "$t"; c=$?; kill -9 -- -"$k"
if [ "$(wc -c <"$o")" -gt "$most" ]; then
head -c "$((most / 2))" "$o"; printf '\n[middle of the output left out]\n'; tail -c "$((most / 2))" "$o"
else cat "$o"; fi
printf '\n%s %d %d %d' "$n" "$c" "$(cat "$o.end" || echo 0)" "$(cat "$o.used" || echo 0)"
rm -f "$o" "$o.end" "$o.used"
"""
"""Run the command `c` with a clock: print the nonce `n`, its output, the nonce, its exit code, `end` and `used`.

`end` is 1 if `limit` was used up, 2 after `longest`, else 0. Times are in hundredths of a second, `most` in bytes.
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


@dataclass(frozen=True)
class Ran:
    """End of a command. `seconds` are those in which the container had a processor; `late` says they were too many.

    `ended` is false if the command has ended the shell that waited for it.
    """

    output: str
    code: int = 137
    late: bool = False
    seconds: float = 0.0
    ended: bool = True


async def run(environment: BaseEnvironment, command: str, limit_s: float, **options: Any) -> Ran:
    """Run a command. Raises Lost.

    The nonces prove that the container has begun and ended it: Harbor reports an engine that does not answer as a
    command that failed.
    """
    nonce, longest_s = uuid.uuid4().hex, SLOWEST * limit_s
    times = (f"{100 * limit_s:.0f}", f"{100 * longest_s:.0f}")
    script = shlex.join(["bash", "-c", RUN, "volley", nonce, command, *times, str(MAX_OUTPUT)])
    try:
        text = await _watched(
            environment, environment.exec(script, timeout_sec=int(longest_s + 2 * PROBE_S), **options)
        )
    except (RuntimeError, TimeoutError) as error:
        text = str(error)
    before, begun, text = text.partition(f"{nonce}\n")
    if not begun:
        raise Lost(f"a command was not begun: {before.strip()[-MAX_WHY:] or 'no answer'}")
    output, mark, end = text.rpartition(f"\n{nonce} ")
    if not mark:
        return Ran(text, ended=False)
    code, why, used = map(int, end.split())
    if why == 2 and code in ENDED:
        raise Lost(f"a command had a processor for {used / 100:.1f} of its {limit_s:g} s within {longest_s:g} s")
    return Ran(output, code, why == 1 and code in ENDED, used / 100)


async def _watched(environment: BaseEnvironment, execution: Coroutine[Any, Any, Any]) -> str:
    """Wait for the output of a command. Raises Lost if the container does not answer meanwhile."""
    running = asyncio.ensure_future(execution)
    try:
        while not (await asyncio.wait([running], timeout=LOOK_S))[0]:
            await probe(environment)
        return (await running).stdout or ""
    finally:
        running.cancel()


async def run_command(environment: BaseEnvironment, number: str, command: str, timeout_s: float) -> dict[str, Any]:
    """Run a command of the model. Raises Lost."""
    ran = await run(environment, command, timeout_s, env={MARK: number})
    if not ran.ended:  # the command has killed its own shell, or the container is gone
        await probe(environment, ran.output)
    return {"output": ran.output, "exit": ran.code, "ended": "time" if ran.late else "", "seconds": ran.seconds}


async def probe(environment: BaseEnvironment, seen: str = "") -> None:
    """Raise Lost unless the container answers."""
    try:
        await ask(environment, ":")
    except Lost as error:
        raise Lost(str(error) or seen.strip()[-MAX_WHY:] or "it gave no answer") from None


async def ask(environment: BaseEnvironment, script: str) -> str:
    """Run a script of the service's own as root; return its output. Raises Lost unless it runs to its end."""
    nonce = uuid.uuid4().hex
    try:
        found = await environment.exec(f"{script}\necho {nonce}", user="root", timeout_sec=int(PROBE_S))
        text = found.stdout or ""
    except Exception as error:  # noqa: BLE001 - told to the service
        text = str(error)
    output, mark, _ = text.rpartition(nonce)
    if not mark:
        raise Lost(text.strip()[-MAX_WHY:])
    return output
