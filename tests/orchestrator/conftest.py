"""A real Redis for the component tests."""

from tests.support.redis import redis, redis_server, redis_url  # noqa: F401
