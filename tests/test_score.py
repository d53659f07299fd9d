"""Norms of scores: against a gradient per row of a plain forward over whole rows."""

import dataclasses
from functools import cache, partial

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import (
    close,
    ignores_absent_entries,
    is_the_same_however_it_runs,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from outputs import message

from curax import score
from curax.config import Mesh as Sizes
from curax.step import mesh
from curax.types import Contexts

N, T, V, P, TEMPERATURE = 8, tiny.T, tiny.V, tiny.P, 0.8
LENGTHS = np.array([5, 3, 1, 0, 5, 2, 4, 0])
# Contexts 1 and 2 begin as 0 does and go on with a hint; rows of one prompt share it.
HINTED = np.array([0, 0, 1, 1, 2, 2, 1, 0], np.int32)
POLICIES = {
    "plain": tiny.MODEL,
    "tied": tiny.model(tied=True),
    "scanned": tiny.model(scan_layers=True),
}
# Micro-batches, and vocabulary columns at a time; the first is used elsewhere too.
SETTINGS = [(2, 5), (1, 0), (8, 22)]
# What is differentiated, and where that is in the gradient by all parameters.
GROUPS = {
    "embedding": (score.embedding, lambda grads: grads["embed"]),
    "head": (score.head, lambda grads: grads["head"]),
    "last_block": (score.last_block, lambda grads: grads["layers"]["1"]),
    "everything": (score.everything, lambda grads: grads),
}
for_every_group = pytest.mark.parametrize("group", GROUPS)


def hinted():
    """One prompt, left-padded: alone, with two tokens of hint, and with four."""
    prompt = np.array([3, 7])
    tokens = np.random.default_rng(1).integers(0, V, (3, P))
    mask = np.zeros((3, P), bool)
    for row, hint in enumerate(([], [1, 8], [1, 8, 2, 2])):
        said = [*prompt, *hint]
        tokens[row, P - len(said) :], mask[row, P - len(said) :] = said, True
    return Contexts(tokens=jnp.asarray(tokens, jnp.int32), mask=jnp.asarray(mask))


CONTEXTS = hinted()


@cache
def rows():
    """Completions of every length, two of which do not exist."""
    random = np.random.default_rng(0)
    mask = np.arange(T) < LENGTHS[:, None]
    tokens = random.integers(0, V, (N, T)).astype(np.int32)
    square = random.uniform(0, 2, (N, T)).astype(np.float32) * mask
    return tiny.rollouts(tokens, mask, score_sq_norm=square, context=HINTED)


def params_of(policy):
    """The tiny parameters, as this policy has them."""
    params = dict(tiny.params())
    if policy == "tied":
        del params["head"]
    if policy == "scanned":
        layers = [params["layers"][str(i)] for i in range(2)]
        params["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return params


@cache
def scores(policy="plain"):
    """The gradient of each row's log-prob by all parameters, row after row."""
    sequence, place = tiny.whole(CONTEXTS, rows().tokens, HINTED)

    @jax.jit
    @jax.grad
    def slope(params, sequence, place, tokens, mask):
        logits = tiny.full_logits(
            POLICIES[policy], params, sequence[None], place[None]
        )[0]
        every = jax.nn.log_softmax(logits / TEMPERATURE)
        logp = jnp.take_along_axis(every, tokens[:, None], -1)[:, 0]
        return jnp.sum(jnp.where(mask, logp, 0.0))

    every = zip(sequence, place, rows().tokens, rows().mask, strict=True)
    return [jax.device_get(slope(params_of(policy), *row)) for row in every]


def norms(grads):
    """`[N]` Euclidean norms of trees, in float64."""
    return np.array(
        [
            np.sqrt(sum((np.float64(leaf) ** 2).sum() for leaf in jax.tree.leaves(g)))
            for g in grads
        ]
    )


def naive(group, policy="plain"):
    return norms([GROUPS[group][1](grads) for grads in scores(policy)])


def rule_of(group, micro, chunk, policy):
    own = {} if group == "embedding" else {"parameters": GROUPS[group][0]}
    options = own | {"micro_batches": micro, "token_chunk": chunk}
    return partial(score.gradient, POLICIES[policy], **options)


@cache
def compiled(group, micro, chunk, policy):
    return jax.jit(rule_of(group, micro, chunk, policy))


def measured(group, micro=2, chunk=5, policy="plain"):
    run = compiled(group, micro, chunk, policy)
    return run(params_of(policy), CONTEXTS, rows(), TEMPERATURE)


# ----- gradients


@pytest.mark.first(1)
@for_every_group
def test_norms_are_those_of_a_gradient_per_row_of_a_plain_forward(group):
    got = measured(group)  # by the embeddings if nothing is said
    assert got.dtype == jnp.float32
    want = naive(group)
    assert (want[LENGTHS > 0] > 0.1).all()
    close(got, want)


@pytest.mark.long
def test_the_embeddings_of_a_tied_model_carry_the_gradient_of_its_head_too():
    close(measured("embedding", policy="tied"), naive("embedding", "tied"))
    apart = naive("embedding"), naive("head")
    off = np.abs(naive("embedding", "tied") - np.hypot(*apart))[LENGTHS > 0]
    assert off.min() > 1e-3  # another function of theta, and no sum of the two squares


def test_the_head_of_a_tied_model_is_refused_in_a_sentence():
    assert message(ValueError, measured, "head", policy="tied") == (
        "score.head finds no output head, as the model is tied; use score.embedding, "
        "or score.last_layer for its part as a head."
    )


@pytest.mark.long
def test_the_last_block_of_a_model_that_scans_its_layers_is_the_last_of_the_stack():
    close(measured("last_block", policy="scanned"), naive("last_block"))


@pytest.mark.first(1)
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_chosen_makes_the_whole_parameters_again(group):
    for policy in ("plain", "scanned"):
        params = params_of(policy)
        chosen, rebuild = GROUPS[group][0](params)
        jax.tree.map(np.testing.assert_array_equal, rebuild(chosen), params)
        moved = rebuild(jax.tree.map(lambda leaf: leaf + 1, chosen))
        off = jax.tree.map(lambda a, b: np.sum(a != b), moved, params)
        sizes = sum(leaf.size for leaf in jax.tree.leaves(chosen))
        assert sum(map(int, jax.tree.leaves(off))) == sizes


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_micro_batches_and_chunks_change_nothing(settings):
    close(measured("head", *settings), measured("head", *SETTINGS[0]))
    close(last_layer(*settings), last_layer(*SETTINGS[0]))


@pytest.mark.parametrize(("parts", "nearest"), [(3, 2), (7, 8), (16, 8)])
def test_micro_batches_that_do_not_divide_are_refused_in_a_sentence(parts, nearest):
    sentence = (
        f"micro_batches={parts} does not divide the 8 completions whose norms are "
        f"wanted; set it to {nearest}."
    )
    for rule in (score.gradient, score.last_layer):
        run = jax.jit(partial(rule, tiny.MODEL, micro_batches=parts))
        arrays = tiny.params(), CONTEXTS, rows(), TEMPERATURE
        assert message(ValueError, run, *arrays) == sentence


def dots(group):
    """Sizes of all matrix products on the way to the norms."""
    run = rule_of(group, 1, 0, "plain")
    jaxpr = jax.make_jaxpr(run)(tiny.params(), CONTEXTS, rows(), TEMPERATURE)
    every = hlo.equations(jaxpr.jaxpr)
    products = (one for one in every if one.primitive.name == "dot_general")
    return [product.outvars[0].aval.size for product in products]


@pytest.mark.long
def test_only_the_gradient_of_what_is_chosen_is_computed():
    gate = N * 16 * 24  # of each row, by a kernel of an MLP; nothing else is as large
    # Twice per kernel, as context and completion are run apart; gate, up and down.
    counts = {group: dots(group).count(gate) for group in GROUPS}
    assert counts == {
        "embedding": 0,
        "head": 0,
        "last_block": 2 * 3,
        "everything": 2 * 3 * 2,
    }
    assert len(dots("head")) < len(dots("last_block")) < len(dots("embedding"))


# ----- the last layer


@cache
def compiled_last_layer(micro, chunk, policy):
    options = {"micro_batches": micro, "vocab_chunk": chunk}
    return jax.jit(partial(score.last_layer, POLICIES[policy], **options))


def last_layer(micro=2, chunk=5, policy="plain", params=None):
    run = compiled_last_layer(micro, chunk, policy)
    return run(params or params_of(policy), CONTEXTS, rows(), TEMPERATURE)


def test_the_closed_form_is_the_norm_of_the_gradient_by_the_head():
    close(last_layer(), naive("head"))


def test_of_a_tied_model_the_closed_form_takes_the_part_as_output_head():
    params = params_of("tied")
    untied = params | {"head": params["embed"]}
    close(last_layer(policy="tied"), last_layer(params=untied))


# ----- any features

D = 3
numbers = st.floats(-4, 4, width=32)
features_ = hnp.arrays(np.float32, (8, T, D), elements=numbers)
head_ = hnp.arrays(np.float32, (V, D), elements=numbers)
tokens_ = hnp.arrays(np.int32, (8, T), elements=st.integers(0, V - 1))
masks_ = hnp.arrays(np.bool_, (8, T))
squares_ = hnp.arrays(np.float32, (8, T), elements=st.floats(0, 2, width=32))
closed_form = {
    chunk: jax.jit(
        partial(score.last_layer_norms, temperature=TEMPERATURE, vocab_chunk=chunk)
    )
    for chunk in (0, 4)
}


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def deltas(features, head, tokens):
    """`[..., T, V]`, e_y - pi."""
    z = np.float64(features) @ np.float64(head).T / TEMPERATURE
    return np.eye(V)[tokens] - softmax(z)


@pytest.mark.parametrize("chunk", closed_form)
@given(features_, head_, tokens_, masks_)
def test_the_closed_form_is_the_norm_of_a_sum_of_outer_products(
    chunk, features, head, tokens, mask
):
    delta = deltas(features, head, tokens) * mask[..., None]
    outer = np.einsum("ntv,ntd->nvd", delta, np.float64(features)) / TEMPERATURE
    want = np.sqrt((outer**2).sum((-2, -1)))
    # Outer products may cancel; what is left is known as well as their sizes are.
    sizes = np.sqrt((delta**2).sum(-1) * (np.float64(features) ** 2).sum(-1)).sum(-1)
    # A logit is known up to a few eps |z|; hence pi, and e_y - pi, up to that times pi.
    z = np.float64(features) @ np.float64(head).T / TEMPERATURE
    known = 4 * np.finfo(np.float32).eps * np.abs(z).max(-1) * mask
    known *= np.sqrt((softmax(z) ** 2).sum(-1) * (np.float64(features) ** 2).sum(-1))
    off = known.sum(-1) / TEMPERATURE**2
    poisoned = np.where(mask[..., None], features, np.float32(np.nan))
    got = closed_form[chunk](poisoned, head, tokens, mask)
    assert got.dtype == jnp.float32
    most = 1e-5 * sizes**2 + 2 * sizes * off + off**2 + 1e-9
    assert (np.abs(np.float64(got) ** 2 - want**2) <= most).all()
    assert not np.asarray(got)[~mask.any(-1)].any()


@pytest.mark.long
def test_the_closed_form_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    head = random.normal(size=(V, D)).astype(np.float32)
    features = random.normal(size=(8, T, D)).astype(np.float32)
    for chunk in closed_form:
        is_the_same_however_it_runs(
            lambda features, tokens, mask, chunk=chunk: score.last_layer_norms(
                features, head, tokens, mask, vocab_chunk=chunk
            ),
            features,
            random.integers(0, V, (8, T)).astype(np.int32),
            random.random((8, T)) < 0.7,
        )


@pytest.mark.parametrize(("chunk", "exists"), [(0, True), (16, False)])
def test_no_array_of_tokens_by_vocabulary_exists_in_chunks(chunk, exists):
    large = 997
    shapes = [((N, T, D), float), ((large, D), float), ((N, T), int), ((N, T), bool)]
    kinds = {float: jnp.float32, int: jnp.int32, bool: jnp.bool_}
    args = [jax.ShapeDtypeStruct(shape, kinds[kind]) for shape, kind in shapes]
    rule = partial(score.last_layer_norms, vocab_chunk=chunk)
    largest = max(hlo.sizes(jax.make_jaxpr(rule)(*args).jaxpr))
    assert (largest >= N * T * large) == exists
    assert largest < N * large * D * T  # nor ever one of rows by the head


# ----- logits


@given(squares_, masks_)
def test_the_cheap_form_is_the_root_of_a_sum_over_tokens(square, mask):
    want = [np.sqrt(np.float64(s[m]).sum()) for s, m in zip(square, mask, strict=True)]
    close(score.logit_norms(square, mask), want)
    ignores_absent_entries(score.logit_norms, square, mask, counts=mask)


def test_the_cheap_form_is_the_same_however_it_runs():
    random = np.random.default_rng(0)
    square = random.uniform(0, 2, (8, T)).astype(np.float32)
    is_the_same_however_it_runs(
        score.logit_norms, square, np.arange(T) < LENGTHS[:, None]
    )


@jax.jit
@jax.vmap
def of_each_token(logits):
    """Closed form of every token at one state, whose head is the logits."""
    one = jnp.ones((V, 1, 1), jnp.float32)
    every = jnp.arange(V, dtype=jnp.int32)[:, None]
    return score.last_layer_norms(one, logits[:, None], every, jnp.ones((V, 1), bool))


@given(hnp.arrays(np.float32, (8, V), elements=numbers))
def test_squares_of_one_token_obey_the_softmax_identities(logits):
    got = np.float64(of_each_token(logits))
    pi = softmax(np.float64(logits))
    total = (pi**2).sum(-1)
    square = 1 - 2 * pi + total[:, None]
    close(((np.eye(V) - pi[:, None]) ** 2).sum(-1), square)
    close(got**2, square)
    one = np.ones((8, V, 1), bool)
    close(score.logit_norms(square.astype(np.float32)[..., None], one), got)
    mean = (pi * got**2).sum(-1)
    close(mean, 1 - total)
    entropy = -(pi * np.log(pi)).sum(-1)
    assert (mean <= 1 - np.exp(-entropy) + 1e-6).all()


@given(hnp.arrays(np.float32, (V, T), elements=numbers), tokens_, masks_)
def test_with_orthogonal_features_of_one_length_the_cheap_form_is_the_closed_form(
    head, tokens, mask
):
    features = np.broadcast_to(2 * np.eye(T, dtype=np.float32), (8, T, T))
    square = (deltas(features, head, tokens) ** 2).sum(-1).astype(np.float32)
    got = closed_form[0](features, head, tokens, mask)
    close(got, 2 / TEMPERATURE * score.logit_norms(square, mask), atol=1e-5)


def test_the_rule_reads_what_the_sampler_stored():
    got = score.logits(tiny.MODEL, tiny.params(), CONTEXTS, rows(), TEMPERATURE)
    close(got, np.sqrt(np.float64(rows().score_sq_norm).sum(-1)))


# ----- every rule

RULES = {
    "gradient": score.gradient,
    "last_layer": score.last_layer,
    "logits": score.logits,
}
COMPILED = {
    "gradient": partial(compiled, "embedding", *SETTINGS[0], "plain"),
    "last_layer": partial(compiled_last_layer, *SETTINGS[0], "plain"),
    "logits": lambda: partial(score.logits, tiny.MODEL),
}
for_every_rule = pytest.mark.parametrize("rule", RULES)


def of(rule, rollouts, contexts=CONTEXTS):
    got = COMPILED[rule]()(tiny.params(), contexts, rollouts, TEMPERATURE)
    assert got.shape == (N,)
    assert got.dtype == jnp.float32
    return np.asarray(got)


@for_every_rule
def test_rows_that_do_not_exist_have_no_norm_and_others_have(rule):
    got = of(rule, rows())
    assert not got[LENGTHS == 0].any()
    assert (got[LENGTHS > 0] > 0).all()


@pytest.mark.first(2)
@for_every_rule
def test_what_stands_behind_the_end_and_under_the_padding_changes_nothing(rule):
    random = np.random.default_rng(2)
    mask = rows().mask
    junk = dataclasses.replace(
        rows(),
        tokens=np.where(mask, rows().tokens, random.integers(0, V, (N, T), np.int32)),
        score_sq_norm=np.where(mask, rows().score_sq_norm, np.float32(np.nan)),
    )
    want = of(rule, rows())
    close(of(rule, junk), want)
    under = random.integers(0, V, (3, P)).astype(np.int32)
    tokens = jnp.where(CONTEXTS.mask, CONTEXTS.tokens, under)
    contexts = dataclasses.replace(CONTEXTS, tokens=tokens)
    close(of(rule, junk, contexts), want)


@pytest.mark.first(2)
@for_every_rule
def test_the_order_of_rows_changes_nothing(rule):
    order = np.random.default_rng(3).permutation(N)
    moved = jax.tree.map(lambda leaf: leaf[order], rows())
    close(of(rule, moved), of(rule, rows())[order])


@pytest.mark.first(1)
@pytest.mark.parametrize("rule", ["gradient", "last_layer"])
def test_norms_are_taken_under_the_context_of_each_row(rule):
    others = dataclasses.replace(rows(), context=(HINTED + 1) % 3)
    got, want = of(rule, rows()), of(rule, others)
    assert (np.abs(got - want) > 1e-3)[LENGTHS > 0].all()
    # The same contexts under other numbers are the same contexts.
    order = np.array([2, 0, 1])
    moved = jax.tree.map(lambda leaf: leaf[order], CONTEXTS)
    renamed = dataclasses.replace(
        rows(), context=np.argsort(order)[HINTED].astype("i4")
    )
    close(of(rule, renamed, moved), got)


SHALLOW = tiny.model(vocab_size=12, layers=1)  # 12 divides over two devices


@cache
def shallow(rule):
    """A rule for a model of one layer, its parameters, and what it says."""
    params = tiny.random_params(SHALLOW)
    run = partial(RULES[rule], SHALLOW)
    return run, params, jax.jit(run)(params, CONTEXTS, rows(), TEMPERATURE)


@pytest.mark.long
@for_every_rule
def test_seeds_side_by_side_are_seeds_one_by_one(rule):
    run, params, want = shallow(rule)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, 1.5 * leaf]), params)
    rollouts = jax.tree.map(lambda leaf: np.stack([leaf, leaf[::-1]]), rows())
    mapped = jax.jit(jax.vmap(run, (0, None, 0, None)))
    got = mapped(both, CONTEXTS, rollouts, TEMPERATURE)
    swapped = jax.tree.map(lambda leaf: leaf[::-1], both)
    swapped = mapped(swapped, CONTEXTS, rollouts, TEMPERATURE)
    close(got[0], want)
    close(swapped[1], want[::-1])


@pytest.mark.long
@for_every_rule
def test_norms_on_eight_devices_are_those_on_one(rule):
    run, params, want = shallow(rule)
    cube = mesh.make(Sizes(data=2, fsdp=2, tensor=2))
    assert cube is not None
    lying = jax.device_put(params, mesh.of_params(cube, SHALLOW.axes, params))
    with mesh.use(cube):
        got = jax.jit(run)(lying, CONTEXTS, rows(), TEMPERATURE)
    close(jax.device_get(got), want)


@pytest.mark.long
def test_each_of_eight_devices_computes_the_gradients_of_one_row_in_eight():
    _, params, _ = shallow("gradient")
    cube = mesh.make(Sizes(data=8))
    assert cube is not None

    def flops():
        """Of one device."""
        run = jax.jit(partial(score.gradient, SHALLOW, parameters=score.head))
        lowered = run.lower(params, CONTEXTS, rows(), TEMPERATURE)
        return lowered.compile().cost_analysis()["flops"]

    alone = flops()
    with mesh.use(cube):
        assert flops() < 0.15 * alone


@pytest.mark.long
def test_a_model_in_bfloat16_has_norms_in_float32_near_the_exact_ones():
    low = tiny.model(dtype=jnp.bfloat16)
    arguments = tiny.params(), CONTEXTS, rows(), TEMPERATURE
    got = jax.jit(partial(score.last_layer, low))(*arguments)
    assert got.dtype == jnp.float32
    off = np.abs(got - naive("head"))[LENGTHS > 0] / naive("head")[LENGTHS > 0]
    assert 1e-5 < off.max() < 0.05
    every = partial(score.gradient, low, parameters=score.everything)
    assert jax.eval_shape(every, *arguments).dtype == jnp.float32
