"""How far a completion would move the parameters: norms of its score.

    s(y) = grad_theta log pi(y | x),   log pi(y | x) = sum_t log pi(y_t | x, y_<t)

The sum is over tokens, not their mean, so norms grow with length. They say how noisy
the gradient of a prompt is, hence how many completions it needs. Three sizes of theta,
dearest first: parameters chosen by name (`gradient`), the output head alone in closed
form (`last_layer`), the logits (`logits`, from what the sampler has stored).

A recipe's pilot calls `(model, params, contexts, rollouts, temperature) -> [N]`; other
options are bound by the recipe. Whoever pools the completions of a prompt chooses
between the mean of the norms and their root mean square, which is what the variance
bound of GVM asks for and is never smaller.
"""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from flax.core.spmd import logical_axis_rules

from curax.arrays import checks, masked, supports
from curax.arrays.micro_batches import join, split
from curax.arrays.sharding import shard_rows
from curax.rollout import extend, prefill
from curax.settings.config_types import Count, Natural, Positive
from curax.types import BoolT, Contexts, Float, FloatT, FloatTD, IntT, Model, Rollouts

# What is differentiated, and how the whole parameters are made of it again.
Chosen = tuple[Any, Callable[[Any], Any]]
Norms = Annotated[jax.Array, "[N] float"]
Head = Annotated[jax.Array, "[V, D] float"]


# ----- rules for a recipe's pilot


def embedding(params: Any) -> Chosen:
    """The token embeddings; of a tied model also what they are as output head."""
    return params["embed"], lambda chosen: {**params, "embed": chosen}


def head(params: Any) -> Chosen:
    """The output head.

    Raises:
        ValueError: if the model is tied, in a sentence.
    """
    if "head" not in params:
        raise ValueError(
            "score.head finds no output head, as the model is tied; use "
            "score.embedding, or score.last_layer for its part as a head."
        )
    return params["head"], lambda chosen: {**params, "head": chosen}


def last_block(params: Any) -> Chosen:
    """Attention and MLP of the last layer.

    Where layers are stacked for a scan, the backward pass computes the gradients of all
    of them nevertheless; the norm is that of the last one.
    """
    layers = params["layers"]
    last = str(len(layers) - 1)
    if last in layers:
        return layers[last], lambda chosen: {
            **params,
            "layers": {**layers, last: chosen},
        }

    def rebuild(chosen):
        stacked = jax.tree.map(
            lambda leaf, own: jnp.concatenate([leaf[:-1], own[None]]), layers, chosen
        )
        return {**params, "layers": stacked}

    return jax.tree.map(lambda leaf: leaf[-1], layers), rebuild


def everything(params: Any) -> Chosen:
    """All parameters."""
    return params, lambda chosen: chosen


@checks.contract()
def gradient(
    model: Model,
    params: Any,
    contexts: Contexts,
    rollouts: Rollouts,
    temperature: float | jax.Array,
    *,
    parameters: Callable[[Any], Chosen] = embedding,
    micro_batches: Count = 1,
    token_chunk: Natural = 0,
) -> Norms:
    """Norm of the gradient of each completion's log-prob, over chosen parameters.

        |grad_phi sum_t log pi_theta(y_t | x, y_<t)|_2,   phi a part of theta

    Exact: the gradient through the row's context is in it. Each row of a micro-batch
    has a gradient of its own, so a micro-batch of m rows takes m times the memory of
    phi, and a forward and backward pass over prompt and completion. Only the gradient
    of phi is computed: the rest of theta is closed over.

    Args:
        model: the policy.
        params: its parameters, theta.
        contexts: `[C, P]`, what rows are conditioned on.
        rollouts: `[N, T]` completions.
        temperature: of the policy.
        parameters: `params -> (phi, rebuild)` with `rebuild(phi) = params`; one of
            `embedding`, `head`, `last_block`, `everything`, or any other.
        micro_batches: rows are run N / micro_batches at a time.
        token_chunk: tokens of a row whose logits exist at a time; 0: all T.

    Returns:
        `[N]` float32, at least 0; 0 for rows without tokens.

    Raises:
        ValueError: if `micro_batches` does not divide N, in a sentence.

    References:
        Yao et al. 2025, "Optimizing Chain-of-Thought Reasoners via Gradient Variance
        Minimization in Rejection Sampling and RL" (GVM), arXiv:2505.02391, algorithm 2.
        The paper writes the gradient by all parameters; its code takes that by the
        first matrix named `embed_tokens`, which is `embedding`, in bfloat16, one
        completion at a time, and averages norms over the right completions.
    """
    phi, rebuild = parameters(params)

    def log_prob(phi, tokens, mask, own, support):
        return completion_logp(
            model,
            rebuild(phi),
            own,
            tokens,
            mask,
            temperature=temperature,
            token_chunk=token_chunk,
            support=support,
        )

    def norm(row):
        row = jax.tree.map(lambda leaf: leaf[None], row)
        slopes = jax.grad(log_prob)(phi, *row)
        return optax.tree.norm(optax.tree.cast(slopes, jnp.float32))

    own = jax.tree.map(lambda leaf: leaf[rollouts.context], contexts)
    rows = rollouts.tokens, rollouts.mask, own, rollouts.support
    return _over_micro_batches(jax.vmap(norm), rows, micro_batches)


@checks.contract()
def last_layer(
    model: Model,
    params: Any,
    contexts: Contexts,
    rollouts: Rollouts,
    temperature: float | jax.Array,
    *,
    micro_batches: Count = 1,
    vocab_chunk: Natural = 0,
) -> Norms:
    """`last_layer_norms` of completions: one forward, no gradient.

    Args:
        model: the policy.
        params: its parameters.
        contexts: `[C, P]`, what rows are conditioned on.
        rollouts: `[N, T]`; tokens, mask, context and kept sets are read.
        temperature: of the policy.
        micro_batches: rows are run N / micro_batches at a time.
        vocab_chunk: columns of the vocabulary at a time; 0: all V.

    Returns:
        `[N]` float32, 0 for rows without tokens.

    Raises:
        ValueError: if `micro_batches` does not divide N, in a sentence.
    """
    prefix = prefill(model, params, contexts)

    def norms(rows):
        tokens, mask, context, support = rows
        features = extend(
            model, params, prefix.take(context), contexts.mask[context], tokens
        )
        return last_layer_norms(
            features,
            model.head(params),
            tokens,
            mask,
            temperature=temperature,
            vocab_chunk=vocab_chunk,
            support=support,
        )

    rows = rollouts.tokens, rollouts.mask, rollouts.context, rollouts.support
    return _over_micro_batches(norms, rows, micro_batches)


@checks.contract()
def logits(
    model: Model,
    params: Any,
    contexts: Contexts,
    rollouts: Rollouts,
    temperature: float | jax.Array,
) -> Norms:
    """`logit_norms` of completions; of the arguments only the rollouts are read."""
    return logit_norms(rollouts.score_sq_norm, rollouts.mask)


# ----- norms


def completion_logp(
    model: Model,
    params: Any,
    context: Contexts,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    temperature: Positive | jax.Array = 1.0,
    token_chunk: Natural = 0,
    support: jax.Array | None = None,
) -> jax.Array:
    """`[]` float32, nats: log-prob of one completion.

    To be differentiated, through the context too, and mapped over rows.

    Args:
        model: the policy.
        params: its parameters.
        context: `[1, P]`.
        tokens: `[1, T]` int32.
        mask: `[1, T]` bool.
        temperature: of the policy.
        token_chunk: tokens whose logits exist at a time; 0: all T.
        support: `[1, T, S]`, as of `masked.token_logprobs`.
    """
    # The axis that is mapped lies over the mesh; that of a single row must not.
    with logical_axis_rules(()):
        prefix = prefill(model, params, context)
        features = extend(model, params, prefix, context.mask, tokens)
        logp, _ = masked.token_logprobs(
            features,
            model.head(params),
            tokens,
            temperature=temperature,
            chunk=token_chunk,
            support=support,
        )
    return masked.total(logp, mask, axis=None)


@checks.contract()
def last_layer_norms(
    features: FloatTD,
    head: Head,
    tokens: IntT,
    mask: BoolT,
    *,
    temperature: Positive | jax.Array = 1.0,
    vocab_chunk: Natural = 0,
    support: jax.Array | None = None,
) -> Float:
    """Norm of the gradient by the output head W, whose logits are W h_t / temperature.

        |sum_t delta_t h_t^T|_F / temperature,   delta_t = e_{y_t} - pi_t

        |sum_t delta_t h_t^T|_F^2 = sum_{t, t'} (delta_t . delta_t') (h_t . h_t')

    Exact, and no array is `[V, D]` per row, but two are `[T, T]`. On an untied model it
    is the norm that `gradient` finds over `head`. A tied one has only the part
    that its embeddings have as output head: what goes through the layers is left out.

    Args:
        features: `[..., T, D]` float, h; those that predict each token.
        head: `[V, D]` float, W.
        tokens: `[..., T]` int32 in [0, V).
        mask: `[..., T]` bool, True on tokens the policy chose.
        temperature: positive; logits are divided by it.
        vocab_chunk: columns of the vocabulary at a time, so that no `[..., T, V]` array
            exists; 0: all V.
        support: `[..., T, S]`, as of `masked.token_logprobs`.

    Returns:
        `[...]` float32, at least 0; 0 for rows without tokens.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, float,
            int, bool).

    References:
        Yao et al. 2025, GVM, arXiv:2505.02391, appendix B: allocation hardly depends on
        whether embeddings or head are differentiated. The closed form is ours.
    """
    h = jnp.where(mask[..., None], features, 0)  # Absent tokens fall out of the sum.
    vocab = head.shape[0]
    size = min(vocab_chunk or vocab, vocab)
    count = -(-vocab // size)
    padded = jnp.pad(head, ((0, count * size - vocab), (0, 0)))
    starts = jnp.arange(count, dtype=tokens.dtype) * size
    parts = (starts, padded.reshape(count, size, -1))
    first_columns = jnp.arange(size, dtype=tokens.dtype)
    first_columns = first_columns.reshape(*(1,) * tokens.ndim, -1)

    def read(part):
        """The columns of a part, and their logits."""
        start, weight = part
        z = jnp.einsum("...d,vd->...v", h, weight, preferred_element_type=jnp.float32)
        column = start + first_columns
        inside = column < vocab
        if support is not None:
            kept = supports.among(support, start, size)
            inside &= kept | (column == tokens[..., None])
        return column, jnp.where(inside, z / temperature, -jnp.inf)

    def normalise(sofar, part):
        _, z = read(part)
        return jnp.logaddexp(sofar, jax.nn.logsumexp(z, -1)), None

    def add(sofar, part):
        column, z = read(part)
        here = (tokens[..., None] == column).astype(jnp.float32)
        delta = here - jnp.exp(z - normaliser[..., None])
        return sofar + _products(delta), None

    nothing = jnp.full(tokens.shape, -jnp.inf, jnp.float32)
    normaliser, _ = jax.lax.scan(normalise, nothing, parts)
    inner = _products(h.astype(jnp.float32))
    deltas, _ = jax.lax.scan(add, jnp.zeros_like(inner), parts)
    square = jnp.sum(deltas * inner, (-2, -1))
    return jnp.sqrt(jnp.maximum(square, 0.0)) / temperature


@checks.contract()
def logit_norms(square: FloatT, mask: BoolT) -> Float:
    """Norm of the gradient by the logits: what the sampler knows without more work.

        sqrt(sum_t |e_{y_t} - pi_t|^2),   |e_a - pi|^2 = 1 - 2 pi_a + sum_b pi_b^2

    It is the norm by the output head, up to a common factor, if the features of all
    tokens are equally long and those of different tokens orthogonal. Averaged over
    tokens drawn from pi a term is 1 - sum_b pi_b^2, at most 1 - exp(-entropy): tokens
    of which the policy is sure add nothing.

    Args:
        square: `[..., T]` float, in [0, 2], `Rollouts.score_sq_norm`.
        mask: `[..., T]` bool, True on tokens the policy chose.

    Returns:
        `[...]` float32, at least 0; 0 for rows without tokens.

    Raises:
        AssertionError: while tracing, if shapes differ or dtypes are not (float, bool).
    """
    return jnp.sqrt(masked.total(square, mask))


def _products(x: jax.Array) -> jax.Array:
    """Inner products of the rows of each matrix: `[..., T, V]` to `[..., T, T]`."""
    return jnp.einsum("...tv,...sv->...ts", x, x)


def _over_micro_batches(
    function: Callable[[Any], jax.Array], rows: Any, micro_batches: int
) -> jax.Array:
    """`[N]`, made of the leaves `[N, ...]`, N / micro_batches rows at a time."""
    count = jax.tree.leaves(rows)[0].shape[0]
    if count % micro_batches:
        divisors = (n for n in range(1, count + 1) if count % n == 0)
        nearest = min(divisors, key=lambda n: abs(n - micro_batches))
        raise ValueError(
            f"micro_batches={micro_batches} does not divide the {count} completions "
            f"whose norms are wanted; set it to {nearest}."
        )
    rows = jax.tree.map(shard_rows, rows)
    return join(jax.lax.map(function, split(rows, micro_batches)))
