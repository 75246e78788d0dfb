"""Layouts of steps that earlier engines of the same settings compiled, stored next to JAX's compilation cache.

An engine that starts compiles them again while it has nothing else to do, mostly from the cache, so the first request
of a shape does not wait for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sgl_jax.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sgl_jax.srt.speculative.spec_info import SpeculativeAlgorithm

from services.rollout.engines.base import EngineSpec
from services.rollout.engines.sglang_jax.scheduling.inputs import Layout

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_MOST = 32
"""Layouts that are kept; the newest count."""
_CODE = Path(__file__).parents[1]


class KnownShapes:
    """Layouts that this engine has compiled, and those in `file` that it has not. Without a file it remembers none."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._compiled = file, dict[Layout, None]()
        self._waiting = _read(file)

    def add(self, layout: Layout) -> None:
        """Note that a layout was compiled."""
        if layout not in self._compiled:
            self._compiled[layout] = None
            if self._file is not None:
                _write(self._file, [*dict.fromkeys([*_read(self._file), layout])][-_MOST:])

    def drop(self, layout: Layout) -> None:
        """Forget a layout that cannot be compiled."""
        if self._file is not None:
            _write(self._file, [known for known in _read(self._file) if known != layout])

    def next(self) -> Layout | None:
        """Return a layout of an earlier engine that this one has not compiled, the first used one first, or None."""
        while self._waiting:
            if (layout := self._waiting.pop(0)) not in self._compiled:
                return layout
        return None


def file_of(spec: EngineSpec) -> Path | None:
    """Return the file for engines of these settings and this code; None without a compilation cache.

    None as well where the settings name the shapes to compile, because those are compiled before the engine is ready.
    """
    folder = os.environ.get(_FOLDER)
    if not folder or spec.device == "tpu" or spec.token_paddings is not None or spec.bs_paddings is not None:
        return None
    settings = dataclasses.asdict(dataclasses.replace(spec, model_path="", tokenizer=None, server=None))
    parts = [json.dumps(settings, sort_keys=True).encode(), Path(spec.model_path, "config.json").read_bytes()]
    parts += [version(name).encode() for name in ("jax", "jaxlib", "sglang-jax")]
    parts += [file.read_bytes() for file in sorted(_CODE.rglob("*.py"))]
    return Path(folder, f"shapes-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}.json")


def _read(file: Path | None) -> list[Layout]:
    if file is not None:
        with suppress(OSError, ValueError, TypeError, OverflowError, RecursionError):
            return [_layout(*fields) for fields in json.loads(file.read_bytes())][-_MOST:]
    return []


def _layout(mode: int, hidden: int, algorithm: int, n_requests: int, n_top: int, parts: list[list[Any]]) -> Layout:
    names = tuple((str(name), int(n)) for name, n in parts)
    kinds = ForwardMode(mode), CaptureHiddenMode(hidden), SpeculativeAlgorithm(algorithm)
    return Layout(*kinds, int(n_requests), int(n_top), names)


def _write(file: Path, layouts: Iterable[Layout]) -> None:
    """Replace the file; nothing is stored if the folder cannot be written."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(list(layouts)), encoding="utf-8")
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
