"""Masked reductions, and log-probs from features and head.

Entries that are masked out may hold anything, even NaN.
"""

import jax
import jax.numpy as jnp

Axis = int | tuple[int, ...] | None


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
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each token, and entropy of its distribution, from features and head.

        z = features head^T / temperature,  logp = z[token] - logsumexp z,
        H = logsumexp z - sum softmax(z) z

    With `chunk`, forward and backward passes read that many columns of the vocabulary
    at a time and make no `[..., V]` array; results agree up to rounding.

    Args:
        features: `[..., D]` float.
        head: `[V, D]` float.
        tokens: `[...]` int32 in [0, V).
        temperature: positive; logits are divided by it.
        chunk: columns of the vocabulary at a time; 0 means all V.

    Returns:
        `[...]` float32 log-probs in nats, `[...]` float32 entropies in nats.
    """
    top, total, first, own = _sums(features, head, tokens, temperature, chunk)
    normaliser = top + jnp.log(total)
    return own - normaliser, normaliser - first / total


def token_logprobs_and_moments(
    features: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`token_logprobs`, and two second moments of each token's distribution.

        score_sq_norm = |grad_z log pi_a|^2 = 1 - 2 pi_a + |pi|^2
        entropy_logp_cov = Cov_pi(pi, log pi) = sum_k pi_k^2 log pi_k + H |pi|^2

    with |pi|^2 = sum_k pi_k^2; all sums are over the whole vocabulary, in the same
    pass. The covariance is never negative.

    Args:
        features: as `token_logprobs`.
        head: as `token_logprobs`.
        tokens: as `token_logprobs`.
        temperature: as `token_logprobs`.
        chunk: as `token_logprobs`.

    Returns:
        `[...]` float32 each: log-probs, entropies, squared norms of the score in
        [0, 2], covariances in nats, at least 0.
    """
    top, total, first, own, second, slope = _sums(
        features, head, tokens, temperature, chunk, squares=True
    )
    normaliser = top + jnp.log(total)
    logp, entropy = own - normaliser, normaliser - first / total
    norm = second / total**2
    score_sq_norm = jnp.maximum(1.0 - 2.0 * jnp.exp(logp) + norm, 0.0)
    # sum pi^2 log pi = sum pi^2 z - normaliser |pi|^2.
    entropy_logp_cov = slope / total**2 - (first / total) * norm
    return logp, entropy, score_sq_norm, jnp.maximum(entropy_logp_cov, 0.0)


def _sums(
    features: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    temperature: float | jax.Array,
    chunk: int,
    *,
    squares: bool = False,
) -> tuple[jax.Array, ...]:
    """Sums over the vocabulary: (m, sum e, sum e z, z[token]), m = max z, e = e^(z-m).

    With `squares` also sum e^2 and sum e^2 z. All `[...]` float32.
    """
    vocab = head.shape[0]
    size = min(chunk or vocab, vocab)
    count = -(-vocab // size)
    padded = jnp.pad(head, ((0, count * size - vocab), (0, 0)))
    parts = padded.reshape(count, size, -1)
    # Gradients of chunks are summed in float32, whatever the dtype of the products.
    wide = jnp.asarray(features, jnp.float32)
    first_columns = jnp.arange(size, dtype=tokens.dtype)
    first_columns = first_columns.reshape(*(1,) * tokens.ndim, -1)

    @jax.checkpoint
    def read(carry, part):
        """Update the sums with a chunk of columns."""
        top, total, first, own, *more = carry
        start, weight = part
        column = start + first_columns
        z = jnp.einsum(
            "...d,vd->...v",
            wide.astype(features.dtype),
            weight,
            preferred_element_type=jnp.float32,
        )
        z = z / temperature
        z = jnp.where(column < vocab, z, jnp.finfo(jnp.float32).min)
        higher = jax.lax.stop_gradient(jnp.maximum(top, jnp.max(z, -1)))
        e, shrink = jnp.exp(z - higher[..., None]), jnp.exp(top - higher)
        here = tokens[..., None] == column
        finite = jnp.where(e > 0, z, 0.0)
        sums = (
            higher,
            total * shrink + jnp.sum(e, -1),
            first * shrink + jnp.sum(e * finite, -1),
            own + jnp.sum(jnp.where(here, z, 0.0), -1),
        )
        if squares:
            second, slope = more
            sums += (
                second * shrink**2 + jnp.sum(e**2, -1),
                slope * shrink**2 + jnp.sum(e**2 * finite, -1),
            )
        return sums, None

    zeros = jnp.zeros(tokens.shape, jnp.float32)
    carry = (zeros + jnp.finfo(jnp.float32).min, *(zeros,) * (5 if squares else 3))
    starts = jnp.arange(count, dtype=tokens.dtype) * size
    if count == 1:
        carry, _ = read(carry, (starts[0], parts[0]))
    else:
        carry, _ = jax.lax.scan(read, carry, (starts, parts))
    return carry


def rank(
    features: jax.Array, head: jax.Array, tokens: jax.Array, *, chunk: int = 0
) -> jax.Array:
    """Rank of each token by likelihood: 1 + the number of likelier tokens.

    Args:
        features: `[..., D]` float.
        head: `[V, D]` float.
        tokens: `[...]` int32 in [0, V).
        chunk: columns of the vocabulary at a time; 0 means all V.

    Returns:
        `[...]` int32, at least 1; ties share the best rank.
    """
    vocab = head.shape[0]
    size = min(chunk or vocab, vocab)
    count = -(-vocab // size)
    parts = jnp.pad(head, ((0, count * size - vocab), (0, 0))).reshape(count, size, -1)
    own = jnp.einsum(
        "...d,...d->...", features, head[tokens], preferred_element_type=jnp.float32
    )

    def above(part):
        start, weight = part
        z = jnp.einsum(
            "...d,vd->...v", features, weight, preferred_element_type=jnp.float32
        )
        column = start + jnp.arange(size, dtype=jnp.int32)
        other = column.reshape(*(1,) * tokens.ndim, -1)
        more = (z > own[..., None]) & (other < vocab) & (other != tokens[..., None])
        return jnp.sum(more, -1, dtype=jnp.int32)

    starts = jnp.arange(count, dtype=jnp.int32) * size
    return 1 + jnp.sum(jax.lax.map(above, (starts, parts)), 0, dtype=jnp.int32)
