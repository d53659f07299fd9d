"""Masked reductions, and log-probs from features and head.

Entries that are masked out may hold anything, even NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from curax.arrays import sharding, supports
from curax.settings.declared import RIGHT

Axis = int | tuple[int, ...] | None
IN_PIECES = ("tpu",)  # platforms on which logits exist for some columns at a time
PIECE = 2**24  # bytes of them, which lie in a chip's own memory
LANES = 128  # of a TPU, of which these columns are multiples


def right(
    outcome: jax.Array, among: jax.Array, threshold: float | jax.Array = RIGHT
) -> jax.Array:
    """Those completions of `among` whose outcome is above the threshold, bool."""
    return among & (jnp.asarray(outcome) > threshold)


def total(
    values: jax.Array, where: jax.Array, *, axis: Axis = -1, keepdims: bool = False
) -> jax.Array:
    """Sum of `values` where `where` is True, in float32; 0 over nothing.

    Args:
        values: float, int or bool array.
        where: bool array of the same shape, True on entries that count.
        axis: reduced axes; None reduces all.
        keepdims: keep the reduced axes with length 1.

    Returns:
        float32, `values` without `axis`. Its gradient is 0 where `where` is False.
    """
    kept = jnp.where(where, jnp.asarray(values, jnp.float32), 0.0)
    return jnp.sum(kept, axis=axis, keepdims=keepdims)


def mean(
    values: jax.Array, where: jax.Array, *, axis: Axis = -1, keepdims: bool = False
) -> jax.Array:
    """Mean of `values` where `where` is True; 0 over nothing. Arguments as `total`."""
    count = total(where, where, axis=axis, keepdims=keepdims)
    return total(values, where, axis=axis, keepdims=keepdims) / jnp.maximum(count, 1.0)


def variance(
    values: jax.Array,
    where: jax.Array,
    *,
    axis: Axis = -1,
    keepdims: bool = False,
    ddof: int = 0,
) -> jax.Array:
    """Sum of squared deviations over (count - ddof); 0 where count <= ddof.

    The mean is subtracted before squaring, so a large common offset costs no digits.

    Args:
        values: as `total`.
        where: as `total`.
        axis: as `total`.
        keepdims: as `total`.
        ddof: 0 for the population variance, 1 for Bessel's correction.

    Returns:
        float32, `values` without `axis`, in squared units of `values`.
    """
    count = total(where, where, axis=axis, keepdims=keepdims)
    centre = mean(values, where, axis=axis, keepdims=True)
    deviation = jnp.where(where, jnp.asarray(values, jnp.float32) - centre, 0.0)
    squares = jnp.sum(deviation**2, axis=axis, keepdims=keepdims)
    return jnp.where(count > ddof, squares / jnp.maximum(count - ddof, 1.0), 0.0)


def extent(
    values: jax.Array, where: jax.Array, *, axis: Axis = -1, keepdims: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest of `values` where `where` is True; (0, 0) over nothing.

    Their difference is 0 exactly where all entries are equal, which a float32 variance
    is not. Arguments as `total`; both results are float32.
    """
    values = jnp.asarray(values, jnp.float32)
    some = jnp.any(where, axis=axis, keepdims=keepdims)
    low = jnp.min(values, axis, keepdims=keepdims, where=where, initial=jnp.inf)
    high = jnp.max(values, axis, keepdims=keepdims, where=where, initial=-jnp.inf)
    return jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)


def token_logprobs(
    features: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int = 0,
    support: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each token, and entropy of its distribution, from features and head.

        z = features head^T / temperature,  logp = z[token] - logsumexp z,
        H = logsumexp z - sum softmax(z) z

    With `chunk`, forward and backward passes make the logits of about that many tokens
    at a time, and no `[..., V]` array of all; results agree up to rounding. The
    vocabulary stays sharded as the head is, and so does the head's gradient.

    With a kept set S all sums are over S and the token itself: this is the policy that
    is cut to S and divided by what is left, and its gradient that with S held fixed.

    Args:
        features: `[..., D]` float; on a mesh the first axis are rows.
        head: `[V, D]` float.
        tokens: `[...]` int32 in [0, V).
        temperature: positive; logits are divided by it.
        chunk: tokens of a shard of the rows at a time, at least one of each row; the
            last axis is cut. 0 means all. On TPUs all tokens are taken at a time, and
            the vocabulary is cut.
        support: `[..., S]`, the kept set of each token, as `supports.packed`; None: all
            tokens are kept.

    Returns:
        `[...]` float32 log-probs in nats, `[...]` float32 entropies in nats.
    """
    top, total, first, own = _sums(features, head, tokens, temperature, chunk, support)
    normaliser = top + jnp.log(total)
    return own - normaliser, normaliser - first / total


def token_logprobs_and_moments(
    features: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int = 0,
    support: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`token_logprobs`, and two second moments of each token's distribution.

        score_sq_norm = |grad_z log pi_a|^2 = 1 - 2 pi_a + |pi|^2
        entropy_logp_cov = Cov_pi(pi, log pi) = sum_k pi_k^2 log pi_k + H |pi|^2

    with |pi|^2 = sum_k pi_k^2; all sums are over the whole vocabulary, or what is kept
    of it, in the same pass. The covariance is never negative.

    Args:
        features: as `token_logprobs`.
        head: as `token_logprobs`.
        tokens: as `token_logprobs`.
        temperature: as `token_logprobs`.
        chunk: as `token_logprobs`.
        support: as `token_logprobs`.

    Returns:
        `[...]` float32 each: log-probs, entropies, squared norms of the score in
        [0, 2], covariances in nats, at least 0.
    """
    top, total, first, own, second, slope = _sums(
        features, head, tokens, temperature, chunk, support, squares=True
    )
    normaliser = top + jnp.log(total)
    logp, entropy = own - normaliser, normaliser - first / total
    norm = second / total**2
    score_sq_norm = jnp.maximum(1.0 - 2.0 * jnp.exp(logp) + norm, 0.0)
    # sum pi^2 log pi = sum pi^2 z - normaliser |pi|^2.
    entropy_logp_cov = slope / total**2 - (first / total) * norm
    return logp, entropy, score_sq_norm, jnp.maximum(entropy_logp_cov, 0.0)


# Sums over the vocabulary, of logits z = features head^T / temperature


def _sums(
    features: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    temperature: float | jax.Array,
    chunk: int,
    support: jax.Array | None,
    *,
    squares: bool = False,
) -> tuple[jax.Array, ...]:
    """Sums over the vocabulary: (m, sum e, sum e z, z[token]), m = max z, e = e^(z-m).

    With `squares` also sum e^2 and sum e^2 z. All `[...]` float32.
    """
    shape = tokens.shape
    steps = shape[-1] if shape else 1
    by_row = (
        features.reshape(-1, steps, features.shape[-1]),
        tokens.reshape(-1, steps),
    )
    if support is not None:
        by_row += (support.reshape(-1, steps, support.shape[-1]),)
    temperature = jnp.asarray(temperature, jnp.float32)
    places = _MeshAxes.of(head) if sharding.active() else None
    columns = 0
    if sharding.platform() in IN_PIECES:
        rows = -(-tokens.size // sharding.shards("rows"))
        columns = max(1, PIECE // (4 * max(rows, 1)) // LANES) * LANES
    options = _SumOptions(chunk, squares, places, columns)

    def run(features, tokens, support=None):
        return _row_sums(options, features, head, tokens, support, temperature)

    sums = sharding.padded_rows(run, *by_row)
    return tuple(x.reshape(shape) for x in sums)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_sums(options, features, head, tokens, support, temperature):
    """`_sums` of `[N, T, D]` features and `[N, T]` tokens, a few tokens at a time.

    On a mesh every device has its rows and its part of the vocabulary. The head is
    gathered along `embed`, once for both passes; its gradient is summed in float32,
    first over chunks, then between devices, each of which gets its own part.
    """
    return _row_sums_forward(options, features, head, tokens, support, temperature)[0]


def _row_sums_forward(options, features, head, tokens, support, temperature):
    """Sums as of `_row_sums`, and the residuals that the backward pass reads."""
    places = options.places or _MeshAxes()

    def run(features, head, tokens, support, temperature):
        if places.embed:
            head = jax.lax.all_gather(head, places.embed, axis=1, tiled=True)
        first = places.first_column(head)

        def read(part):
            features, tokens, support = part
            z = _logits(features, head, temperature)
            z = _kept(z, tokens - first, support, first)
            top = jnp.max(z, -1)
            if places.vocab:
                top = jax.lax.pmax(top, places.vocab)
            sums = _sums_below(z, top, tokens - first, options.squares)
            return top, *(jax.lax.psum(sums, places.vocab) if places.vocab else sums)

        if options.columns:
            return _read_pieces(
                options, features, head, tokens, support, temperature
            ), head
        return _in_chunks(read, (features, tokens, support), options.chunk), head

    rows, whole, part = places.rows, places.whole, places.part
    run = options.on_mesh(run, (rows, part, rows, rows, P()), (rows, whole))
    sums, head = run(features, head, tokens, support, temperature)
    return sums, (features, head, tokens, support, temperature, sums[0])


def _row_sums_backward(options, saved, slopes):
    """Gradients of features, head and temperature; the maximum has none."""
    features, head, tokens, support, temperature, top = saved
    places = options.places or _MeshAxes()

    def run(features, head, tokens, support, temperature, top, slopes):
        first = places.first_column(head)

        def pull(part):
            features, tokens, support, top, slopes = part

            def sums(z):
                z = _kept(z, tokens - first, support, first)
                return _sums_below(z, top, tokens - first, options.squares)

            return _pulled(sums, slopes, features, head, temperature)

        if options.columns:
            own, whole = _pull_pieces(
                options, features, head, tokens, support, temperature, top, slopes
            )
        else:
            parts = (features, tokens, support, top, slopes)
            own, whole = _in_chunks(pull, parts, options.chunk, summed=head.shape)
        if places.vocab:
            own = jax.lax.psum(own, places.vocab)
        others = places.row
        if places.embed:
            whole = jax.lax.psum_scatter(
                whole, places.embed, scatter_dimension=1, tiled=True
            )
            others = tuple(axis for axis in others if axis not in places.embed)
        # Cut before, a TPU would sum all of it everywhere, and take a part.
        whole = whole[: head.shape[0]]
        return own, jax.lax.psum(whole, others) if others else whole

    rows, whole, part = places.rows, places.whole, places.part
    inputs = (rows, whole, rows, rows, P(), rows, rows)
    run = options.on_mesh(run, inputs, (rows, part))
    own, slope = run(features, head, tokens, support, temperature, top, slopes[1:])
    # Logits depend on features / temperature alone.
    heat = -jnp.sum(features.astype(jnp.float32) * own) / temperature
    return own.astype(features.dtype), slope.astype(head.dtype), None, None, heat


_row_sums.defvjp(_row_sums_forward, _row_sums_backward)


def _read_pieces(options, features, head, tokens, support, temperature):
    """Sums as of `_row_sums`, by pieces of the vocabulary, with a running maximum."""
    places = options.places or _MeshAxes()

    def scaled(state, top):  # sums below another maximum
        below = jnp.exp(state[0] - top)
        powers = below, below, 1.0, below**2, below**2
        return tuple(x * y for x, y in zip(state[1:], powers, strict=False))

    def add(state, piece):
        z = _logits(features, piece.head, temperature)
        z, column = _of_piece(z, piece, tokens, support)
        top = jnp.maximum(state[0], jnp.max(z, -1))
        more = _sums_below(z, top, column, options.squares)
        pairs = zip(scaled(state, top), more, strict=True)
        return (top, *(x + y for x, y in pairs)), None

    none = jnp.zeros(tokens.shape, jnp.float32)
    state = none + jnp.finfo(jnp.float32).min, *(none,) * (5 if options.squares else 3)
    state, _ = jax.lax.scan(add, state, _pieces(options, head))
    if not places.vocab:
        return state
    top = jax.lax.pmax(state[0], places.vocab)
    return top, *jax.lax.psum(scaled(state, top), places.vocab)


def _pull_pieces(options, features, head, tokens, support, temperature, top, slopes):
    """Gradients of features and head, in float32, by pieces of the vocabulary.

    That of the head has the rows by which the last piece is filled up.
    """

    def add(own, piece):
        def sums(z):
            z, column = _of_piece(z, piece, tokens, support)
            return _sums_below(z, top, column, options.squares)

        more, whole = _pulled(sums, slopes, features, piece.head, temperature)
        return own + more, whole

    start = jnp.zeros(features.shape, jnp.float32)
    own, parts = jax.lax.scan(add, start, _pieces(options, head))
    return own, parts.reshape(-1, head.shape[1])


def _pulled(sums, slopes, features, head, temperature):
    """Gradients of features and head, in float32, from those of sums of the logits.

    Products are made in the precision of the head, as those of the logits are.
    """
    pull = jax.vjp(sums, _logits(features, head, temperature))[1]
    dz = (pull(slopes)[0] / temperature).astype(head.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    return product("...v,vd->...d", dz, head), product("...v,...d->vd", dz, features)


class _Piece(NamedTuple):
    """Some columns of the logits; or pieces that are scanned over."""

    head: jax.Array  # [S, D]
    first: jax.Array  # [] int32, its first column
    real: jax.Array  # [S] bool, columns that are of the vocabulary


def _pieces(options, head) -> _Piece:
    """Pieces of the head of a device, the last filled up."""
    first = (options.places or _MeshAxes()).first_column(head)
    size = min(options.columns, head.shape[0])
    count = -(-head.shape[0] // size)
    wide = jnp.pad(head, ((0, count * size - head.shape[0]), (0, 0)))
    return _Piece(
        head=wide.reshape(count, size, -1),
        first=first + size * jnp.arange(count, dtype=jnp.int32),
        real=(jnp.arange(count * size) < head.shape[0]).reshape(count, size),
    )


def _of_piece(z, piece, tokens, support):
    """Logits z of a piece, and the column of each token in it, which may be none."""
    column = tokens - piece.first
    # What fills a shard's last piece up stands where tokens of the next shard would.
    column = jnp.where(column < jnp.sum(piece.real), column, -1)
    z = jnp.where(piece.real, z, -jnp.inf)
    return _kept(z, column, support, piece.first), column


def _logits(features, head, temperature):
    """`[..., V]` float32 logits, features head^T / temperature."""
    z = jnp.einsum("...d,vd->...v", features, head, preferred_element_type=jnp.float32)
    return z / temperature


def _here(z, column):
    """Which of logits z is that of the token, `[..., V]` bool; column is its own."""
    columns = jnp.arange(z.shape[-1], dtype=column.dtype)
    return column[..., None] == columns.reshape(*(1,) * column.ndim, -1)


def _kept(z, column, support, first):
    """Logits z, -inf where a token is not kept; that of `first` is the first of them.

    The token itself is kept always: behind the end of a row nothing is noted.
    """
    if support is None:
        return z
    kept = supports.among(support, first, z.shape[-1]) | _here(z, column)
    return jnp.where(kept, z, -jnp.inf)


def _sums_below(z, top, column, squares):
    """Sums over the last axis of logits z, as of `_sums`; `top` is their maximum."""
    if z.ndim > 2 and len(z) == 1:  # as in RMSNorm: sums of products take a CPU long
        inner = _sums_below(z[0], top[0], column[0], squares)
        return tuple(one[None] for one in inner)
    here = _here(z, column)
    e = jnp.exp(z - top[..., None])
    finite = jnp.where(e > 0, z, 0.0)
    sums = (
        jnp.sum(e, -1),
        jnp.sum(e * finite, -1),
        jnp.sum(jnp.where(here, z, 0.0), -1),
    )
    if squares:
        sums += (jnp.sum(e**2, -1), jnp.sum(e**2 * finite, -1))
    return sums


class _MeshAxes(NamedTuple):
    """Axes of the mesh along which rows and the head are sharded."""

    row: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()

    @classmethod
    def of(cls, head: jax.Array) -> "_MeshAxes":
        """Mesh axes of a head `[V, D]`, and of rows."""
        vocab, embed = zip(("vocab", "embed"), head.shape, strict=True)
        axes = sharding.mesh_axes
        return cls(axes("rows"), axes(*vocab), axes(*embed))

    @property
    def rows(self) -> P:
        """Partition spec of rows `[N, ...]`."""
        return P(self.row or None)

    @property
    def part(self) -> P:
        """Partition spec of the sharded head."""
        return P(self.vocab or None, self.embed or None)

    @property
    def whole(self) -> P:
        """Partition spec of the head after gathering it along `embed`."""
        return P(self.vocab or None)

    def first_column(self, head: jax.Array) -> jax.Array | int:
        """Index in the vocabulary of the first row of a device's shard of the head."""
        return jax.lax.axis_index(self.vocab) * head.shape[0] if self.vocab else 0


class _SumOptions(NamedTuple):
    """Static options of `_row_sums`, the same in both passes."""

    chunk: int
    squares: bool
    places: _MeshAxes | None  # None: no mesh
    columns: int  # of the logits at a time; 0: all, of some tokens at a time

    def on_mesh(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Any:
        """The function mapped over the shards of the mesh; without a mesh, itself."""
        if self.places is None:
            return function
        return jax.shard_map(
            function, in_specs=inputs, out_specs=outputs, check_vma=False
        )


def _in_chunks(
    function: Callable[[Any], Any], rows: Any, chunk: int, summed: Any = None
) -> Any:
    """Output of a function of leaves `[N, t, ...]`, mapped over T chunk by chunk.

    Args:
        function: returns leaves `[N, t, ...]`; with `summed`, and an array beside them.
        rows: leaves `[N, T, ...]`.
        chunk: N t at most, where that leaves a token of each row; 0: all.
        summed: shape of that array, which is summed over chunks in float32.
    """
    count, steps = jax.tree.leaves(rows)[0].shape[:2]
    size = min(max(1, chunk // max(count, 1)), steps) if chunk else steps
    number = -(-steps // max(size, 1))
    if number <= 1:
        return function(rows)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, number * size - steps)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(count, number, size, *x.shape[2:]), 1, 0)

    def add(total, part):
        if summed is None:
            return total, function(part)
        own, more = function(part)
        return total + more, own

    start = jnp.zeros(summed or (), jnp.float32)
    total, own = jax.lax.scan(add, start, jax.tree.map(cut, rows))
    own = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(count, -1, *x.shape[3:])[:, :steps], own
    )
    return own if summed is None else (own, total)


def rank(
    features: jax.Array, head: jax.Array, tokens: jax.Array, *, chunk: int = 0
) -> jax.Array:
    """Rank of each token by likelihood: 1 + the number of likelier tokens.

    Args:
        features: `[N, T, D]` float.
        head: `[V, D]` float.
        tokens: `[N, T]` int32 in [0, V).
        chunk: as `token_logprobs`.

    Returns:
        `[N, T]` int32, at least 1; ties share the best rank.
    """
    own = jnp.einsum(
        "...d,...d->...", features, head[tokens], preferred_element_type=jnp.float32
    )
    head = sharding.constrain(head, ("vocab", None))

    def likelier(part):
        features, tokens, own = part
        z = _logits(features, head, 1.0)
        above = (z > own[..., None]) & ~_here(z, tokens)
        return jnp.sum(above, -1, dtype=jnp.int32)

    return 1 + _in_chunks(
        likelier, (features, tokens, own), chunk * sharding.shards("rows")
    )


@jax.custom_batching.custom_vmap
def somewhere(slots: jax.Array) -> jax.Array:
    """`[]` bool: whether any slot is True; under vmap, any slot of any sampler.

    Where a condition differs within a batch, old and new would be chosen entry by entry
    of the cache, in every step. A sampler whose slots are all idle writes nothing, so
    it may as well go on until the last is done.
    """
    return jnp.any(slots)


@somewhere.def_vmap
def _(axis_size: int, in_batched: list[bool], slots: jax.Array):
    return jnp.any(slots), False
