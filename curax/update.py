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
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from curax.arrays import masked, sharding
from curax.arrays.accumulate import Adding, each_layer, onto, together
from curax.arrays.lines import Homes, Line, Lines, Visible, places
from curax.arrays.micro_batches import (
    added,
    ends,
    join_shards,
    over_lines,
    over_micro_batches,
    split,
    zeros,
)
from curax.rollout import Prefix, extend, prefill
from curax.types import Batch, Contexts, Model

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
    # Rows of a context at most, else nothing but NaN comes back; 0: any number, so that
    # rows lie anywhere on a mesh.
    rows_per_context: int = flax.struct.field(pytree_node=False, default=0)

    def count(self, rows: int, steps: int) -> int:
        """Micro-batches of `[rows, steps]` tokens; each spreads over all shards."""
        counted = self.tokens_per_micro_batch
        fewest = -(-rows * steps // self._tokens) if counted else self.micro_batches
        return sharding.spread(rows, fewest)

    def cut(self, mask: jax.Array) -> dict[str, int]:
        """How `over_micro_batches` cuts rows of a mask."""
        return {"count": self.count(*mask.shape), "buckets": self.length_buckets}

    @property
    def _tokens(self) -> int:
        """Tokens of a micro-batch, over all shards of the rows."""
        return self.tokens_per_micro_batch * sharding.shards("rows")


class TokenLogprobs(NamedTuple):
    """Log-prob and entropy of the policy at each token of a batch."""

    logp: jax.Array  # [M, T] float32, nats, of the token taken
    entropy: jax.Array  # [M, T] float32, nats


class TokenStats(NamedTuple):
    """Log-prob, entropy, score norm and covariance of the policy at each token."""

    logp: jax.Array  # [M, T] float32, nats, of the token taken
    entropy: jax.Array  # [M, T] float32, nats
    # [M, T] float32, |d logp / d logits|^2 = 1 - 2 pi_a + |pi|^2
    score_sq_norm: jax.Array
    entropy_logp_cov: jax.Array  # [M, T] float32, nats, E[pi (log pi + H)]


def packing(
    model: Model, contexts: Contexts, mask: jax.Array, settings: Settings
) -> Lines | None:
    """How rows are packed into lines; None: they are not."""
    tokens = settings.tokens_per_micro_batch
    if not model.packs or not tokens:
        return None
    return model.packs(tokens, mask.shape[-1], contexts.mask.shape[-1])


def homes(
    model: Model,
    contexts: Contexts,
    mask: jax.Array,
    context: jax.Array,
    support: jax.Array | None,
    settings: Settings,
) -> Homes | None:
    """Contexts dealt to shards with their rows; None: rows read contexts of any shard.

    Where rows are packed and there are `places` for them, and without kept sets, which
    are much to move.
    """
    count, parts = len(contexts.mask), sharding.shards("rows")
    rows = places(len(mask), count, parts, settings.rows_per_context)
    packs = packing(model, contexts, mask, settings)
    if not rows or not packs or support is not None:
        return None
    return Homes.of(ends(mask), context, contexts=count, shards=parts, rows=rows)


def token_features(
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
    # Where a line reads contexts of any shard each layer gathers its own, not before.
    names = "rows", "heads", None, None  # behind layers, where these are stacked
    cache = jax.tree.map(
        lambda x: sharding.constrain(x, (None,) * (x.ndim - 4) + names), prefix.cache
    )
    own = context.reshape(line.start.shape)
    visible = Visible(
        row=line.row,
        place=line.place,
        contexts=own,
        seen=contexts.mask,
        tile=line.tile,
        at_home=line.at_home,
    )
    of_tile = visible.context
    place = jnp.arange(line.tile, dtype=jnp.int32)[None, None]
    place = place + line.place[..., None] * line.tile

    def taken(x):  # [D, U, ...] of the context of each tile, from [C, ...]
        if line.at_home:
            return sharding.on_shards(lambda x, at: x[at % len(x)], x, of_tile)
        return sharding.constrain(x, (None,) * x.ndim)[of_tile]

    length = taken(jnp.sum(contexts.mask, -1, dtype=jnp.int32))
    features, _ = model.features(
        params,
        laid(line, jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))),
        jnp.maximum(length[..., None] + place - 1, 0).reshape(len(own), -1),
        visible,
        cache,
    )
    first = taken(prefix.last)[:, :, None]
    apart = features.reshape(*place.shape, -1)
    return jnp.where((place == 0)[..., None], first, apart).reshape(features.shape)


def laid(line: Line, rows: jax.Array) -> jax.Array:
    """`[D, L, ...]` of each token in the order of lines, from rows `[D R, T, ...]`."""
    rows = rows.reshape(*line.start.shape, *rows.shape[1:])
    return sharding.shard_rows(jax.vmap(Line.tiles)(line, rows))


def read_tokens(
    read: Callable[..., tuple[jax.Array, ...]],
    model: Model,
    params: Any,
    contexts: Contexts,
    prefix: Prefix,
    rows: tuple[jax.Array, jax.Array, jax.Array | None],
    line: Line | None,
    settings: Settings,
) -> tuple[jax.Array, ...]:
    """Per-token outputs of a function of `masked`, `[m, t]` each.

    Rows are tokens, contexts of the rows, and kept sets.
    """
    tokens, context, support = rows
    features = token_features(model, params, contexts, prefix, tokens, context, line)
    given = tokens, support
    if line is not None:
        given = jax.tree.map(partial(laid, line), given)
    found = read(
        features,
        model.head(params),
        given[0],
        temperature=settings.temperature,
        chunk=settings.token_chunk,
        support=given[1],
    )
    if line is None:
        return found
    back = jax.vmap(partial(Line.rows, steps=tokens.shape[-1]))
    return tuple(join_shards(back(line, x)) for x in found)


def over_all(
    read: Callable[..., tuple[jax.Array, ...]],
    model: Model,
    params: Any,
    contexts: Contexts,
    rows: tuple[jax.Array, jax.Array, jax.Array | None],
    mask: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, ...]:
    """`read_tokens` of all rows, micro-batch by micro-batch, `[M, T]` each."""
    tokens, context, support = rows
    found = homes(model, contexts, mask, context, support, settings)
    if found:
        here = tokens, mask
        contexts, context, (tokens, mask) = found.moved(contexts, context, here)
    prefix = prefill(model, params, contexts)

    def of(rows, line=None):
        where = model, params, contexts, prefix, rows, line, settings
        return (), read_tokens(read, *where)

    given = tokens, context, support
    if how := packing(model, contexts, mask, settings):
        how = how._replace(at_home=found is not None)
        _, out = over_lines(lambda _, *own: of(*own), (), given, mask, how)
    else:
        _, out = over_micro_batches(of, given, mask, **settings.cut(mask))
    return found.back(out, len(rows[0])) if found else out


def logprobs(
    model: Model,
    params: Any,
    contexts: Contexts,
    tokens: jax.Array,
    mask: jax.Array,
    context: jax.Array,
    settings: Settings,
    support: jax.Array | None = None,
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
        support: `[M, T, S]`, kept sets that they are log-probs within, as of
            `masked.token_logprobs`; None: all tokens are kept.

    Returns:
        `[M, T]` float32, nats; anything finite where `mask` is False.
    """

    def read(*args, **options):
        return masked.token_logprobs(*args, **options)[:1]

    rows = tokens, context, support
    return over_all(read, model, params, contexts, rows, mask, settings)[0]


def token_stats(
    model: Model,
    params: Any,
    contexts: Contexts,
    tokens: jax.Array,
    mask: jax.Array,
    context: jax.Array,
    settings: Settings,
    support: jax.Array | None = None,
) -> TokenStats:
    """`TokenStats` of completions, without a gradient.

    Micro-batch by micro-batch, as `logprobs`, whose arguments these are.

    Returns:
        What the policy says of each token; anything finite where `mask` is False.
    """
    rows, read = (tokens, context, support), masked.token_logprobs_and_moments
    return TokenStats(*over_all(read, model, params, contexts, rows, mask, settings))


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
    count, context = len(batch.tokens), batch.context
    found = homes(model, contexts, batch.mask, context, batch.support, settings)
    at_home = found is not None
    if found:
        weighed = batch, weight
        contexts, context, (batch, weight) = found.moved(contexts, context, weighed)
        batch = dataclasses.replace(batch, context=context)
    prefix = prefill(model, params, contexts)

    def loss_of(at, params_of, prefix_of, contexts, still_old, rows, weight, line):
        params, prefix = params_of(at[0]), prefix_of(at[1])
        given = rows.tokens, rows.context, rows.support
        where = model, params, contexts, prefix, given, line, settings
        own = TokenLogprobs(*read_tokens(masked.token_logprobs, *where))
        rows = with_old(rows, own.logp, still_old)
        loss = token_loss(own.logp, own.entropy, rows)
        return jnp.sum(weight * loss), jax.lax.stop_gradient(own)

    def pull(by_params, by_prefix, known, line=None):
        """Loss and gradients by what parameters and prefix are each made of."""
        makers, at = zip(by_params, by_prefix, strict=True)
        found = jax.value_and_grad(loss_of, has_aux=True)(at, *makers, *known, line)
        (loss, own), (of_params, of_prefix) = found
        return (loss, like_params(model, of_params), of_prefix), own

    def pull_line(known, few, total, rows_and_weight, line):
        """The total with a line, of `few` rows, for which their contexts are taken."""
        (params, prefix, contexts, still_old), (rows, weight) = known, rows_and_weight
        (loss, grads, pulled), which = total, rows.context
        if few:
            prefix, contexts = jax.tree.map(lambda x: x[which], (prefix, contexts))
            place = jnp.arange(which.size, dtype=which.dtype)
            rows = dataclasses.replace(rows, context=place)
        by_params, by_prefix = (itself, params), (itself, prefix)
        if model.adding:
            by_params = partial(model.adding, params), grads
            if not few:
                by_prefix = partial(prefix_adding, prefix), pulled
        known = contexts, still_old, rows, weight
        (more, new, of_line), own = pull(by_params, by_prefix, known, line)
        grads = new if model.adding else added(grads, new)
        if few:
            pulled = jax.tree.map(lambda x, g: x.at[which].add(g), pulled, of_line)
        else:
            pulled = of_line if model.adding else added(pulled, of_line)
        return (loss + more, grads, pulled), own

    def of_copy(known, of_own):
        (params, still_old, shared), (own_contexts, rows, apart) = known, of_own
        prefix, contexts = apart or shared
        batch, weight = rows
        if at_home:  # contexts are those of this copy
            own = batch.context % len(own_contexts.mask)
            rows = dataclasses.replace(batch, context=own), weight
        if how := packing(model, contexts, batch.mask, settings):
            # With few rows of a line, gradients of all contexts would be most of what
            # it writes. Where rows lie on several shards, contexts do too.
            few = bool(how.rows) and sharding.shards("rows") == 1
            in_place = model.adding and not few
            given = prefix
            if in_place:
                given = dataclasses.replace(prefix, cache=together(prefix.cache))
            known = params, given, contexts, still_old
            total = jnp.float32(0), like_params(model, zeros(params)), zeros(given)
            (loss, grads, pulled), own = over_lines(
                partial(pull_line, known, few),
                *(total, rows, batch.mask, how._replace(at_home=at_home)),
            )
            if in_place:
                cache = each_layer(pulled.cache, len(prefix.cache))
                pulled = dataclasses.replace(pulled, cache=cache)
        else:

            def of_rows(rows):
                known = contexts, still_old, *rows
                return pull((itself, params), (itself, prefix), known)

            (loss, grads, pulled), own = over_micro_batches(
                of_rows, rows, batch.mask, **settings.cut(batch.mask)
            )
        if not at_home:
            pulled = sharding.own_of_copies(pulled)
        pulled = jax.tree.map(lambda g, x: g.astype(x.dtype), pulled, prefix)
        grads = pull_back(model, params, own_contexts, pulled, grads, batch, settings)
        return sharding.over_copies(jax.lax.psum, (loss, grads)), own

    read = prefix, contexts  # by the rows of a copy: its own, or those of all
    shared, apart = ((), read) if at_home else (read, ())
    known = params, jnp.asarray(still_old), shared
    own = contexts, (batch, weight), apart
    (loss, grads), own = sharding.on_copies(of_copy, known, own)
    if found:
        own, loss = found.back(own, count), jnp.where(found.whole, loss, jnp.nan)
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
    has, so that activations of all of them never exist together. Gradients of layers
    are added in place where the model can, as those of lines are.
    """
    count, width = contexts.tokens.shape
    tokens = batch.tokens.size // settings.count(*batch.tokens.shape)
    pieces = sharding.spread(count, -(-count * width // tokens))

    def add(total, piece):
        contexts, pulled = piece
        make, at = itself, params
        if model.adding:
            make, at = partial(model.adding, params), total
        _, pull = jax.vjp(lambda at: prefill(model, make(at), contexts), at)
        more = like_params(model, pull(pulled)[0])
        return more if model.adding else added(total, more), None

    return jax.lax.scan(add, grads, split((contexts, pulled), pieces))[0]


def itself(x: Any) -> Any:
    """The same."""
    return x


def prefix_adding(prefix: Prefix, totals: Prefix) -> Prefix:
    """A prefix whose gradient is added to totals; of both all layers are together."""
    cache = Adding(prefix.cache, totals.cache)
    return Prefix(cache=cache, last=onto(prefix.last, totals.last))


def like_params(model: Model, grads: Any) -> Any:
    """Gradients laid out on the mesh like the parameters."""
    return jax.tree.map(sharding.constrain, grads, model.axes)


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
