"""The packed inputs of a step."""

import jax
import numpy as np

from services.rollout.engines.sglang_jax.scheduling.inputs import Layout, unpack

NAMES = ("temperature", "top_p", "min_p", "top_k", "seed", "index", "forced", "bias_ids", "bias", "mask")


def test_a_step_is_the_same_program_in_every_process() -> None:
    """Otherwise a compiled step would not be found in the cache at the next start."""
    layout = Layout(None, None, None, 2, 0, tuple((name, 4 if name in ("seed", "mask") else 2) for name in NAMES))
    program = jax.make_jaxpr(lambda packed: unpack(packed, layout))(np.zeros(24, np.int32))
    slices = [eqn for eqn in program.eqns if eqn.primitive.name == "slice"]
    name_of = {eqn.outvars[0]: name for eqn, name in zip(slices, NAMES, strict=True)}
    converted = [name_of[eqn.invars[0]] for eqn in program.eqns if eqn.primitive.name == "bitcast_convert_type"]
    assert converted == ["bias", "min_p", "temperature", "top_p", "mask", "seed"]
