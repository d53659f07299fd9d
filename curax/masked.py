"""Reductions over the entries that count. Absent ones may hold anything, even NaN."""

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

    Their difference tells equal entries apart from unequal ones without rounding,
    which a float32 variance cannot. Arguments as `total`; both results are float32.
    """
    values = jnp.asarray(values, jnp.float32)
    some = jnp.any(where, axis=axis, keepdims=keepdims)
    low = jnp.min(values, axis, keepdims=keepdims, where=where, initial=jnp.inf)
    high = jnp.max(values, axis, keepdims=keepdims, where=where, initial=-jnp.inf)
    return jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)


def taken(
    features: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each token taken, and the entropy of what it was taken from.

        z = features head^T / temperature,  logp = z[token] - logsumexp z,
        H = logsumexp z - sum softmax(z) z

    With a chunk, the vocabulary is read `chunk` columns at a time, forward and
    backward, and no `[..., V]` array exists; the result is the same up to rounding.

    Args:
        features: `[..., D]` float.
        head: `[V, D]` float.
        tokens: `[...]` int32 in [0, V).
        temperature: positive; logits are divided by it.
        chunk: columns of the vocabulary at a time; 0 means all V.

    Returns:
        `[...]` float32 log-probs in nats, `[...]` float32 entropies in nats.
    """
    vocab = head.shape[0]
    size = min(chunk or vocab, vocab)
    count = -(-vocab // size)
    padded = jnp.pad(head, ((0, count * size - vocab), (0, 0)))
    parts = padded.reshape(count, size, -1)
    # Gradients of chunks add up in float32, whatever the products are made in.
    wide = jnp.asarray(features, jnp.float32)
    first_columns = jnp.arange(size, dtype=tokens.dtype)
    first_columns = first_columns.reshape(*(1,) * tokens.ndim, -1)

    @jax.checkpoint
    def read(carry, part):
        """Running maximum, sum e^z, sum e^z z (both under the maximum), z[token]."""
        top, total, first, own = carry
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
        return (
            higher,
            total * shrink + jnp.sum(e, -1),
            first * shrink + jnp.sum(e * jnp.where(e > 0, z, 0.0), -1),
            own + jnp.sum(jnp.where(here, z, 0.0), -1),
        ), None

    zeros = jnp.zeros(tokens.shape, jnp.float32)
    carry = (zeros + jnp.finfo(jnp.float32).min, zeros, zeros, zeros)
    starts = jnp.arange(count, dtype=tokens.dtype) * size
    if count == 1:
        carry, _ = read(carry, (starts[0], parts[0]))
    else:
        carry, _ = jax.lax.scan(read, carry, (starts, parts))
    top, total, first, own = carry
    normaliser = top + jnp.log(total)
    return own - normaliser, normaliser - first / total
