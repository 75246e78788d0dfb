"""Play the last version of a run against earlier ones, and print who wins.

python recipes/self_play/versions.py runs/recipes/self_play-nim-0

An earlier version runs in `volley serve` and plays one seat, drawn at temperature 1. `volley eval` plays the other one,
greedily: in half of the games it begins. The greedy player has an advantage, which the last row shows: there both
players are the last version.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from shared.process.ports import free_port
from volley.printing import print_lines

CONFIG = Path(__file__).with_name("config.yaml")
SEATS, SHARES = ("first", "second"), (0, 1 / 3, 2 / 3, 1)
READY_S = 300


def main(run: Path) -> None:
    versions = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("e"))
    last = len(versions) - 1
    print_lines("| last version against | wins | 95 % interval | games |", "|---|---|---|---|")
    for earlier in [versions[round(share * last)] for share in SHARES]:
        with tempfile.TemporaryDirectory() as folder:
            found = played(f"{run}@{versions[last]}", f"{run}@{earlier}", Path(folder))
        low, high = found["low"] * 100, found["high"] * 100
        print_lines(f"| {earlier} | {found['success']:.1%} | {low:.1f}–{high:.1f} % | {found['n_tasks']} |")


def played(policy: str, other: str, folder: Path) -> dict[str, Any]:
    """Evaluate `policy` with `other` in one seat of each game; return the row of `volley eval`."""
    key, players, result = folder / "key", folder / "players.yaml", folder / "result.json"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(), encoding="utf-8")
    with served(other, key) as url:
        seat = {"server": "other", "share": 0.5, "request": {"temperature": 1, "max_tokens": 3}}
        section = {
            "servers": {"other": {"url": url, "token_file": str(key)}},
            "games": {"self_play": dict.fromkeys(SEATS, seat)},
        }
        changes = {"services": {"env": {"players": section}}, "data": {"env_config": {"eval_opponent": "model"}}}
        players.write_text(yaml.safe_dump(changes), encoding="utf-8")
        configs = ["--config", str(CONFIG), "--config", str(players)]
        subprocess.run([*volley("eval", policy), *configs, "--json", str(result)], check=True, stdout=sys.stderr)
    return json.loads(result.read_bytes())["evaluations"][0]


@contextmanager
def served(model: str, key: Path) -> Iterator[str]:
    """Run `volley serve`; yield the address of its OpenAI API once it answers."""
    port = free_port()
    command = volley("serve", model, "--port", str(port), "--api-key-file", str(key), "--context-length", "144")
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            deadline = time.monotonic() + READY_S
            while not answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"volley serve {model} is not ready")
                time.sleep(0.3)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def volley(*arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", "volley", *arguments]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
