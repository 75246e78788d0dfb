"""Limits that count the seconds in which a program had a processor."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import SandboxLost
from volley_sandbox.sandbox.clock import ProcessorShare, limited, processor_share


async def slept(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def test_a_program_that_waits_for_ever_is_late() -> None:
    with pytest.raises(TimeoutError):
        await limited(slept(60), 0.1, share_now=lambda: 1.0)


async def test_a_program_keeps_its_time_while_the_machine_is_busy() -> None:
    found, used_s = await limited(slept(1.2), 0.6, share_now=lambda: 0.1)
    assert found == "done"
    assert used_s < 0.6


async def test_a_machine_that_is_too_busy_is_no_fault_of_the_program() -> None:
    with pytest.raises(SandboxLost, match="too busy"):
        await limited(slept(60), 0.1, 0.2, lambda: 0.01)
    with pytest.raises(TimeoutError):
        await limited(slept(60), 0.3, 0.2, lambda: 1.0)  # it had most of its time


async def test_a_call_that_is_given_up_is_cancelled() -> None:
    call = asyncio.ensure_future(asyncio.sleep(60))

    async def wait() -> None:
        await call

    with pytest.raises(TimeoutError):
        await limited(wait(), 0.05, share_now=lambda: 1.0)
    assert call.cancelled()


def test_a_share_of_a_processor() -> None:
    assert 0 < processor_share() <= 1


async def test_calls_at_the_same_time_measure_the_share_once() -> None:
    """Otherwise forty calls keep a processor busy, and each of them seems to have a part of one."""
    measured = list[float]()

    def measure() -> float:
        measured.append(0.02)
        return 0.02

    share = ProcessorShare(measure, valid_s=3600)
    await asyncio.gather(*(asyncio.to_thread(share) for _ in range(40)))
    assert len(measured) == 1
