"""Tunix's own `__init__` runs only for a name that it defines."""

from __future__ import annotations

import subprocess
import sys

from volley.layout import PROJECT, variables_of

_PROGRAM = """
import sys
import services.trainer.models.decoder
import tunix
heavy = lambda: bool({"pandas", "tensorboardX"} & set(sys.modules))
assert not heavy(), "the trainer's models load the whole of Tunix"
assert not hasattr(tunix, "__wrapped__") and not heavy(), "looking at the module loads the whole of Tunix"
loaded = {name: module for name, module in sys.modules.items() if name.startswith("tunix.")}
from tunix import GRPOConfig
assert loaded, "no layer of Tunix was loaded"
assert all(sys.modules[name] is one for name, one in loaded.items()), "a module was imported twice"
print(GRPOConfig.__name__, tunix.__version__)
"""


def test_tunix_is_loaded_whole_when_one_of_its_own_names_is_asked_for() -> None:
    variables = variables_of("trainer", cpu=True)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=PROJECT, env=variables, capture_output=True, encoding="utf-8", check=False
    )
    assert (done.stderr.count("Error"), done.returncode) == (0, 0), done.stderr
    name, version = done.stdout.split()[-2:]
    assert (name, version.count(".")) == ("GRPOConfig", 2)
