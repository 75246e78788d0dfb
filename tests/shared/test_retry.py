import pytest

from shared.errors import InputError, Unavailable
from shared.retry import retry


async def test_unavailable_is_retried_and_others_are_not():
    calls = []

    async def flaky(error, succeed_at):
        calls.append(1)
        if len(calls) < succeed_at:
            raise error
        return len(calls)

    assert await retry(lambda: flaky(Unavailable("x", retry_after_s=0), 3), attempts=3, base_s=0.001) == 3
    calls.clear()
    with pytest.raises(Unavailable):
        await retry(lambda: flaky(Unavailable("x", retry_after_s=0), 9), attempts=2, base_s=0.001)
    assert len(calls) == 2
    calls.clear()
    with pytest.raises(InputError):
        await retry(lambda: flaky(InputError("x"), 9), attempts=5)
    assert len(calls) == 1
