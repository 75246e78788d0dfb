from tests.support.redis import redis, redis_server, redis_url  # noqa: F401
