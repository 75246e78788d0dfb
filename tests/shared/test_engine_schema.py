"""Settings of engines that are servers of other projects."""

from pathlib import Path
from typing import Any

import pytest

from shared.config import validate
from shared.errors import ConfigError

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def configured(replicas: int = 1, **engine: Any) -> Any:
    tree = {
        "model": {"path": "x"},
        "data": {"env": "x"},
        "rollout": {"engine": engine},
        "services": {"rollout_replicas": replicas},
    }
    return validate(tree).config.rollout.engine


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ({}, ()),
        ({"kind": "vllm", "url": URLS[0]}, (URLS[0],)),
        ({"kind": "sglang", "url": URLS, "replicas": 2, "weights_dir": "/mnt/w"}, tuple(URLS)),
    ],
)
def test_each_server_has_an_address(given: dict[str, Any], urls: tuple[str, ...]):
    engine = configured(**given)
    assert (engine.urls, engine.is_external) == (urls, bool(urls))
    assert engine.weights_dir == (Path("/mnt/w") if "weights_dir" in given else None)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"kind": "vllm"}, "url"),
        ({"kind": "sglang", "url": []}, "url"),
        ({"url": URLS[0]}, "url"),
        ({"weights_dir": "/mnt/w"}, "weights_dir"),
        ({"kind": "vllm", "url": URLS}, "rollout.engine.url"),
        ({"kind": "vllm", "url": [URLS[0]] * 2, "replicas": 2}, "url"),
        ({"kind": "vllm", "url": "http://u:p@127.0.0.1:1"}, "password"),
        ({"kind": "vllm", "url": "127.0.0.1:8000"}, "url=127.0.0.1:8000"),
        ({"kind": "other", "url": URLS[0]}, "kind"),
    ],
)
def test_what_cannot_be_reached_is_refused(given: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as refused:
        configured(**given)
    assert key in str(refused.value)
