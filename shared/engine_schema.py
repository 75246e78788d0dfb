"""The rollout servers' engine in the run's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import PositiveInt, model_validator

from shared import engine_kinds
from shared.section import NameOf, Section
from shared.services_schema import Url


class EngineSection(Section):
    """Engine of the rollout servers. `sglang_jax` is the one that they start themselves; packages add other kinds.

    Sizes are in tokens, except `max_running_requests`. Paddings list the shapes to compile at start; null compiles on
    demand.

    Some kinds are servers of other projects that run already, at `url`: one address for each of
    services.rollout_replicas. `api_key_file` holds the server's API key. New weights are written below `weights_dir`,
    which the server reads under the same path (default: in the run's folder).
    """

    kind: Annotated[str, NameOf(engine_kinds.names)] = "sglang_jax"
    url: Url | tuple[Url, ...] | None = None
    api_key_file: Path | None = None
    weights_dir: Path | None = None
    device: Literal["cpu", "tpu", "gpu"] = "cpu"
    tp_size: PositiveInt = 1
    context_length: PositiveInt = 512
    max_running_requests: PositiveInt = 64
    max_total_tokens: PositiveInt | None = None
    max_prefill_tokens: PositiveInt = 2048
    precompile_token_paddings: tuple[PositiveInt, ...] | None = None
    precompile_bs_paddings: tuple[PositiveInt, ...] | None = None

    @property
    def is_external(self) -> bool:
        """True if the engine is a server of another project, which Volley does not start."""
        return engine_kinds.kind_of(self.kind).is_external

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url or ()

    @model_validator(mode="after")
    def _addressed(self) -> EngineSection:
        if self.is_external and not self.urls:
            raise ValueError(f"kind={self.kind} needs url: the address of the server")
        for key in ("url", "api_key_file", "weights_dir"):
            if getattr(self, key) is not None and not self.is_external:
                raise ValueError(f"{key} is of servers that run already, and kind={self.kind} is started by Volley")
        if wrong := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"url={wrong[0]} is not an address like http://HOST:PORT")
        if len({*self.urls}) < len(self.urls):
            raise ValueError("url names a server twice: each rollout server needs its own")
        return self
