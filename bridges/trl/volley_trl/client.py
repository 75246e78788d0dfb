"""TRL's client of a vLLM server, for a Volley server.

Completions are TRL's own requests to `/v1/completions` and `/v1/chat/completions`, read by TRL's own code. Weights go
into a safetensors folder that the server loads; NCCL, CUDA and the package vllm are not needed.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import torch
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient

RETRIED = frozenset({429, 502, 503})
ATTEMPTS = 6
LONGEST_WAIT_S = 30.0


class VolleyError(RuntimeError):
    """Refusal of the server, with the status and the reason that it gave."""


class VolleyClient(VLLMClient):
    """Client of one Volley server.

    Args:
        base_url: address of the server, for example http://127.0.0.1:8102.
        weights_folder: folder below the server's `--weights-root`, which trainer and server both reach.
        token: token that the server asks for; None for a server that asks for none.
        connection_timeout: seconds to wait for the server to be ready.
        request_timeout: seconds that one request may take: the generation of a batch, or loading weights.

    Raises ConnectionError if the server is not ready in time.
    """

    def __init__(  # TRL's own constructor needs the packages requests and vllm
        self,
        base_url: str,
        weights_folder: str | Path,
        token: str | None = None,
        connection_timeout: float = 240.0,
        request_timeout: float = 600.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.host = urlparse(base_url).hostname
        self.weights_folder = Path(weights_folder).absolute()
        self.communicator = None
        self.version: str | None = None
        """Name of the weights that this client sent last."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.session = httpx.Client(headers=headers, timeout=httpx.Timeout(request_timeout, connect=10.0))
        self._updating_weights = False
        self._tensors: dict[str, torch.Tensor] = {}
        self._prefix, self._n_updates = f"trl-{uuid.uuid4().hex[:8]}", 0
        self.check_server(connection_timeout)
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Wait until the server is ready. Raises ConnectionError."""
        until = time.monotonic() + total_timeout
        while True:
            try:
                answer = self.session.get(f"{self.base_url}/ready")
                if answer.is_success:
                    return
                why = _reason(answer)
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            if time.monotonic() >= until:
                raise ConnectionError(f"the Volley server at {self.base_url} is not ready: {why}")
            time.sleep(retry_interval)

    def get_server_info(self) -> dict[str, Any]:
        """Return what TRL reads of vLLM's settings; the log-probabilities are those at the request's temperature."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}, "weight_transfer_config": None}

    def get_world_size(self) -> int:
        return 1

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: weights are not sent over a process group."""

    def close_communicator(self) -> None:
        self.session.close()

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Send weights, at the end of `weight_update()` if it is open. Raises VolleyError; the old weights then serve.

        Args:
            metadata: not needed; the tensors carry names, dtypes and shapes.
            named_params: every parameter of the model under its Hugging Face name. The iterator is read to its end.
        """
        if alone := not self._updating_weights:
            self._start_weight_update()
        for name, tensor in named_params:
            # A copy, because TRL undoes a merged adapter when its iterator ends.
            self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if alone:
            self._finish_weight_update()

    def reset_prefix_cache(self) -> None:
        self._post(f"{self.base_url}/flush_cache")

    def _start_weight_update(self) -> None:
        self._tensors = {}

    def _finish_weight_update(self) -> None:
        tensors, self._tensors = self._tensors, {}
        if not tensors:
            return
        self._n_updates += 1
        version = f"{self._prefix}-{self._n_updates}"
        folder = self.weights_folder / version
        folder.mkdir(parents=True)
        try:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            body = {"model_path": str(folder), "weight_version": version}
            self._post(f"{self.base_url}/update_weights_from_disk", json=body)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.version = version

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._request("GET", url, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._request("POST", url, **kwargs)

    def _request(self, method: str, url: str, **kwargs: Any) -> dict[str, Any]:
        """Send a request, again if the server is busy or restarts. Raises VolleyError, httpx.TransportError."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self.session.request(method, url, **kwargs)
            except httpx.ConnectError:
                if attempt == ATTEMPTS:
                    raise
                time.sleep(_wait(attempt))
                continue
            if answer.is_success:
                return answer.json()
            if answer.status_code not in RETRIED or attempt == ATTEMPTS:
                raise VolleyError(f"{method} {url} was answered with {answer.status_code}: {_reason(answer)}")
            time.sleep(_wait(attempt, answer.headers.get("retry-after")))
        raise AssertionError


def _wait(attempt: int, asked: str | None = None) -> float:
    """Return how many seconds to wait before the next attempt: as the server asks, else twice as long each time."""
    try:
        wanted = float(asked) if asked else 0.5 * 2**attempt
    except ValueError:
        wanted = 0.5 * 2**attempt
    return min(wanted, LONGEST_WAIT_S)


def _reason(answer: httpx.Response) -> str:
    """Return the detail and the hint of a problem (RFC 9457), or the beginning of another body."""
    try:
        problem = answer.json()
        return "; ".join(str(problem[key]) for key in ("detail", "hint") if problem.get(key))
    except (ValueError, AttributeError, TypeError):
        return answer.text[:500]
