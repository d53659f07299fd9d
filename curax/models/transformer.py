"""Decoder-only transformer of the Qwen3 family: RoPE, GQA, q/k norm, SwiGLU.

A shallow model is unrolled, each layer with parameters of its own. A deep one can scan
over its layers, whose parameters are then stacked on a leading axis; decoding is
unrolled all the same, as a cache would go through a scan by copy. Attention is
head-major (`[N, heads, tokens, d]`), as is the cache: decoding never transposes it.
"""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint
from jax.nn import initializers

from curax.kinds import Count
from curax.types import Model

Cache = tuple[tuple[jax.Array, jax.Array], ...]  # per layer: k, v [N, kv_heads, S, d]


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
    norm_eps: float = 1e-6,
    tied: bool = False,
    embedding_std: float = 0.3,
    scan_layers: bool = False,
    remat: bool = False,
    dtype: Any = jnp.float32,
) -> Model:
    """A Qwen3-style policy; parameters are float32, `dtype` is what it computes in.

    Args:
        vocab_size: V.
        width: D, of the residual stream.
        layers: L.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: d, even.
        mlp_width: hidden width of the SwiGLU.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square by every RMSNorm.
        tied: use the embedding table as output head.
        embedding_std: of the token embeddings at initialisation. Below about 0.1 the
            RMSNorm behind it makes their gradients, hence Adam's steps, very large.
        scan_layers: scan over the layers instead of unrolling them, but for decoding:
            the time to compile an update no longer grows with L.
        remat: keep no activations within a layer for the backward pass, but compute
            them again: less memory, about a third more work in the update.
        dtype: of activations and matrix products; log-probs are float32 regardless.

    Returns:
        `init`, `features`, `head`, `axes`, as `curax.types.Model` says.

    Raises:
        ValueError: if `kv_heads` does not divide `heads` or `head_dim` is odd.
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
    block = Block(
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        rope_theta=rope_theta,
        norm_eps=norm_eps,
        depth=layers,
        dtype=dtype,
    )
    norm = RMSNorm(norm_eps, dtype=dtype, scale_init=axes_of(initializers.ones, None))
    x0 = jnp.zeros((1, 1, width), dtype)
    at0 = (jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool))

    def each_layer(init, k_layers):
        if scan_layers:  # The stacked axis stays unnamed: it is never sharded.
            return jax.vmap(init)(k_layers)
        return {str(i): init(k) for i, k in enumerate(k_layers)}

    def own(params, i):
        stack = params["layers"]
        return jax.tree.map(lambda p: p[i], stack) if scan_layers else stack[str(i)]

    def boxed(key):
        table = initializers.normal(embedding_std)
        k_embed, k_layers, k_head = jax.random.split(key, 3)
        params: dict[str, Any] = {
            "embed": axes_of(table, "vocab", "embed")(k_embed, (vocab_size, width)),
            "layers": each_layer(
                lambda k: block.init(k, x0, *at0)["params"],
                jax.random.split(k_layers, layers),
            ),
            "norm": norm.init(key, x0)["params"],
        }
        if not tied:
            params["head"] = axes_of(fan_in(-1), "vocab", "embed")(
                k_head, (vocab_size, width)
            )
        return params

    def features(params, tokens, positions, mask, cache=None, column=None):
        x = params["embed"][tokens].astype(dtype)
        x = with_logical_constraint(x, ("rows", None, None))
        apply = partial(layer, block, positions, mask, column)
        if remat:
            apply = jax.checkpoint(apply)
        if scan_layers and column is None:
            stacked = cache and jax.tree.map(lambda *c: jnp.stack(c), *cache)
            x, stacked = jax.lax.scan(apply, x, (params["layers"], stacked))
            new = [jax.tree.map(lambda c, i=i: c[i], stacked) for i in range(layers)]
        else:
            new = []
            for i in range(layers):
                x, kv = apply(x, (own(params, i), cache and cache[i]))
                new.append(kv)
        return norm.apply({"params": params["norm"]}, x), tuple(new)

    def head(params):
        return params["embed"] if tied else params["head"]

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
    )


def layer(block, positions, mask, column, x, params_and_cache):
    """One block as the body of a scan: `(x, (params, cache)) -> (x, cache)`."""
    params, cache = params_and_cache
    return block.apply({"params": params}, x, positions, mask, cache, column)


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and beside a residual path."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    norm_eps: float
    depth: int
    dtype: Any

    @nn.compact
    def __call__(self, x, positions, mask, cache=None, column: Any = None):
        """`[N, Q, D]` in and out; `mask` `[N, Q, S]`; see `Model.features`."""
        rms = partial(
            RMSNorm,
            self.norm_eps,
            dtype=self.dtype,
            scale_init=axes_of(initializers.ones, None),
        )

        def dense(name, features, *axes, scale=1.0):
            init = axes_of(fan_in(0, scale), *axes)
            own = nn.Dense(features, False, self.dtype, kernel_init=init, name=name)

            def apply(y):  # as one matrix product, and so are its gradients
                z = own(y.reshape(-1, y.shape[-1]))
                return z.reshape(*y.shape[:-1], features)

            return apply

        # Residual branches start small, so depth does not change the scale of x.
        small = 1 / (2 * self.depth)
        inner, inner_kv = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def split(y, heads):  # [N, Q, heads * d] -> [N, heads, Q, d]
            return jnp.swapaxes(y.reshape(*y.shape[:-1], heads, -1), -3, -2)

        y = rms(name="attention_norm")(x)
        q = split(dense("q", inner, "embed", "heads")(y), self.heads)
        k = split(dense("k", inner_kv, "embed", "heads")(y), self.kv_heads)
        v = split(dense("v", inner_kv, "embed", "heads")(y), self.kv_heads)
        q = rotate(rms(name="q_norm")(q), positions, self.rope_theta)
        k = rotate(rms(name="k_norm")(k), positions, self.rope_theta)
        if cache is not None and column is None:
            k, v = (
                jnp.concatenate(pair, -2) for pair in zip(cache, (k, v), strict=True)
            )
        elif cache is not None:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new, column, -2)
                for old, new in zip(cache, (k, v), strict=True)
            )
        y = attention(q, k, v, mask)
        y = jnp.swapaxes(y, -3, -2).reshape(*x.shape[:-1], -1)
        x = x + dense("o", self.width, "heads", "embed", scale=small)(y)

        y = rms(name="mlp_norm")(x)
        gate = dense("gate", self.mlp_width, "embed", "mlp")(y)
        y = nn.silu(gate) * dense("up", self.mlp_width, "embed", "mlp")(y)
        x = x + dense("down", self.width, "mlp", "embed", scale=small)(y)
        return with_logical_constraint(x, ("rows", None, None)), (k, v)


class RMSNorm(nn.RMSNorm):
    """Flax's, which raises bfloat16 to float32: strict promotion would refuse."""

    def __call__(self, x, *, mask=None):
        """`[..., D]` in and out."""
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention; the query heads of a group are rows of one matrix product.

        o = softmax(q k^T / sqrt(d) where mask) v

    Args:
        q: `[N, heads, Q, d]`.
        k: `[N, kv_heads, S, d]`.
        v: `[N, kv_heads, S, d]`.
        mask: `[N, Q, S]` bool, True where the query may look.

    Returns:
        `[N, heads, Q, d]`. A query that may look nowhere gets the mean of v.
    """
    n, heads, queries, d = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    q = q.reshape(n, kv_heads, heads // kv_heads * queries, d)
    scores = jnp.einsum("nkqd,nksd->nkqs", q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(n, kv_heads, -1, queries, length) * d**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    shares = shares.reshape(n, kv_heads, -1, length)
    return jnp.einsum("nkqs,nksd->nkqd", shares, v).reshape(n, heads, queries, d)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of `[N, heads, Q, d]` at `[N, Q]` positions, halves paired."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (
        positions[:, None, :, None].astype(jnp.float32) * frequency[None, None, None]
    )
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def fan_in(axis: int, scale: float = 1.0):
    """Normal initialiser with variance `scale / size of axis`."""
    return initializers.variance_scaling(
        scale, "fan_in", "normal", in_axis=axis, out_axis=1 + axis if axis >= 0 else 0
    )


def axes_of(initialiser, *names):
    """The initialiser, with a logical axis name for each dimension of its result."""
    return nn.with_logical_partitioning(initialiser, names)
