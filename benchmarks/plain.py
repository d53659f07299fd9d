"""A plain sampler and update, written for the shapes of the work: what JAX can do here.

No stages, no refill, no masks of prompts: every group is one batch, its context is
computed once and read by its completions in both passes, every completion is drawn to
the end, and behind its end it is masked out of the loss.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks import workload
from benchmarks.workload import Workload

Params = dict[str, Any]
Cache = tuple[jax.Array, jax.Array]  # keys and values [groups, rows, tokens, heads, D]


def parameters(work: Workload, key: jax.Array) -> Params:
    """Random ones; matrices have fan-in variance."""
    inner, few = work.heads * work.head_dim, work.kv_heads * work.head_dim
    shapes = {
        **{"q": (work.width, inner), "k": (work.width, few), "v": (work.width, few)},
        "o": (inner, work.width),
        **dict.fromkeys(("gate", "up"), (work.width, work.mlp_width)),
        "down": (work.mlp_width, work.width),
    }
    keys = iter(jax.random.split(key, 1 + work.layers * len(shapes)))

    def layer() -> Params:
        drawn = {
            name: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
            for name, shape in shapes.items()
        }
        widths = {"norm1": work.width, "norm2": work.width}
        widths |= {"norm_q": work.head_dim, "norm_k": work.head_dim}
        return drawn | {name: jnp.ones(width) for name, width in widths.items()}

    embed = jax.random.normal(next(keys), (work.vocab_size, work.width))
    return {
        "embed": embed * workload.EMBEDDING_STD,
        "norm": jnp.ones(work.width),
        "layers": [layer() for _ in range(work.layers)],
    }


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm."""
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotated(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary embedding of heads `[..., tokens, heads, D]` at `[tokens]`."""
    half = x.shape[-1] // 2
    angle = position[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def block(
    work: Workload,
    layer: Params,
    x: jax.Array,
    position: jax.Array,
    context: Cache | None,
    own: Cache | None = None,
) -> tuple[jax.Array, Cache]:
    """A layer over `x` `[groups, rows, tokens, width]`.

    Args:
        work: shapes.
        layer: its parameters.
        x: what it is given.
        position: `[tokens]`, counted from the start of the completion.
        context: keys and values of each group's context, of one row; None: none.
        own: cache into which the tokens are written at their positions; None: the
            tokens are all there is, from position 0.

    Returns:
        What it gives, and keys and values of its own tokens or the cache.
    """
    shape = (*x.shape[:3], -1, work.head_dim)
    h = normed(x, layer["norm1"])
    place = position + (work.prompt_tokens if context is not None else 0)
    q = rotated(normed((h @ layer["q"]).reshape(shape), layer["norm_q"]), place)
    k = rotated(normed((h @ layer["k"]).reshape(shape), layer["norm_k"]), place)
    v = (h @ layer["v"]).reshape(shape)
    if own is not None:
        start = (0, 0, position[0], 0, 0)
        k, v = (
            lax.dynamic_update_slice(cache, new, start)
            for cache, new in zip(own, (k, v), strict=True)
        )
    q = q.reshape(*q.shape[:3], work.kv_heads, -1, work.head_dim) * work.head_dim**-0.5
    ahead = jnp.arange(k.shape[2]) > position[:, None]
    logits = jnp.einsum("gnsjrd,gntjd->gnjrst", q, k)
    logits = jnp.where(ahead, -jnp.inf, logits)
    values = [("gnjrst,gntjd->gnsjrd", v)]
    if context is not None:
        keys, before = (each[:, 0] for each in context)
        seen = jnp.einsum("gnsjrd,gpjd->gnjrsp", q, keys)
        logits = jnp.concatenate([seen, logits], -1)
        values = [("gnjrsp,gpjd->gnsjrd", before), *values]
    share = jax.nn.softmax(logits)
    cut = 0 if context is None else context[0].shape[2]
    shares = (share,) if context is None else (share[..., :cut], share[..., cut:])
    parts = zip(shares, values, strict=True)
    sums = [jnp.einsum(how, each, value) for each, (how, value) in parts]
    heard = sums[0] if context is None else sums[0] + sums[1]
    x = x + heard.reshape(*x.shape[:3], -1) @ layer["o"]
    h = normed(x, layer["norm2"])
    return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"], (
        k,
        v,
    )


def run(
    work: Workload,
    params: Params,
    tokens: jax.Array,
    position: jax.Array,
    contexts: Sequence[Cache] | None,
    caches: Sequence[Cache] | None = None,
) -> tuple[jax.Array, list[Cache]]:
    """All layers over tokens `[groups, rows, tokens]`; arguments as of `block`."""
    x, kept = params["embed"][tokens], []
    for i, layer in enumerate(params["layers"]):
        context = contexts[i] if contexts is not None else None
        own = caches[i] if caches is not None else None
        x, cache = block(work, layer, x, position, context, own)
        kept.append(cache)
    return normed(x, params["norm"]), kept


@partial(jax.jit, static_argnums=0)
def sample(
    work: Workload, params: Params, prompts: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Completions of `prompts` `[groups, tokens]`: tokens, mask and log-probs."""
    groups, length = prompts.shape
    x, contexts = run(work, params, prompts[:, None], jnp.arange(length), None)
    rows = (groups, work.group_size)
    shape = (*rows, work.max_tokens, work.kv_heads, work.head_dim)
    caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in params["layers"]]
    ends = jnp.array(work.ends or (-1,))

    def step(carry: Any, t: jax.Array) -> Any:
        x, caches, alive, key = carry
        key, now = jax.random.split(key)
        logp = jax.nn.log_softmax(x @ params["embed"].T)
        token = jax.random.categorical(now, logp)
        told = jnp.take_along_axis(logp, token[..., None], -1)[..., 0]
        x, caches = run(work, params, token[..., None], t[None], contexts, caches)
        going = alive & ~(token[..., None] == ends).any(-1)
        return (x[:, :, 0], caches, going, key), (token, alive, told)

    x = jnp.broadcast_to(x[:, :, -1], (*rows, work.width))
    start = (x, caches, jnp.ones(rows, bool), key)
    _, drawn = lax.scan(step, start, jnp.arange(work.max_tokens))
    tokens, mask, logp = (jnp.moveaxis(each, 0, -1) for each in drawn)
    return tokens, mask, logp


def log_probs(
    work: Workload, params: Params, prompts: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Of all tokens `[groups, rows, tokens]`, after their prompts."""
    first, contexts = run(
        work, params, prompts[:, None], jnp.arange(prompts.shape[1]), None
    )
    x, _ = run(work, params, tokens, jnp.arange(tokens.shape[2]), contexts)
    first = jnp.broadcast_to(first[:, :, -1:], (*x.shape[:2], 1, work.width))
    x = jnp.concatenate([first, x[:, :, :-1]], 2)
    logp = jax.nn.log_softmax(x @ params["embed"].T)
    return jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(workload.CLIP_NORM),
    optax.adamw(workload.LEARNING_RATE, weight_decay=workload.WEIGHT_DECAY),
)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def update(
    work: Workload,
    params: Params,
    state: Any,
    prompts: jax.Array,
    drawn: tuple[jax.Array, jax.Array, jax.Array],
    reward: jax.Array,
) -> tuple[Params, Any]:
    """One GRPO update, a group at a time."""
    spread = reward.std(-1, keepdims=True, ddof=1) + 1e-6
    advantage = (reward - reward.mean(-1, keepdims=True)) / spread

    def loss(params: Params, one: Any) -> jax.Array:
        prompts, (tokens, mask, old), advantage = jax.tree.map(lambda x: x[None], one)
        ratio = jnp.exp(log_probs(work, params, prompts, tokens) - old)
        each = jnp.minimum(
            ratio * advantage[..., None],
            jnp.clip(ratio, 0.8, 1.2) * advantage[..., None],
        )
        return -((each * mask).sum(-1) / mask.sum(-1)).sum() / work.rows

    def add(total: Params, one: Any) -> tuple[Params, None]:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, one)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    gradient, _ = lax.scan(add, zeros, (prompts, drawn, advantage))
    changes, state = OPTIMIZER.update(gradient, state, params)
    return jax.tree.map(jnp.add, params, changes), state
