"""Kernels with which the engine of sglang-jax runs on GPUs."""

from volley_engines.gpu.attention import GpuAttention as GpuAttention
from volley_engines.gpu.products import grouped_products as grouped_products
