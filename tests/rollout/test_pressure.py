"""Crowds, clients that vanish, cut connections, and updates in the middle of it all, on the real engine: nothing is
left behind.
"""

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest

from shared.clients.rollout import RolloutClient
from shared.errors import ServiceUnreachable
from tests.rollout.server import MAX_RUNNING, POOL, RolloutProcess, wait_until
from tests.support import models

CROWD = 10 * MAX_RUNNING


def idle(server: RolloutProcess) -> None:
    """Nobody's requests have ended, and every slot of the pool is free once the cache is emptied."""
    wait_until(lambda: (status := server.status())["running"] == status["queued"] == 0)
    server.post("/flush_cache", {})
    assert server.status()["free_kv_tokens"] == POOL


def request_bytes(prompt: list[int], n: int) -> bytes:
    body = json.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": n, "ignore_eos": True}}).encode()
    return (
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def vanish(server: RolloutProcess, prompt: list[int], rng: random.Random) -> None:
    """Sends a request, or a part of it, and resets the connection at some moment, perhaps within the answer."""
    data = request_bytes(prompt, rng.choice([1, 5, 200]))
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(data[: rng.choice([30, len(data) - 5, len(data), len(data), len(data)])])
        client.settimeout(rng.choice([0.001, 0.05, 0.5]))
        with suppress(TimeoutError):
            client.recv(20)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_crowd_of_which_half_vanishes_is_served_and_leaves_nothing(
    server: RolloutProcess, prompts: list[list[int]]
) -> None:
    rng = random.Random(5)
    with ThreadPoolExecutor(CROWD) as pool:
        stay = [pool.submit(server.generate, rng.choice(prompts), 6) for _ in range(CROWD // 2)]
        gone = [pool.submit(vanish, server, rng.choice(prompts), random.Random(i)) for i in range(CROWD // 2)]
        assert all(len(future.result()["output_ids"]) == 6 for future in stay)
        assert [future.result() for future in gone] == [None] * len(gone)
    idle(server)


@asynccontextmanager
async def cutting(server: RolloutProcess, after: int) -> AsyncIterator[str]:
    """The url of a proxy that passes everything on, and resets both connections after so many bytes of the answer."""
    port = int(server.url.rpartition(":")[2])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, request = await asyncio.open_connection("127.0.0.1", port)
        try:
            request.write(await reader.read(1 << 16))
            if after:
                writer.write(await upstream.read(after))
                await writer.drain()
            else:
                await asyncio.sleep(0.2)
        finally:
            for side in (writer, request):
                side.transport.abort()

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with proxy:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("after", [0, 7, 150])
async def test_a_connection_cut_on_the_way_is_one_clean_error(
    server: RolloutProcess, prompts: list[list[int]], after: int
) -> None:
    """Before the answer, within its head, within its body."""
    n = 200 if after == 0 else 8
    async with cutting(server, after) as url, RolloutClient(url) as client:
        for i in range(3):
            with pytest.raises(ServiceUnreachable):
                await client.generate(
                    np.array(prompts[i], np.int32), {"max_new_tokens": n, "ignore_eos": True}, f"cut-{after}-{i}"
                )
    await asyncio.to_thread(idle, server)


def test_every_token_is_its_versions_while_versions_come_under_load(
    server: RolloutProcess, prompts: list[list[int]]
) -> None:
    """Random modes and moments. In place, tokens come from keys of older weights: there only the labels
    can be checked.
    """
    rng = random.Random(11)
    order = [server.get("/weights")["current"]]
    for seed, mode in enumerate(["retract", "in_place", "abort", "retract"], 20):
        many = rng.choices(prompts, k=2 * MAX_RUNNING)
        started = [server.start(prompt, rng.choice([8, 30, 60])) for prompt in many]
        version = server.new_version()
        server.publish(version, seed)
        time.sleep(rng.random() * 0.3)
        server.post("/update_weights", {"manifest": str(server.root / "pushed" / version), "mode": mode})
        order.append(version)
        answers = [future.result() for future in started]
        for answer in answers:
            spans = answer["meta_info"]["weight_versions"]
            labels = [order.index(span["version"]) for span in spans]
            assert labels == sorted(set(labels))
            assert [0, *(s["end"] for s in spans)] == [*(s["start"] for s in spans), len(answer["output_ids"])]
        checked = [
            (p, a)
            for p, a in zip(many, answers, strict=True)
            if mode != "in_place" or len(a["meta_info"]["weight_versions"]) == 1
        ]
        assert max(server.error(p, a) for p, a in rng.sample(checked, 6)) <= 1e-4
    idle(server)


def test_stages_at_once_leave_one_version_ready(server: RolloutProcess) -> None:
    """Each replaces the one before; those that find too many waiting are told so."""
    folder = server.root / "at-once"
    versions = [server.new_version() for _ in range(12)]
    weights = models.random_weights(server.config, 50)
    for version in versions:
        models.write_checkpoint(folder, version, server.config, weights)
    calls = [
        server.pool.submit(server.http.post, "/weights/stage", json={"manifest": str(folder / version)})
        for version in versions
    ]
    statuses = {call.result().status_code for call in calls}
    assert statuses <= {200, 503}
    staged = server.get("/weights")["staged"]
    assert server.status()["staged"] == staged
    server.weights[staged] = weights
    server.post("/weights/commit", {"version": staged, "mode": "retract"})
    assert server.error([5, 6, 7], server.generate([5, 6, 7], 8)) <= 1e-4
