"""The modules of a layer: matrices with LoRA adapters, and RMSNorm.

Every parameter names its logical axes, which `curax.step.mesh` maps to mesh axes.
"""

import difflib
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from jax.nn import initializers

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class Dense(nn.Dense):
    """Flax's Dense with a low-rank adapter: y = x W + scale (x A) B, B initially 0.

    References:
        Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models",
        arXiv:2106.09685. The paper draws A from a normal distribution; here it is
        uniform within 1 / sqrt(in), as the `peft` library has it.
    """

    axes: tuple[str, ...] = ()
    rank: int = 0
    scale: float = 1.0

    @nn.compact
    def __call__(self, inputs):
        """`[..., in]` to `[..., out]`."""
        y = super().__call__(inputs)
        if not self.rank:
            return y
        drawn = axes_of(fan_in(0, 1 / 3, "uniform"), self.axes[0], None)
        zeros = axes_of(initializers.zeros, None, self.axes[1])
        a: Any = self.param("lora_a", drawn, (inputs.shape[-1], self.rank))
        b: Any = self.param("lora_b", zeros, (self.rank, self.features))
        x, a, b = (z.astype(self.dtype) for z in (inputs, a, b))
        return y + (x @ a) @ b * self.scale


class RMSNorm(nn.RMSNorm):
    """Flax's RMSNorm, which promotes bfloat16 to float32, under strict promotion."""

    def __call__(self, x, *, mask=None):
        """`[..., D]` in and out.

        Leading axes of one, as of a single row, are left out where there is no mask:
        beside them a sum of products takes a CPU many times as long.
        """
        inner = x.shape
        while mask is None and len(inner) > 2 and inner[0] == 1:
            inner = inner[1:]
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x.reshape(inner), mask=mask).reshape(x.shape)


def rms(eps: float, dtype: Any, param_dtype: Any):
    """A constructor of RMSNorms with these options, whose scales are not sharded."""
    ones = axes_of(initializers.ones, None)
    return partial(RMSNorm, eps, dtype=dtype, param_dtype=param_dtype, scale_init=ones)


def is_adapter(path: tuple[str, ...]) -> bool:
    """Whether the parameter at a path of keys belongs to an adapter."""
    return path[-1].startswith("lora_")


def check_matrices(names: tuple[str, ...]) -> None:
    """Refuse names that are no matrix of a layer, and an empty tuple."""
    for name in names:
        if name not in MATRICES:
            close = difflib.get_close_matches(name.removesuffix("_proj"), MATRICES, 1)
            raise ValueError(
                f"model.lora_modules names {name!r}, but a layer has "
                f"{', '.join(MATRICES)}; name {close[0] if close else 'some'} instead."
            )
    if not names:
        raise ValueError(
            "model.lora_modules=() leaves nothing to train; name some of "
            f"{', '.join(MATRICES)}, or set model.lora_rank to 0."
        )


def fan_in(axis: int, scale: float = 1.0, distribution: Any = "normal"):
    """An initialiser with variance `scale / size of axis`."""
    other = 1 + axis if axis >= 0 else 0
    return initializers.variance_scaling(
        scale, "fan_in", distribution, in_axis=axis, out_axis=other
    )


def axes_of(initialiser, *names):
    """An initialiser that names the logical axis of each dimension of its result."""
    return nn.with_logical_partitioning(initialiser, names)
