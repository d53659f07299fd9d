"""Decoder-only transformer: RoPE, GQA, SwiGLU, as Qwen2, Qwen3 and Llama 3 have them.

A shallow model is unrolled, each layer with parameters of its own. A deep one can scan
over its layers, whose parameters are then stacked on a leading axis; decoding is
unrolled all the same, as a cache would go through a scan by copy. Attention is
head-major (`[N, heads, tokens, d]`), as is the cache: decoding never transposes it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint
from jax.nn import initializers

from curax.models import attention
from curax.models.modules import (
    MATRICES,
    Dense,
    axes_of,
    check_matrices,
    fan_in,
    is_adapter,
    rms,
)
from curax.models.rotary import RopeScaling, rotate
from curax.settings.config_types import Count, Natural, Positive
from curax.types import Model

CAST = ("embed", "head", "kernel", "bias")  # read in `dtype` and no other


def model(
    *,
    vocab_size: int,
    width: Count = 64,
    layers: Count = 2,
    heads: Count = 4,
    kv_heads: Count = 2,
    head_dim: Count = 16,
    mlp_width: Count = 192,
    rope_theta: float = 10_000.0,
    rope_scaling: RopeScaling | None = None,
    norm_eps: float = 1e-6,
    qk_norm: bool = True,
    qkv_bias: bool = False,
    tied: bool = False,
    embedding_std: float = 0.3,
    scan_layers: bool = False,
    remat: bool = False,
    dtype: Any = "float32",
    param_dtype: Any = "float32",
    attend: Callable[..., jax.Array] = attention.by_platform,
    lora_rank: Natural = 0,
    lora_alpha: Positive = 16.0,
    lora_modules: tuple[str, ...] = MATRICES,
) -> Model:
    """A policy of the Qwen3 family, or of a sibling's.

    | family | `qk_norm` | `qkv_bias` | `rope_scaling` |
    |---|---|---|---|
    | Qwen2, Qwen2.5 | False | True | None |
    | Qwen3 | True | False | None |
    | Llama 3 | False | False | from 3.1 on |

    Args:
        vocab_size: V.
        width: D, of the residual stream.
        layers: L.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: d, even.
        mlp_width: hidden width of the SwiGLU.
        rope_theta: base of the rotary frequencies.
        rope_scaling: of the rotary frequencies, to a longer context; None: as they are.
        norm_eps: added to the mean square by every RMSNorm.
        qk_norm: an RMSNorm on the queries and keys of every head.
        qkv_bias: a bias on queries, keys and values.
        tied: use the embedding table as output head.
        embedding_std: of the token embeddings at initialisation. Below about 0.1 the
            RMSNorm behind it makes their gradients, hence Adam's steps, very large.
        scan_layers: scan over the layers instead of unrolling them, but for decoding:
            the time to compile an update no longer grows with L.
        remat: keep no activations within a layer for the backward pass, but compute
            them again: less memory, about a third more work in the update.
        dtype: of activations and matrix products, that with the output head included;
            log-probs are float32 regardless.
        param_dtype: what parameters are kept in.
        attend: an implementation of `curax.models.attention`.
        lora_rank: r of the adapters; above 0 they alone are trained. They are float32.
        lora_alpha: over r, the scale of what adapters add.
        lora_modules: matrices of each layer that have one, of `MATRICES`.

    Returns:
        `init`, `features`, `head`, `axes` and `trained`, as `curax.types.Model` says.

    Raises:
        ValueError: if `kv_heads` does not divide `heads`, `head_dim` is odd or
            `lora_modules` names what is none.
    """
    if heads % kv_heads:
        raise ValueError(
            f"model.heads={heads} is no multiple of kv_heads={kv_heads}; set "
            f"model.kv_heads to {math.gcd(heads, kv_heads)}."
        )
    if head_dim % 2:
        raise ValueError(
            f"model.head_dim={head_dim} must be even, for rotary halves; set it to "
            f"{head_dim + 1}."
        )
    if lora_rank:
        check_matrices(lora_modules)
    dtype, param_dtype = jnp.dtype(dtype), jnp.dtype(param_dtype)
    block = Block(
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=norm_eps,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        depth=layers,
        dtype=dtype,
        param_dtype=param_dtype,
        attend=attend,
        lora_rank=lora_rank,
        lora_scale=lora_alpha / max(lora_rank, 1),
        lora_modules=lora_modules,
    )
    norm = rms(norm_eps, dtype, param_dtype)()
    x0 = jnp.zeros((1, 1, width), dtype)
    at0 = (jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool))

    def each_layer(init, k_layers):
        if scan_layers:  # The stacked axis stays unnamed: it is never sharded.
            return jax.vmap(init)(k_layers)
        return {str(i): init(k) for i, k in enumerate(k_layers)}

    def apart(params):
        return {
            str(i): jax.tree.map(lambda p, i=i: p[i], params) for i in range(layers)
        }

    def ready(params):
        def cast(path, leaf):
            return leaf.astype(dtype) if path[-1].key in CAST else leaf

        params = jax.tree_util.tree_map_with_path(cast, params)
        if scan_layers:
            params = params | {"layers": apart(params["layers"])}
        return params

    def boxed(key):
        table = initializers.normal(embedding_std)
        k_embed, k_layers, k_head = jax.random.split(key, 3)
        params: dict[str, Any] = {
            "embed": axes_of(table, "vocab", "embed")(
                k_embed, (vocab_size, width), param_dtype
            ),
            "layers": each_layer(
                lambda k: block.init(k, x0, *at0)["params"],
                jax.random.split(k_layers, layers),
            ),
            "norm": norm.init(key, x0)["params"],
        }
        if not tied:
            params["head"] = axes_of(fan_in(-1), "vocab", "embed")(
                k_head, (vocab_size, width), param_dtype
            )
        return params

    def features(params, tokens, positions, seen, cache=None, column=None):
        x = params["embed"][tokens].astype(dtype)
        x = with_logical_constraint(x, ("rows", None, None))
        apply = partial(layer, block, positions, seen, column)
        if remat:
            apply = jax.checkpoint(apply)
        if scan_layers and column is None:
            stacked = cache and jax.tree.map(lambda *c: jnp.stack(c), *cache)
            x, stacked = jax.lax.scan(apply, x, (params["layers"], stacked))
            new = [jax.tree.map(lambda c, i=i: c[i], stacked) for i in range(layers)]
        else:
            new, stack = [], params["layers"]
            stack = stack if "0" in stack else apart(stack)
            for i in range(layers):
                x, kv = apply(x, (stack[str(i)], cache and cache[i]))
                new.append(kv)
        return norm.apply({"params": params["norm"]}, x), tuple(new)

    def head(params):
        return params["embed" if tied else "head"].astype(dtype)

    shapes = jax.eval_shape(boxed, jax.random.key(0))
    return Model(
        init=lambda key: nn.meta.unbox(boxed(key)),
        features=features,
        head=head,
        axes=jax.tree.map(
            lambda spec, leaf: (None,) * (leaf.ndim - len(spec)) + tuple(spec),
            nn.get_partition_spec(shapes),
            nn.meta.unbox(shapes),
            is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec),
        ),
        trained=is_adapter if lora_rank else None,
        ready=ready,
    )


def layer(block, positions, seen, column, x, params_and_cache):
    """One block as the body of a scan: `(x, (params, cache)) -> (x, cache)`."""
    params, cache = params_and_cache
    return block.apply({"params": params}, x, positions, seen, cache, column)


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and beside a residual path."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    depth: int
    dtype: Any
    param_dtype: Any
    attend: Callable[..., jax.Array]
    lora_rank: int
    lora_scale: float
    lora_modules: tuple[str, ...]

    @nn.compact
    def __call__(self, x, positions, seen, cache=None, column: Any = None):
        """`[N, Q, D]` in and out; `seen` `[N, S]`; see `Model.features`."""
        norm = rms(self.norm_eps, self.dtype, self.param_dtype)

        def dense(name, features, *axes, scale=1.0, bias=False):
            own = Dense(
                features,
                bias,
                self.dtype,
                self.param_dtype,
                kernel_init=axes_of(fan_in(0, scale), *axes),
                bias_init=axes_of(initializers.zeros, axes[-1]),
                name=name,
                axes=axes,
                rank=self.lora_rank if name in self.lora_modules else 0,
                scale=self.lora_scale,
            )

            def apply(y):  # as one matrix product, and so are its gradients
                z = own(y.reshape(-1, y.shape[-1]))
                return z.reshape(*y.shape[:-1], features)

            return apply

        # Residual branches start small, so depth does not change the scale of x.
        small = 1 / (2 * self.depth)
        inner, inner_kv = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def split(y, heads):  # [N, Q, heads * d] -> [N, heads, Q, d]
            return jnp.swapaxes(y.reshape(*y.shape[:-1], heads, -1), -3, -2)

        y = norm(name="attention_norm")(x)
        into = partial(dense, bias=self.qkv_bias)
        q = split(into("q", inner, "embed", "heads")(y), self.heads)
        k = split(into("k", inner_kv, "embed", "heads")(y), self.kv_heads)
        v = split(into("v", inner_kv, "embed", "heads")(y), self.kv_heads)
        if self.qk_norm:
            q, k = norm(name="q_norm")(q), norm(name="k_norm")(k)
        q, k = (
            rotate(z, positions, self.rope_theta, self.rope_scaling) for z in (q, k)
        )
        if cache is not None and column is None:
            k, v = (
                jnp.concatenate(pair, -2) for pair in zip(cache, (k, v), strict=True)
            )
        elif cache is not None:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new, column, -2)
                for old, new in zip(cache, (k, v), strict=True)
            )
        y = self.attend(q, k, v, seen, causal=column is None)
        y = jnp.swapaxes(y, -3, -2).reshape(*x.shape[:-1], -1)
        x = x + dense("o", self.width, "heads", "embed", scale=small)(y)

        y = norm(name="mlp_norm")(x)
        gate = dense("gate", self.mlp_width, "embed", "mlp")(y)
        y = nn.silu(gate) * dense("up", self.mlp_width, "embed", "mlp")(y)
        x = x + dense("down", self.width, "mlp", "embed", scale=small)(y)
        return with_logical_constraint(x, ("rows", None, None)), (k, v)
