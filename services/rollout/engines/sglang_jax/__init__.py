"""The inference engine: sglang-jax in a process of its own, behind the `Engine` protocol.

`protocol` is free of heavy imports; `client` starts and talks to the engine's process; everything else runs inside that
process and is the only code of the project that imports sgl_jax.
"""
