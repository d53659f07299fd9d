"""Strict for all: no silent broadcasting, no silent promotion, eight devices."""

import importlib.metadata
import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Halves compile time, most of what tests spend; CI's quickstart runs optimised.
    + " --xla_backend_optimization_level=0"
)
if importlib.metadata.version("jaxlib") < "0.11":
    # A third less time to compile; later versions no longer know the option.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
    "curax",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("curax")
