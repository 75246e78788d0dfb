"""sglang-jax in a process of its own, behind the `Engine` protocol.

`client`, `link` and `model_files` run in the service and have no heavy imports. Everything else runs in the engine's
process and is the only code of the project that imports sgl_jax.
"""
