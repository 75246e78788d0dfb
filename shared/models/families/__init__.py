"""Model families: each module here has the name of a `model_type` and holds its record as `FAMILY`.

Packages bring the records of others (`volley.families`). The trainer builds the model from the record; the engine has a
class of the record's architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from shared import packages
from shared.models.family import SLIDING, Family


@cache
def families() -> Mapping[str, Family]:
    """Every family by its `model_type`, in that order. Raises ConfigError."""
    own = {module.name: import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)}
    return dict(sorted({**packages.loaded(packages.FAMILIES), **own}.items()))


def supported() -> str:
    """Hint for errors: the families and their limits."""
    names = ", ".join(f"{family.title} ({model_type})" for model_type, family in families().items())
    sliding = ", ".join(family.title for family in families().values() if SLIDING in family.layer_types)
    return f"supported model types are {names}: no quantization, and sliding windows only in {sliding}"
