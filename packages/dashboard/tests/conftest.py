from tests.support.redis import redis_server  # noqa: F401
