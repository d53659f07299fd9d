"""Decoder-only transformer with RoPE, GQA and SwiGLU: Qwen2, Qwen3, Llama 3.

| family | `qk_norm` | `qkv_bias` | `rope_scaling` |
|---|---|---|---|
| Qwen2, Qwen2.5 | False | True | None |
| Qwen3 | True | False | None |
| Llama 3 | False | False | from 3.1 on |

Layers are unrolled, each with parameters of its own, or scanned, with parameters
stacked on a leading axis. Decoding always unrolls them, as a scan would copy the cache.
Attention and cache are head-major, `[N, heads, tokens, d]`, so that decoding transposes
nothing.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn import initializers

from curax.arrays.accumulate import Adding, each_layer, onto, through, together
from curax.arrays.cache_sizes import widened
from curax.arrays.lines import Lines, Visible
from curax.arrays.sharding import constrain, gathered, rows_of
from curax.models import attention, decoding, lanes, modules, packed, softmax
from curax.models.rotary import RopeScaling, cos_sin, rotate
from curax.settings.config_types import Count, Natural, Positive
from curax.settings.declared import declares
from curax.types import Model, SharedCache

CAST = ("embed", "head", "kernel", "bias")  # parameters that are read in `dtype` only
# What the backward pass of a layer keeps of the forward one, beside what enters it; the
# rest it computes again. Products have no rows as batch, those of attention have.
REMAT: dict[str, Any] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.nothing_saveable,
}


@declares(computes_in="dtype", recomputes="remat")
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
    remat: bool | str = "none",
    dtype: Any = "float32",
    param_dtype: Any = "float32",
    attend: Callable[..., jax.Array] = attention.by_platform,
    lora_rank: Natural = 0,
    lora_alpha: Positive = 16.0,
    lora_modules: tuple[str, ...] = modules.MATRICES,
) -> Model:
    """A policy of the Qwen2, Qwen3 or Llama 3 family, with random parameters.

    Args:
        vocab_size: V.
        width: D, of the residual stream.
        layers: L.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: d, even.
        mlp_width: hidden width of the SwiGLU.
        rope_theta: base of the rotary frequencies.
        rope_scaling: rescaling of these to a longer context; None: none.
        norm_eps: added to the mean square by every RMSNorm.
        qk_norm: an RMSNorm on the queries and keys of every head.
        qkv_bias: a bias on queries, keys and values.
        tied: use the embedding table as output head.
        embedding_std: of the token embeddings at initialisation. Below about 0.1 the
            RMSNorm behind it makes their gradients, hence Adam's steps, very large.
        scan_layers: scan over the layers instead of unrolling them, but for decoding:
            the time to compile an update no longer grows with L.
        remat: what the backward pass of a layer recomputes: `none` of its activations;
            `dots`: all but products with its matrices; `everything`: the least memory,
            about a third more work in the update. False is none, True everything.
        dtype: of activations and matrix products, that with the output head included;
            log-probs are float32 regardless.
        param_dtype: of the parameters.
        attend: an implementation of `curax.models.attention`.
        lora_rank: r of the adapters, float32; above 0 they alone are trained, and the
            matrices that they leave are held in `dtype`, if that is smaller.
        lora_alpha: the adapters' scale is `lora_alpha / lora_rank`.
        lora_modules: matrices of each layer that have an adapter, of `MATRICES`.

    Raises:
        ValueError: if `kv_heads` does not divide `heads`, `head_dim` is odd, or `remat`
            or `lora_modules` names what is none.
    """
    check_heads(heads, kv_heads, head_dim)
    if lora_rank:
        modules.check_matrices(lora_modules)
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
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(param_dtype),
        attend=attend,
        lora_rank=lora_rank,
        lora_scale=lora_alpha / max(lora_rank, 1),
        lora_modules=lora_modules,
    )
    return Transformer(
        block=block,
        vocab_size=vocab_size,
        tied=tied,
        embedding_std=embedding_std,
        scan_layers=scan_layers,
        remat=recomputed(remat),
    ).model()


def recomputed(remat: bool | str) -> str:
    """Name of the rematerialisation policy, one of `REMAT`, for an option.

    Raises:
        ValueError: in a sentence, if it is none of them.
    """
    name = ("everything" if remat else "none") if isinstance(remat, bool) else remat
    if name not in REMAT:
        raise ValueError(
            f"model.remat={remat!r} is none of {', '.join(REMAT)}; set it to dots, or "
            "to everything for the least memory."
        )
    return name


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse query heads that do not share key heads evenly, and an odd head size."""
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Transformer:
    """The functions of a `curax.types.Model`; attributes as the options of `model`."""

    block: "Block"
    vocab_size: int
    tied: bool
    embedding_std: float
    scan_layers: bool
    remat: str  # of REMAT

    def model(self) -> Model:
        """The model: functions, and the logical axes of its parameters."""
        adds = self.scan_layers and self.remat == "everything"
        return Model(
            init=self.init,
            features=self.features,
            head=self.head,
            axes=self.axes,
            trained=modules.is_adapter if self.block.lora_rank else None,
            ready=self.ready,
            packs=self.packs,
            shared=self.shared,
            ragged=self.ragged,
            paged=self.paged,
            adding=self.adding if adds else None,
        )

    def init(self, key):
        """Random parameters. What adapters leave frozen is held as it is read.

        So its memory is that of `dtype`, and products are the same to the bit.
        """
        block, params = self.block, nn.meta.unbox(self.boxed(key))
        if not block.lora_rank or block.dtype.itemsize >= block.param_dtype.itemsize:
            return params

        def held(path, leaf):
            return leaf.astype(block.dtype) if path[-1].key in CAST else leaf

        return jax.tree_util.tree_map_with_path(held, params)

    def adding(self, params, totals):
        """Parameters whose gradients are added to totals, those of layers in place."""
        (layers, others), (of_layers, of_others) = (
            (tree["layers"], {name: x for name, x in tree.items() if name != "layers"})
            for tree in (params, totals)
        )
        return onto(others, of_others) | {"layers": Adding(layers, of_layers)}

    def shared(self, cache):
        """The cache as decoding has it: heads side by side where they fill lanes."""
        return jax.tree.map(lambda x: lanes.in_lanes(x, self.abreast), cache)

    @property
    def abreast(self):
        """Heads of keys that lie side by side in decoding, here."""
        block = self.block
        return lanes.side_by_side(block.heads, block.kv_heads, block.head_dim)

    def ragged(self, cache, columns):
        """The slots' own with so many columns, if some are read or k transposed."""
        block, read = self.block, self.read_by(columns)
        queries = block.heads // block.kv_heads
        whole = softmax.transposes(columns, queries, block.dtype.itemsize)
        if whole or read is softmax.of_blocks:
            return softmax.transposed(cache, columns)
        return widened(cache, columns) if read else None

    def paged(self, columns):
        """Columns of a page where the kernel reads so many columns; 0: it does not."""
        return softmax.BLOCK if self.read_by(columns) is softmax.of_kernel else 0

    def read_by(self, columns):
        """How decoding reads blocks of so many columns, as `softmax.by_blocks`."""
        block = self.block
        d = block.head_dim * self.abreast
        return softmax.by_blocks(columns, d, block.dtype.itemsize)

    def packs(self, tokens, steps, prompt):
        """How rows are packed, for `Model.packs`.

        Without a kernel in lines of so many tokens. The kernel of a TPU computes all
        pairs of a line, and reads a copy of each row's prompt: so lines are as long as
        the longest row, with a few rows each. That of a GPU knows no segments.
        """
        block, unit = self.block, attention.LANES
        if block.attend is not attention.by_platform:
            return None
        choice = attention.choose(unit, block.head_dim, block.dtype)
        if choice is attention.plain:
            return Lines(tokens)
        wide = -(-steps // unit) * unit
        rows = min(packed.ROWS, wide // prompt)
        if choice is not attention.splash or rows < 2:
            return None
        return Lines(wide, rows, max(1, tokens // wide))

    @cached_property
    def axes(self) -> Any:
        """Names of the logical axes of each parameter, a tree like the parameters."""
        shapes = jax.eval_shape(self.boxed, jax.random.key(0))
        return jax.tree.map(
            lambda spec, leaf: (None,) * (leaf.ndim - len(spec)) + tuple(spec),
            nn.get_partition_spec(shapes),
            nn.meta.unbox(shapes),
            is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec),
        )

    def boxed(self, key):
        """Random parameters, each boxed with the names of its logical axes."""
        block, shape = self.block, (self.vocab_size, self.block.width)
        x = jnp.zeros((1, 1, block.width), block.dtype)
        positions, seen = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
        k_embed, k_layers, k_head = jax.random.split(key, 3)

        def init(key):
            return block.init(key, x, positions, seen)["params"]

        def each_layer(keys):
            # One after another, by one program for all. The stacked axis stays unnamed:
            # it is never sharded.
            drawn = jax.lax.map(init, keys)
            return drawn if self.scan_layers else unstacked(drawn, block.depth)

        def table(key, initialiser):
            boxed = modules.axes_of(initialiser, "vocab", "embed")
            return boxed(key, shape, block.param_dtype)

        params: dict[str, Any] = {
            "embed": table(k_embed, initializers.normal(self.embedding_std)),
            "layers": each_layer(jax.random.split(k_layers, block.depth)),
            "norm": self.norm.init(key, x)["params"],
        }
        if not self.tied:
            params["head"] = table(k_head, modules.fan_in(-1))
        return params

    def features(self, params, tokens, positions, seen, cache=None, column=None):
        """Features `[N, Q, D]` behind the last norm, and the cache; see `Model`."""
        if isinstance(cache, SharedCache):
            layers = decoding.layers(cache)
            x, layers = self.features(params, tokens, positions, seen, layers, column)
            return x, dataclasses.replace(cache, own=layers)
        layers = self.block.depth
        if column is None:
            x = rows_of(params["embed"], tokens, self.block.dtype)
        else:
            x = params["embed"][tokens].astype(self.block.dtype)
        x = constrain(x, ("rows", None, None))
        axes = None if column is not None else self.axes["layers"]
        keeps = not isinstance(seen, Visible)  # nobody goes on from packed lines
        apply = partial(layer, self.block, axes, keeps)
        given, stack, new = (positions, seen, column), params["layers"], []
        if isinstance(stack, Adding):
            if cache is not None and not isinstance(cache, Adding):
                cache = together(cache)
            left: Any = through(apply, given, x, stack, cache)
            x, stacked = left
            new = each_layer(stacked, layers) if keeps else ()
            return self.norm.apply({"params": params["norm"]}, x), new
        if self.remat != "none":
            apply = jax.checkpoint(apply, policy=REMAT[self.remat])
        if self.scan_layers and column is None:
            stacked = cache and together(cache)
            x, stacked = jax.lax.scan(partial(apply, given), x, (stack, stacked))
            new = each_layer(stacked, layers) if keeps else ()
        else:
            stack = stack if "0" in stack else unstacked(stack, layers)
            # Layers are alike: traced once. Inlined, the program is as without it.
            apply = jax.jit(apply, inline=True)
            for i in range(layers):
                x, kv = apply(given, x, (stack[str(i)], cache and cache[i]))
                new += [kv] if keeps else []
        return self.norm.apply({"params": params["norm"]}, x), tuple(new)

    def head(self, params):
        """The matrix `[V, D]` that maps features to logits."""
        return params["embed" if self.tied else "head"].astype(self.block.dtype)

    def ready(self, params):
        """Parameters for decoding: matrices cast to `dtype`, layers unstacked.

        On a mesh they are whole along `fsdp`, or every token would gather them; with
        `mesh.cut_sampler` those of layers stay cut, and every token does.
        """

        def lay(path, leaf, names):
            own = "sampled" if path[0].key == "layers" else None
            whole = tuple(own if name == "embed" else name for name in names)
            if path[-1].key not in CAST:
                return constrain(leaf, whole)
            # Cast where they lie, or they would be gathered in their own precision.
            return constrain(constrain(leaf.astype(self.block.dtype), names), whole)

        # The compiler may not move this into the loop that reads them.
        params = jax.lax.optimization_barrier(
            jax.tree_util.tree_map_with_path(lay, params, self.axes)
        )
        if self.scan_layers:
            layers = unstacked(params["layers"], self.block.depth)
            params = params | {"layers": layers}
        return params

    @property
    def norm(self):
        """The RMSNorm behind the last layer."""
        block = self.block
        return modules.rms(block.norm_eps, block.dtype, block.param_dtype)()


def unstacked(params: Any, layers: int) -> dict[str, Any]:
    """Parameters stacked on a leading axis, as one tree per layer."""
    return {str(i): one for i, one in enumerate(each_layer(params, layers))}


def layer(block, axes, keeps, given, x, params_and_cache):
    """A block as the body of a scan: `(x, (params, cache)) -> (x, cache)`.

    With the logical axes of all layers, parameters are gathered here, one layer's.
    Given to all of them are positions, the keys seen, and the column. No cache where it
    is not to be kept: what a loop stacks is written though nobody reads it.
    """
    (positions, seen, column), (params, cache) = given, params_and_cache
    if axes is not None:
        params = jax.tree.map(
            lambda p, names: gathered(p, names[-p.ndim :], block.dtype),
            params,
            axes.get("0", axes),
        )
    x, kv = block.apply({"params": params}, x, positions, seen, cache, column)
    return x, kv if keeps else None


class Block(nn.Module):
    """A layer: attention and SwiGLU, each on an RMSNorm and added to the residual."""

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
        """The residual stream `[N, Q, D]` and the keys and values of the layer.

        Arguments as `Model.features`, but `x` `[N, Q, D]` in place of tokens, and the
        cache of this layer alone.
        """
        norm = modules.rms(self.norm_eps, self.dtype, self.param_dtype)

        def dense(name, features, *axes, scale=1.0, bias=False):
            own = modules.Dense(
                features,
                bias,
                self.dtype,
                self.param_dtype,
                kernel_init=modules.axes_of(modules.fan_in(0, scale), *axes),
                bias_init=modules.axes_of(initializers.zeros, axes[-1]),
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
            y = jnp.swapaxes(y.reshape(*y.shape[:-1], heads, -1), -3, -2)
            # Heads that do not divide over the mesh are copied, never cut in two.
            return constrain(y, ("rows", "heads", None, None))

        y = norm(name="attention_norm")(x)
        into = partial(dense, bias=self.qkv_bias)
        q = split(into("q", inner, "embed", "heads")(y), self.heads)
        k = split(into("k", inner_kv, "embed", "heads")(y), self.kv_heads)
        v = split(into("v", inner_kv, "embed", "heads")(y), self.kv_heads)
        if self.qk_norm:
            q, k = norm(name="q_norm")(q), norm(name="k_norm")(k)
        angles = cos_sin(positions, self.head_dim, self.rope_theta, self.rope_scaling)
        q, k = rotate(q, *angles), rotate(k, *angles)
        own: Any = None
        if isinstance(cache, decoding.Layer):
            own = cache.written(k, v, column)
        elif cache is not None and column is not None:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new, column, -2)
                for old, new in zip(cache, (k, v), strict=True)
            )
        elif cache is not None and not isinstance(seen, Visible):
            pairs = zip(cache, (k, v), strict=True)
            k, v = (jnp.concatenate(pair, -2) for pair in pairs)
        if isinstance(seen, Visible):
            y = packed.attend(q, k, v, cache, seen)
        elif isinstance(cache, decoding.Layer):
            y = cache.attend(q, own, seen, self.kv_heads)
        else:
            y = self.attend(q, k, v, seen, causal=column is None)
        y = jnp.swapaxes(y, -3, -2).reshape(*x.shape[:-1], -1)
        x = x + dense("o", self.width, "heads", "embed", scale=small)(y)

        y = norm(name="mlp_norm")(x)
        gate = dense("gate", self.mlp_width, "embed", "mlp")(y)
        y = nn.silu(gate) * dense("up", self.mlp_width, "embed", "mlp")(y)
        x = x + dense("down", self.width, "mlp", "embed", scale=small)(y)
        return constrain(x, ("rows", None, None)), (k, v) if own is None else own
