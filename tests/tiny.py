"""A policy, contexts and rows so small that a test compiles in a second or two."""

import dataclasses
from contextlib import contextmanager
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curax import allocate, rollout, update
from curax.arrays import masked
from curax.models import softmax, transformer
from curax.step.states import Warm
from curax.types import Batch, Contexts, Model, Rollouts

V, P, T = 11, 6, 5
END, PAD = (9, 10), 0
FLOATS = ("logp_behaviour", "logp_policy", "entropy", "score_sq_norm")
model = partial(
    transformer.model,
    vocab_size=V,
    width=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_width=24,
)
MODEL = model()


@contextmanager
def in_pages(size):
    """Own columns in pages of so many, read by the kernel of a TPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(softmax.BY_PLATFORM, "cpu", softmax.of_kernel)
        patch.setattr(softmax, "LEAST", 1)
        patch.setattr(softmax, "BLOCK", size)
        yield


@contextmanager
def in_pieces(size):
    """Logits of so many columns at a time, as on a TPU; 0: as they are."""
    with pytest.MonkeyPatch.context() as patch:
        if size:
            patch.setattr(masked, "IN_PIECES", ("cpu",))
            patch.setattr(masked, "PIECE", 0)
            patch.setattr(masked, "LANES", size)
        yield


def spied(policy):
    """The policy; shapes of the tokens that it is traced with; those it is run with."""
    traced, run = [], []

    def features(params, tokens, *rest):
        traced.append(tokens.shape)
        jax.debug.callback(lambda: run.append(tokens.shape))
        return policy.features(params, tokens, *rest)

    return dataclasses.replace(policy, features=features), traced, run


def table(*, vocab_size):
    """What comes next depends on the last token alone: quick to compile."""

    def init(key):
        return {"embed": 0.3 * jax.random.normal(key, (vocab_size, 8))}

    def features(params, tokens, positions, seen, cache=None, column=None):
        return params["embed"][tokens], cache

    return Model(
        init=init,
        features=features,
        head=lambda params: params["embed"],
        axes={"embed": ("vocab", "embed")},
    )


def left_padded(length: tuple[int, ...]) -> Contexts:
    """Random contexts of these lengths; what stands under the padding is junk."""
    tokens = np.random.default_rng(0).integers(0, V, (len(length), P))
    mask = np.arange(P) >= P - np.array(length)[:, None]
    return Contexts(tokens=jnp.asarray(tokens, jnp.int32), mask=jnp.asarray(mask))


CONTEXTS = left_padded((6, 3, 1))
ROWS = allocate.rows_to_draw(jnp.array([3, 1, 4]), rows=10)  # two rows do not exist
SETTINGS = {"max_tokens": T, "end": END, "pad": PAD}


def settings(**options):
    """How the tiny policy is sampled."""
    return rollout.Settings(**SETTINGS | options)


@cache
def params():
    """Those of the tiny model."""
    return random_params(MODEL)


def stacked(params):
    """The parameters of unrolled layers as those of scanned ones."""
    both = [params["layers"][str(i)] for i in range(2)]
    return params | {"layers": jax.tree.map(lambda *p: jnp.stack(p), *both)}


def random_params(policy):
    """Random ones; scales too, so that a forgotten one shows. Quicker than `init`."""
    random = np.random.default_rng(0)

    def leaf(path, shape):
        centre = float(path[-1].key == "scale")
        values = centre + 0.3 * random.normal(size=shape.shape)
        return jnp.asarray(values, jnp.float32)

    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


@cache
def compiled(slots, temperature):
    how = settings(slots=slots, temperature=temperature)
    return jax.jit(partial(rollout.sample, MODEL, how=how))


def sampler(slots=0, temperature=1.0):
    """A compiled `(params, contexts, rows, key) -> rollouts` of the tiny model."""
    return compiled(slots, temperature)


def drawn(slots=0, temperature=1.0):
    """What the tiny policy says to the tiny rows."""
    draw = sampler(slots, temperature)
    return draw(params(), CONTEXTS, ROWS, jax.random.key(1))


def rollouts(tokens, mask, **known):
    """Rows of one prompt as a sampler leaves them; all that is not `known` is 0."""
    there = mask.any(-1)
    rows = {"finished": there, "exists": there, "prompt": np.zeros(len(mask), np.int32)}
    rows |= {"member": np.arange(len(mask), dtype=np.int32)} | known
    rows = dict.fromkeys(FLOATS, np.zeros(mask.shape, np.float32)) | rows
    return Rollouts(tokens=tokens, mask=mask, **{"context": rows["prompt"]} | rows)


def batch(mask, logp, **known):
    """Rows to train on, each of its own context, with log-probs of the policy alone."""
    ones = np.ones(mask.shape, np.float32)
    rows = {"tokens": np.zeros(mask.shape, np.int32), "credit": ones}
    rows |= {"context": np.arange(len(mask), dtype=np.int32), "multiplier": ones}
    rows |= {"logp_behaviour": logp, "logp_policy": logp, "logp_old": logp}
    return Batch(mask=mask, **rows | {"logp_ref": None} | known)


def draw_and_differentiate(policy, params, asked, how, known, token_loss, settings):
    """Rows of a policy; loss, gradient and log-probs of an update on them.

    Args:
        policy: a model.
        params: its parameters.
        asked: rows to draw.
        how: settings of the sampler.
        known: fields of `batch` from the rows that were drawn.
        token_loss: `(logp, entropy, rows) ->` what each token costs.
        settings: of the update.
    """
    rows = rollout.sample(policy, params, CONTEXTS, asked, jax.random.key(1), how)
    credit = jnp.linspace(-1.0, 1.0, rows.mask.size).reshape(rows.mask.shape)
    known = {"context": rows.context, "credit": credit} | known(rows)
    to_train = batch(rows.mask, tokens=rows.tokens, **known)
    weight = jnp.where(rows.mask, 0.1, 0.0)
    arrays = params, CONTEXTS, to_train, weight
    found = update.gradient(policy, *arrays, token_loss, settings, still_old=False)
    return rows, *found


def warm(policy, seed=0):
    """What a warm start leaves: random parameters of a policy."""
    step, seed = jnp.int32(0), jnp.uint32(seed)
    return Warm(params=random_params(policy), opt_state=None, step=step, seed=seed)


def agree(one, two, atol=1e-5):
    """The same completions and turns; their log-probs and entropies up to rounding."""
    for field in dataclasses.fields(one):
        got, want = getattr(one, field.name), getattr(two, field.name)
        if field.name in FLOATS:
            np.testing.assert_allclose(got, want, 0, atol, err_msg=field.name)
        else:
            jax.tree.map(np.testing.assert_array_equal, got, want)


def whole(contexts, tokens, context):
    """Each row's context and completion as one sequence, padded on the right.

    Returns:
        `[N, P + T]` tokens; `[N, T]` the place from which each completion token is
        predicted.
    """
    sequence = np.zeros((len(tokens), contexts.mask.shape[-1] + tokens.shape[-1]), int)
    start = np.asarray(contexts.mask).sum(-1)[context]
    for n, (c, said) in enumerate(zip(context, tokens, strict=True)):
        before = np.asarray(contexts.tokens[c])[np.asarray(contexts.mask[c])]
        sequence[n, : start[n] + len(said)] = [*before, *said]
    place = start[:, None] + np.arange(tokens.shape[-1]) - 1
    return sequence.astype(np.int32), place.astype(np.int32)


def full_logits(policy, params, sequence, place):
    """`[N, T, V]` logits at the places, by one plain causal forward over each row."""
    n, length = sequence.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (n, length))
    everything = jnp.ones((n, length), bool)
    features, _ = policy.features(params, sequence, positions, everything)
    features = jnp.take_along_axis(features, place[..., None], 1)
    return jnp.einsum("ntd,vd->ntv", features, policy.head(params))
