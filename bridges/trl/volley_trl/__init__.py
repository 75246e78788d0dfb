"""TRL's trainers with a Volley rollout server instead of vLLM: see docs/bridges.md."""

from volley_trl.client import VolleyClient
from volley_trl.generation import use_volley

__all__ = ["VolleyClient", "use_volley"]
