"""One parameter update: log-probs, micro-batches whose gradients add up, optax.

The weight of every token is computed before, on all rows of the update: a mini-batch of
the step, the batch of this module. So the loss is a plain sum over rows, independent of
the number of micro-batches and of devices and, where there is no kernel, of the packing
of rows by tokens.
Contexts are run through the model once, not once per completion: the gradient with
respect to their keys and values is summed over the rows, then pulled back.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from curax.arrays import masked
from curax.arrays.lines import Line, Lines, Packing, Visible, dealt
from curax.arrays.sharding import (
    constrain,
    on_copies,
    over_copies,
    shard_rows,
    shards,
    spread,
)
from curax.monitors import confidence
from curax.rollout import Prefix, extend, prefill
from curax.types import Batch, Contexts, Model, Rollouts

TOKENS = 2**13  # of completions whose confidence is computed at a time
ENTRIES = 2**26  # of logits that exist at a time
TokenLoss = Callable[[jax.Array, jax.Array, Batch], jax.Array]


@flax.struct.dataclass(kw_only=True)
class Settings:
    """Options of computing log-probs; none but temperature changes a result."""

    temperature: float | jax.Array = 1.0  # of the policy that is trained
    micro_batches: int = flax.struct.field(pytree_node=False, default=1)
    # Of each shard of the rows; 0: `micro_batches` says how many there are.
    tokens_per_micro_batch: int = flax.struct.field(pytree_node=False, default=0)
    length_buckets: int = flax.struct.field(pytree_node=False, default=1)
    token_chunk: int = flax.struct.field(pytree_node=False, default=0)  # 0: all

    def parts(self, rows: int, steps: int) -> int:
        """Micro-batches of `[rows, steps]` tokens; each spreads over all shards."""
        counted = self.tokens_per_micro_batch
        fewest = -(-rows * steps // self._tokens) if counted else self.micro_batches
        return spread(rows, fewest)

    @property
    def _tokens(self) -> int:
        """Tokens of a micro-batch, over all shards of the rows."""
        return self.tokens_per_micro_batch * shards("rows")


@flax.struct.dataclass(kw_only=True)
class TokenLogprobs:
    """Log-prob and entropy of the policy at each token of a batch."""

    logp: jax.Array  # [M, T] float32, nats, of the token taken
    entropy: jax.Array  # [M, T] float32, nats


@flax.struct.dataclass(kw_only=True)
class TokenStats:
    """Log-prob, entropy, score norm and covariance of the policy at each token."""

    logp: jax.Array  # [M, T] float32, nats, of the token taken
    entropy: jax.Array  # [M, T] float32, nats
    # [M, T] float32, |d logp / d logits|^2 = 1 - 2 pi_a + |pi|^2
    score_sq_norm: jax.Array
    entropy_logp_cov: jax.Array  # [M, T] float32, nats, E[pi (log pi + H)]


def split(tree: Any, parts: int) -> Any:
    """Leaves `[M, ...]` reshaped to micro-batches `[parts, M / parts, ...]`.

    Part i is made of rows i, i + parts, ...: each device's rows lie in every part.
    """
    return jax.tree.map(
        lambda leaf: jnp.swapaxes(
            leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]), 0, 1
        ),
        tree,
    )


def join(tree: Any) -> Any:
    """Inverse of `split`."""
    return jax.tree.map(
        lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), tree
    )


def cuts(steps: int, buckets: int) -> list[int]:
    """Lengths to which micro-batches are cut: T, its half, its quarter, ...; rising."""
    return sorted({-(-steps // 2**k) for k in range(buckets)})


def ends(mask: jax.Array) -> jax.Array:
    """`[M]` int32: length of each row up to the last True of its mask `[M, T]`."""
    place = jnp.arange(1, mask.shape[-1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(mask, place, 0), -1)


def over_parts(
    function: Callable[[Any], tuple[Any, Any]],
    rows: Any,
    mask: jax.Array,
    settings: Settings,
) -> tuple[Any, Any]:
    """Sums and per-token outputs of a function, called on each micro-batch.

    With several length buckets, rows are sorted by length, so that those of one
    micro-batch are about equally long, and it is cut behind its longest. Each length
    is a branch of the program: more to compile, less to compute.

    Args:
        function: from rows, `[m, t]` and `[m]`, to a tree that is to be summed and a
            tree of `[m, t]`; of tokens outside the mask it may say anything finite.
        rows: tree of `[M, T]` and `[M]`.
        mask: `[M, T]` bool.
        settings: micro-batches and length buckets.

    Returns:
        Sums in float32, so that their order hardly matters; the `[M, T]` tree, 0 where
        rows were cut.
    """
    function = jax.jit(function, inline=True)  # traced once, for shapes and the loop
    steps, parts = mask.shape[-1], settings.parts(*mask.shape)
    lengths = cuts(steps, settings.length_buckets)
    last, order = ends(mask), None
    if len(lengths) > 1:
        # `split` deals rows out to the parts like cards; here each gets like lengths.
        order = jnp.argsort(last).reshape(parts, -1).T.reshape(-1)
        rows, last = jax.tree.map(lambda x: jnp.take(x, order, 0), (rows, last))
    rows, last = jax.tree.map(shard_rows, (rows, last))

    def cut(rows, length):
        short = jax.tree.map(lambda x: x[:, :length] if x.ndim > 1 else x, rows)
        total, own = function(short)
        behind = ((0, 0), (0, steps - length))
        return total, jax.tree.map(lambda x: jnp.pad(x, behind), own)

    def add(total, part):
        rows, last = part
        longest = over_copies(jax.lax.pmax, jnp.max(last))
        which = jnp.searchsorted(jnp.asarray(lengths, jnp.int32), longest)
        branches = [partial(cut, length=length) for length in lengths]
        new, own = jax.lax.switch(which, branches, rows)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, new), own

    rows = split((rows, last), parts)
    like, _ = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], rows[0]))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    total, own = jax.lax.scan(add, start, rows)
    own = join(own)
    if order is not None:
        own = jax.tree.map(lambda x: x[jnp.argsort(order)], own)
    return total, own


def over_rows(
    model: Model,
    function: Callable[[Any, Line | None], tuple[Any, Any]],
    contexts: Contexts,
    rows: Any,
    mask: jax.Array,
    settings: Settings,
) -> tuple[Any, Any]:
    """Outputs of a function on packed lines if the model packs, else on micro-batches.

    Args:
        model: the policy.
        function: of rows and their line; None: they are `[m, t]`.
        contexts: `[C, P]`.
        rows: as `over_parts`.
        mask: as `over_parts`.
        settings: as `over_parts`.
    """
    tokens, prompt = settings.tokens_per_micro_batch, contexts.mask.shape[-1]
    how = (
        model.packs(tokens, mask.shape[-1], prompt) if model.packs and tokens else None
    )
    if how:
        return over_lines(function, rows, mask, how)
    return over_parts(lambda rows: function(rows, None), rows, mask, settings)


def over_lines(
    function: Callable[[Any, Line], tuple[Any, Any]],
    rows: Any,
    mask: jax.Array,
    how: Lines,
) -> tuple[Any, Any]:
    """Sums and per-token outputs of a function, called on each line of packed rows.

    On a mesh a line of each shard of the rows at a time, as often as the shard with
    most lines needs.

    Args:
        function: of rows `[D R, T]` and `[D R]`, R of each of D shards, and their
            lines, as that of `over_parts`.
        rows: as `over_parts`.
        mask: as `over_parts`.
        how: sizes of lines; several of a shard at a time count as those of more shards.

    Returns:
        As `over_parts`.
    """
    function = jax.jit(function, inline=True)  # traced once, for shapes and the loop
    (count, steps), last = mask.shape, ends(mask)
    parts = shards("rows") * min(how.together, -(-count // shards("rows")))
    order = dealt(last, parts) if parts > 1 else jnp.arange(count)[None]

    def pick(x, which):  # rows that are none are 0: without a mask, and without weight
        return x.at[which].get(mode="fill", fill_value=0)

    def deal(x):  # [M, ...] -> [D, M / D, ...]
        return shard_rows(pick(x, order)) if parts > 1 else x[None]

    last, rows = jax.tree.map(deal, (last, rows))
    of = partial(Packing.of, steps=steps, tokens=how.tokens, rows=how.rows)
    packing = jax.vmap(of)(last)

    def read(number):
        which, line = jax.vmap(lambda packing: packing.at(number))(packing)
        own = jax.tree.map(lambda x: join_shards(jax.vmap(pick)(x, which)), rows)
        total, own = function(own, line)
        return which, total, own

    def add(number, state):
        which, new, part = read(number)

        def put(whole, part):
            part = part.reshape(*which.shape, steps)
            return jax.vmap(lambda x, at, y: x.at[at].set(y, mode="drop"))(
                whole, which, part
            )

        total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), state[0], new)
        return total, jax.tree.map(put, state[1], part)

    _, total, own = jax.eval_shape(read, jnp.int32(0))
    start = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), total),
        jax.tree.map(
            lambda x: shard_rows(jnp.zeros((*last.shape, steps), x.dtype)), own
        ),
    )
    most = over_copies(jax.lax.pmax, jnp.max(packing.lines))
    total, own = jax.lax.fori_loop(0, most, add, start)
    if parts > 1:
        back = jnp.argsort(order.reshape(-1))[:count]
        return total, jax.tree.map(lambda x: join_shards(x)[back], own)
    return total, jax.tree.map(join_shards, own)


def join_shards(x: jax.Array) -> jax.Array:
    """`[D R, ...]` rows sharded over D shards, from `[D, R, ...]`."""
    return shard_rows(x.reshape(-1, *x.shape[2:]))


def predict(
    model: Model,
    params: Any,
    contexts: Contexts,
    prefix: Prefix,
    tokens: jax.Array,
    context: jax.Array,
    line: Line | None,
) -> jax.Array:
    """Features that predict the tokens, `[m, t, D]`; of packed lines, `[s, L, D]`.

    There is a line of each of s shards. In it token t - 1 of a row stands at t, and the
    last of the context at 0: what predicts the first token is known of the prefix.
    """
    if line is None:
        own = prefix.take(context)
        return extend(model, params, own, contexts.mask[context], tokens)
    # A line reads contexts of any shard: each layer gathers its own, not before.
    cache = jax.tree.map(
        lambda x: constrain(x, ("rows", "heads", None, None)), prefix.cache
    )
    own = context.reshape(line.start.shape)
    visible = Visible(
        row=line.row, place=line.place, contexts=own, seen=contexts.mask, tile=line.tile
    )
    of_tile = visible.context
    place = jnp.arange(line.tile, dtype=jnp.int32)[None, None]
    place = place + line.place[..., None] * line.tile
    length = jnp.sum(contexts.mask, -1, dtype=jnp.int32)[of_tile]
    features, _ = model.features(
        params,
        laid(line, jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))),
        jnp.maximum(length[..., None] + place - 1, 0).reshape(len(own), -1),
        visible,
        cache,
    )
    first = constrain(prefix.last, (None, None))[of_tile][:, :, None]
    apart = features.reshape(*place.shape, -1)
    return jnp.where((place == 0)[..., None], first, apart).reshape(features.shape)


def laid(line: Line, rows: jax.Array) -> jax.Array:
    """`[D, L]` per-token values in the order of lines, from rows `[D R, T]`."""
    rows = rows.reshape(*line.start.shape, -1)
    return shard_rows(jax.vmap(Line.tiles)(line, rows))


def read_tokens(
    read: Callable[..., tuple[jax.Array, ...]],
    model: Model,
    params: Any,
    contexts: Contexts,
    prefix: Prefix,
    tokens: jax.Array,
    context: jax.Array,
    line: Line | None,
    settings: Settings,
) -> tuple[jax.Array, ...]:
    """Per-token outputs of a function of `masked`, `[m, t]` each."""
    features = predict(model, params, contexts, prefix, tokens, context, line)
    found = read(
        features,
        model.head(params),
        tokens if line is None else laid(line, tokens),
        temperature=settings.temperature,
        chunk=settings.token_chunk,
    )
    if line is None:
        return found
    rows = jax.vmap(partial(Line.rows, steps=tokens.shape[-1]))
    return tuple(join_shards(rows(line, x)) for x in found)


def completion_logprobs(
    model, params, contexts, prefix, tokens, context, line, settings: Settings
) -> TokenLogprobs:
    """Log-probs and entropies of the completions of some rows."""
    where = model, params, contexts, prefix, tokens, context, line, settings
    logp, entropy = read_tokens(masked.token_logprobs, *where)
    return TokenLogprobs(logp=logp, entropy=entropy)


def logprobs(
    model: Model,
    params: Any,
    contexts: Contexts,
    tokens: jax.Array,
    mask: jax.Array,
    context: jax.Array,
    settings: Settings,
) -> jax.Array:
    """Log-probs of completions, micro-batch by micro-batch, without a gradient.

    Args:
        model: the policy.
        params: its parameters, or the reference's.
        contexts: `[C, P]`.
        tokens: `[M, T]` int32.
        mask: `[M, T]` bool.
        context: `[M]` int32 in [0, C).
        settings: how they are computed.

    Returns:
        `[M, T]` float32, nats; anything finite where `mask` is False.
    """
    prefix = prefill(model, params, contexts)

    def read(rows, line):
        tokens, context = rows
        own = completion_logprobs(
            model, params, contexts, prefix, tokens, context, line, settings
        )
        return (), own.logp

    return over_rows(model, read, contexts, (tokens, context), mask, settings)[1]


def token_stats(
    model: Model,
    params: Any,
    contexts: Contexts,
    tokens: jax.Array,
    mask: jax.Array,
    context: jax.Array,
    settings: Settings,
) -> TokenStats:
    """`TokenStats` of completions, without a gradient.

    Micro-batch by micro-batch, as `logprobs`, whose arguments these are.

    Returns:
        What the policy says of each token; anything finite where `mask` is False.
    """
    prefix = prefill(model, params, contexts)

    def read(rows, line):
        tokens, context = rows
        logp, entropy, norm, covariance = read_tokens(
            masked.token_logprobs_and_moments,
            model,
            params,
            contexts,
            prefix,
            tokens,
            context,
            line,
            settings,
        )
        return (), TokenStats(
            logp=logp, entropy=entropy, score_sq_norm=norm, entropy_logp_cov=covariance
        )

    return over_rows(model, read, contexts, (tokens, context), mask, settings)[1]


def confidences(
    model: Model,
    params: Any,
    contexts: Contexts,
    rollouts: Rollouts,
    *,
    temperature: float | jax.Array,
    k: int,
    window: int,
    prefix: Prefix | None = None,
) -> confidence.Scores:
    """Confidence scores of completions, from another forward pass of the policy.

    Some rows at a time, and of these some tokens, so that logits of all of them never
    exist together.

    Args:
        model: the policy.
        params: its parameters.
        contexts: `[C, P]`.
        rollouts: `[N, T]` completions.
        temperature: that they were drawn at, 1 for greedy ones.
        k: likeliest tokens.
        window: tokens of a window, and of the tail.
        prefix: `prefill` of the contexts, if it is known already.

    Returns:
        `[N]` each.
    """
    if prefix is None:
        prefix = prefill(model, params, contexts)
    head = model.head(params)
    count, steps = rollouts.tokens.shape
    fewest = min(count, -(-count * steps // TOKENS))
    parts = next(n for n in range(fewest, count + 1) if count % n == 0)

    def of(features: jax.Array) -> jax.Array:
        logits = jnp.einsum(
            "d,vd->v", features, head, preferred_element_type=jnp.float32
        )
        return confidence.of_tokens(logits / temperature, k=k)

    def read(rows: tuple[jax.Array, jax.Array]) -> tuple[tuple[()], jax.Array]:
        tokens, context = rows
        features = extend(
            model, params, prefix.take(context), contexts.mask[context], tokens
        )
        flat = features.reshape(-1, features.shape[-1])
        at_once = max(1, min(flat.shape[0], ENTRIES // head.shape[0]))
        return (), jax.lax.map(of, flat, batch_size=at_once).reshape(tokens.shape)

    _, sure = over_parts(
        read,
        (rollouts.tokens, rollouts.context),
        rollouts.mask,
        Settings(micro_batches=parts),
    )
    return confidence.scores(sure, rollouts.mask, window=window, tail=window)


def with_old(rows: Batch, logp: jax.Array, still_old: bool | jax.Array) -> Batch:
    """The rows with old log-probs; while the policy is still old, its own ones.

    Recomputing them would give the same numbers only up to rounding.
    """
    own = jax.lax.stop_gradient(logp)
    if rows.logp_old is not None:
        own = jnp.where(still_old, own, rows.logp_old)
    return dataclasses.replace(rows, logp_old=own)


def gradient(
    model: Model,
    params: Any,
    contexts: Contexts,
    batch: Batch,
    weight: jax.Array,
    token_loss: TokenLoss,
    settings: Settings,
    *,
    still_old: bool | jax.Array,
) -> tuple[jax.Array, Any, TokenLogprobs]:
    """Loss and gradient of a whole batch.

        L = sum over rows and tokens of weight * token_loss(logp, entropy, batch)

    Args:
        model: the policy.
        params: its parameters.
        contexts: `[C, P]`.
        batch: `[M, T]` rows.
        weight: `[M, T]` float32, share of each token in the loss.
        token_loss: `(logp, entropy, rows) -> [rows, T]`.
        settings: how log-probs are computed.
        still_old: whether params are those at the start of the step, so that the ratio
            is exactly 1; see `with_old`.

    Returns:
        The loss, `[]` float32; its gradient, like params; what the policy says of the
        tokens, without a gradient.
    """
    prefix = prefill(model, params, contexts)

    def loss_of(params, prefix, contexts, still_old, rows, weight, line):
        given = rows.tokens, rows.context, line, settings
        own = completion_logprobs(model, params, contexts, prefix, *given)
        rows = with_old(rows, own.logp, still_old)
        loss = token_loss(own.logp, own.entropy, rows)
        return jnp.sum(weight * loss), jax.lax.stop_gradient(own)

    def of_copy(known, of_own):
        params, prefix, *_ = known
        own_contexts, rows = of_own

        def pull(rows_and_weight, line):
            (loss, own), grads = jax.value_and_grad(
                loss_of, argnums=(0, 1), has_aux=True
            )(*known, *rows_and_weight, line)
            return (loss, like_params(model, grads[0]), grads[1]), own

        batch = rows[0]
        (loss, grads, pulled), own = over_rows(
            model, pull, contexts, rows, batch.mask, settings
        )
        pulled = over_copies(
            partial(jax.lax.psum_scatter, scatter_dimension=0, tiled=True), pulled
        )
        pulled = jax.tree.map(lambda g, x: g.astype(x.dtype), pulled, prefix)
        grads = pull_back(model, params, own_contexts, pulled, grads, batch, settings)
        return over_copies(jax.lax.psum, (loss, grads)), own

    known = params, prefix, contexts, jnp.asarray(still_old)
    (loss, grads), own = on_copies(of_copy, known, (contexts, (batch, weight)))
    return loss, grads, own


def pull_back(
    model: Model,
    params: Any,
    contexts: Contexts,
    pulled: Any,
    grads: Any,
    batch: Batch,
    settings: Settings,
) -> Any:
    """Gradients plus those through the contexts, a few contexts at a time.

    They are run through the model again, about as many tokens at once as a micro-batch
    has, so that activations of all of them never exist together.
    """
    count, width = contexts.tokens.shape
    tokens = batch.tokens.size // settings.parts(*batch.tokens.shape)
    parts = spread(count, -(-count * width // tokens))

    def add(total, part):
        contexts, pulled = part
        _, pull = jax.vjp(lambda p: prefill(model, p, contexts), params)
        more = like_params(model, pull(pulled)[0])
        return jax.tree.map(jnp.add, total, more), None

    return jax.lax.scan(add, grads, split((contexts, pulled), parts))[0]


def like_params(model: Model, grads: Any) -> Any:
    """Gradients laid out on the mesh like the parameters."""
    return jax.tree.map(constrain, grads, model.axes)


def transformation(
    optimizer: Callable[[], optax.GradientTransformation], clip_norm: float | jax.Array
) -> optax.GradientTransformation:
    """Gradient transformation: clipping by global norm, then the optimizer."""
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer())


@flax.struct.dataclass(kw_only=True)
class UpdateResult:
    """Loss, gradient norm and status of one optimizer update."""

    loss: jax.Array  # [] float32
    gradient_norm: jax.Array  # [] float32, before clipping
    applied: jax.Array  # [] bool, False: nothing to train on, or not finite
    finite: jax.Array  # [] bool, loss and gradient


def apply(
    tx: optax.GradientTransformation, params: Any, opt_state: Any, loss, grads, usable
) -> tuple[Any, Any, UpdateResult]:
    """Parameters after one optimizer update; unchanged if the update is unusable.

    An update is skipped as a whole (moments, schedule and weight decay too) where
    `usable` is False and where loss or gradient is not finite.

    Args:
        tx: clipping and optimizer.
        params: parameters.
        opt_state: its state.
        loss: `[]` float32.
        grads: tree like params.
        usable: `[]` bool, whether any token has a gradient.

    Returns:
        Parameters, optimizer state, what was done.
    """
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    applied = usable & finite

    def change(state):
        params, opt_state = state
        # optax raises floats to integer counts, which strict promotion would refuse.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    # A branch rather than a choice entry by entry: old and new never both exist.
    state = (params, opt_state)
    params, opt_state = jax.lax.cond(applied, change, lambda state: state, state)
    done = UpdateResult(loss=loss, gradient_norm=norm, applied=applied, finite=finite)
    return params, opt_state, done


def warmup_cosine(
    step: ArrayLike, *, peak: float, warmup: int, steps: int, end: float = 0.0
) -> jax.Array:
    """Learning rate: linear from 0 to `peak`, then half a cosine down to `end`.

    Args:
        step: `[]` integer, optimizer updates done.
        peak: highest rate.
        warmup: updates to get there.
        steps: updates after which the rate is `end`.
        end: lowest rate.

    Returns:
        `[]` float32.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, end)
    return jnp.asarray(schedule(jnp.asarray(step, jnp.float32)), jnp.float32)
