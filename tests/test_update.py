"""One update: its gradient, by a naive loss; what changes nothing; what is skipped."""

import dataclasses
import re
from functools import cache, partial

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from contracts import close

from curax import loss, update
from curax.arrays import accumulate, lines, micro_batches
from curax.arrays import masked as reductions
from curax.config import KL, load, override
from curax.step import optimise
from curax.types import Batch, Imitated

M, TEMPERATURE = 8, 0.8
# Micro-batches, vocabulary columns at a time, length buckets; the first is plainest.
SETTINGS = [(1, 0, 1), (2, 5, 3), (4, 8, 1), (8, 22, 2)]


@cache
def batch():
    """The rows of the tiny rows that exist, one left over; the weight of each token."""
    rows = jax.tree.map(lambda leaf: leaf[:M], jax.device_get(tiny.drawn()))
    random = np.random.default_rng(0)
    noise = partial(random.normal, size=(M, tiny.T))
    mask = rows.mask & (np.arange(M) != 6)[:, None]
    return Batch(
        tokens=rows.tokens,
        mask=mask,
        context=rows.context,
        credit=noise().astype(np.float32),
        multiplier=random.uniform(0.5, 2, (M, tiny.T)).astype(np.float32),
        logp_behaviour=rows.logp_behaviour,
        logp_policy=rows.logp_policy,
        logp_old=(rows.logp_policy + 0.2 * noise()).astype(np.float32),
        logp_ref=(rows.logp_policy + 0.2 * noise()).astype(np.float32),
    ), (mask * random.random((M, tiny.T))).astype(np.float32)


def token_loss(logp, entropy, rows):
    """Everything a recipe may use."""
    value = loss.clipped_ratio(logp, rows.logp_old, rows.credit, rows.mask)
    value = value * rows.multiplier + 0.1 * loss.k3(logp, rows.logp_ref)
    return jnp.where(rows.mask, value - 0.05 * entropy, 0.0)


def how(micro, chunk, buckets):
    options = {"micro_batches": micro, "token_chunk": chunk, "length_buckets": buckets}
    return update.Settings(temperature=TEMPERATURE, **options)


def masked(gradient):
    """Loss, gradient, and what is said of tokens that count."""
    value, grads, own = gradient
    mask = batch()[0].mask
    return value, grads, jax.tree.map(lambda x: np.where(mask, x, 0), own)


@cache
def compiled(micro, chunk, buckets, token_loss=token_loss):
    @jax.jit
    def run(params, rows, weight, still_old):
        return update.gradient(
            tiny.MODEL,
            params,
            tiny.CONTEXTS,
            rows,
            weight,
            token_loss,
            how(micro, chunk, buckets),
            still_old=still_old,
        )

    return run


@cache
def plain():
    return compiled(*SETTINGS[0])(tiny.params(), *batch(), False)


@cache
def naive():
    """Loss, gradient, log-probs and entropies by one forward over each whole row."""
    rows, weight = batch()
    sequence, place = tiny.whole(tiny.CONTEXTS, rows.tokens, rows.context)

    def run(params):
        logits = tiny.full_logits(tiny.MODEL, params, sequence, place)
        every = jax.nn.log_softmax(logits / TEMPERATURE)
        logp = jnp.take_along_axis(every, rows.tokens[..., None], -1)[..., 0]
        entropy = -jnp.sum(jnp.exp(every) * every, -1)
        return jnp.sum(weight * token_loss(logp, entropy, rows)), (logp, entropy)

    run = jax.jit(jax.value_and_grad(run, has_aux=True))
    (value, (logp, entropy)), grads = run(tiny.params())
    return value, grads, update.TokenLogprobs(logp=logp, entropy=entropy)


def spread(logits, token):
    """Log-prob, entropy, square and coupling, all of the vocabulary at once."""
    every = jax.nn.log_softmax(logits)
    chance, logp = jnp.exp(every), jnp.take_along_axis(every, token[..., None], -1)
    entropy = -jnp.sum(chance * every, -1, keepdims=True)
    score = jax.nn.one_hot(token, logits.shape[-1], dtype=logits.dtype) - chance
    coupling = jnp.sum(chance**2 * (every + entropy), -1)
    return logp[..., 0], entropy[..., 0], jnp.sum(score**2, -1), coupling


def alike(got, want):
    """Every leaf, relative to its own norm."""

    def leaf(path, got, want):
        off = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
        assert off < 1e-5, jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(leaf, got, want)


# ----- gradient


@pytest.mark.first(1)
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_gradient_is_that_of_a_naive_loss_over_whole_rows(settings):
    got = compiled(*settings)(tiny.params(), *batch(), False)
    alike(masked(got), masked(naive()))
    if settings[2] == 1:
        alike(got, naive())


@pytest.mark.first(1)
@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_logprobs_are_those_of_a_naive_forward(settings):
    rows, _ = batch()
    read = jax.jit(partial(update.logprobs, tiny.MODEL, settings=how(*settings)))
    got = read(tiny.params(), tiny.CONTEXTS, rows.tokens, rows.mask, rows.context)
    where = rows.mask if settings[2] > 1 else True
    want = np.where(where, naive()[2].logp, 0)
    close(np.where(where, got, 0), want, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS[1:2])
def test_a_closer_look_is_that_of_a_naive_forward(settings):
    rows, _ = batch()
    sequence, place = tiny.whole(tiny.CONTEXTS, rows.tokens, rows.context)
    look = jax.jit(partial(update.token_stats, tiny.MODEL, settings=how(*settings)))
    got = look(tiny.params(), tiny.CONTEXTS, rows.tokens, rows.mask, rows.context)
    logits = tiny.full_logits(tiny.MODEL, tiny.params(), sequence, place) / TEMPERATURE
    names = "logp", "entropy", "score_sq_norm", "entropy_logp_cov"
    for name, want in zip(names, spread(logits, rows.tokens), strict=True):
        seen = np.where(rows.mask, getattr(got, name), 0)
        close(seen, np.where(rows.mask, want, 0), rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("chunk", "columns"), [(0, 0), (1, 0), (8, 0), (40, 0), (0, 3), (8, 11), (0, 22)]
)
@pytest.mark.parametrize("sharp", [1.0, 30.0])
def test_moments_of_a_softmax_are_the_same_in_chunks(chunk, columns, sharp):
    """P11."""
    random = np.random.default_rng(0)
    features = np.float32(sharp * random.normal(size=(3, 4, 6)))
    head = np.float32(random.normal(size=(22, 6)))
    token = random.integers(0, 22, (3, 4)).astype(np.int32)
    options = {"temperature": 0.7, "chunk": chunk}
    with tiny.in_pieces(columns):
        got = reductions.token_logprobs_and_moments(features, head, token, **options)
        plain = reductions.token_logprobs(features, head, token, **options)
    with jax.enable_x64(True):
        logits = features.astype(float) @ head.astype(float).T / 0.7
        want = spread(logits, token)
    for one, other in zip(got, want, strict=True):
        close(one, other, rtol=1e-5, atol=3e-6 * sharp)
    for one, other in zip(got[:2], plain, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.first(1)
@pytest.mark.parametrize("columns", [0, 5])
def test_looking_closer_changes_no_gradient(columns):
    random = np.random.default_rng(1)
    features = np.float32(random.normal(size=(3, 6)))
    head = np.float32(random.normal(size=(22, 6)))
    token = np.array([0, 7, 21], np.int32)
    weight = np.float32([[0.3], [-1], [2], [0.7]])

    def total(function, number):
        def run(features, head):
            parts = function(features, head)[:number]
            return sum(jnp.sum(w * p) for w, p in zip(weight, parts, strict=False))

        return jax.jit(jax.grad(run, (0, 1)))(features, head)

    def closely(features, head):
        return reductions.token_logprobs_and_moments(features, head, token, chunk=5)

    def at_once(features, head):
        return spread(jnp.einsum("td,vd->tv", features, head), token)

    for number in (2, 4):
        want = total(at_once, number)
        with tiny.in_pieces(columns):
            got = total(closely, number)
        jax.tree.map(partial(close, rtol=1e-4), got, want)


@pytest.mark.parametrize("columns", [0, 5])
def test_in_half_precision_gradients_of_the_head_are_products_of_it(columns):
    """And as near to those of float32 as its rounding lets them be."""
    random = np.random.default_rng(1)
    features, head = (
        jnp.asarray(random.normal(size=(n, 16)), jnp.bfloat16) for n in (8, 22)
    )
    token, weight = random.integers(0, 22, 8), np.float32(random.normal(size=8))

    def loss(features, head):
        return jnp.sum(
            weight * reductions.token_logprobs(features, head, token, chunk=4)[0]
        )

    with tiny.in_pieces(columns):
        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(features, head)
    products = re.findall(r"dot_general .*: \((.*)\) ->", lowered.as_text())
    assert len(products) == 4  # logits, twice; and each gradient
    assert all(one.count("bf16>") == 2 for one in products)
    whole = features.astype(jnp.float32), head.astype(jnp.float32)
    for got, want in zip(
        lowered.compile()(features, head), jax.grad(loss, (0, 1))(*whole), strict=True
    ):
        error = jnp.linalg.norm(got.astype(jnp.float32) - want)
        assert error < 0.005 * jnp.linalg.norm(want)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("buckets", "cuts"), [(1, [7]), (2, [4, 7]), (3, [2, 4, 7]), (9, [1, 2, 4, 7])]
)
def test_micro_batches_are_cut_to_the_length_that_its_longest_row_needs(buckets, cuts):
    assert micro_batches.cuts(7, buckets) == cuts
    random = np.random.default_rng(0)
    length = random.permutation([0, 0, 1, 1, 1, 2, 3, 3, 4, 5, 7, 7])
    mask = np.arange(7) < length[:, None]
    rows = {"row": np.arange(12, dtype=np.int32), "mask": mask}

    def function(rows):
        m, steps = rows["mask"].shape
        assert m == 3
        count = jnp.sum(rows["mask"], dtype=jnp.int32)
        wide = {"steps": jnp.int32(steps), "tokens": count}
        return wide, jnp.where(rows["mask"], rows["row"][:, None], 0)

    total, own = jax.jit(
        lambda rows, mask: micro_batches.over_micro_batches(
            function, rows, mask, count=4, buckets=buckets
        )
    )(rows, mask)
    assert float(total["tokens"]) == mask.sum()
    np.testing.assert_array_equal(own, mask * rows["row"][:, None])
    longest = np.sort(length).reshape(4, 3).max(-1)
    needed = [min(cut for cut in cuts if cut >= n) for n in longest]
    assert float(total["steps"]) == sum(needed)


# ----- rows packed into lines


@cache
def packed(tokens, most, in_place=None, **options):
    """Loss and gradient as `compiled`, rows in lines of tiles of two tokens."""
    settings = dataclasses.replace(how(1, 4, 1), tokens_per_micro_batch=tokens)
    model = tiny.model(**options)
    assert in_place is None or model.adding
    if in_place is False:
        model = dataclasses.replace(model, adding=None)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    if most:  # rows of a line, as for the kernel of TPUs
        model = dataclasses.replace(
            model, packs=lambda *_: lines.Lines(tokens, most, together=1)
        )

    @jax.jit
    def run(params, rows, weight):
        args = params, tiny.CONTEXTS, rows, weight, token_loss, settings
        return update.gradient(model, *args, still_old=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "TILE", 2)
        return run.lower(shapes, *batch()).compile()


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "most"), [(8, 0), (8, 2), (20, 0)])
def test_packing_changes_no_gradient_and_the_order_of_rows_none_of_it(tokens, most):
    run, order = packed(tokens, most), np.random.default_rng(0).permutation(M)
    got = run(tiny.params(), *batch())
    alike(masked(got), masked(naive()))
    value, grads, own = run(tiny.params(), *jax.tree.map(lambda x: x[order], batch()))
    back = jax.tree.map(lambda leaf: leaf[np.argsort(order)], own)
    alike(masked((value, grads, back)), masked(got))


@pytest.mark.parametrize(("tokens", "most"), [(8, 0), (8, 2)])
def test_gradients_of_layers_are_added_where_they_lie(tokens, most):
    make = partial(packed, tokens, most, scan_layers=True, remat=True)
    run, apart = make(in_place=True), make(in_place=False)
    params = tiny.stacked(tiny.params())
    value, grads, own = naive()
    alike(masked(run(params, *batch())), masked((value, tiny.stacked(grads), own)))
    less, more = (x.memory_analysis().temp_size_in_bytes for x in (run, apart))
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    assert more - less > layers // 3  # bytes on a CPU, of two layers


def test_gradients_of_contexts_are_added_where_they_lie():
    """To all of them, the head's too, which contexts do not read."""
    model = tiny.model(scan_layers=True, remat=True, layers=4, width=32, tied=False)
    params, rows = tiny.random_params(model), batch()[0]
    total = jax.tree.map(lambda x: 0.5 * x + 1, params)
    pulled = jax.jit(partial(update.prefill, model))(params, tiny.CONTEXTS)

    def run(model):
        def whole(params, pulled, total):
            given = tiny.CONTEXTS, pulled, total, rows, how(M, 0, 1)
            return update.pull_back(model, params, *given)

        return jax.jit(whole).lower(params, pulled, total).compile()

    in_place, apart = map(run, (model, dataclasses.replace(model, adding=None)))
    alike(*(x(params, pulled, total) for x in (in_place, apart)))
    less, more = (x.memory_analysis().temp_size_in_bytes for x in (in_place, apart))
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    assert more - less > layers // 2


def test_gradients_of_keys_and_values_are_added_where_they_lie():
    """Those of all layers never exist beside their total."""
    layers, width = 8, 64
    noise = np.random.default_rng(0).normal(size=(4, layers, width, width))
    matrices, values, *totals = (0.1 * noise).astype(np.float32)

    def layer(given, x, own):
        return jnp.tanh(own[0] @ x + given * (own[1] @ x)), None

    def loss(caches):
        x, given = jnp.ones(width), jnp.float32(2)
        return accumulate.through(layer, given, x, parameters, caches)[0].sum()

    parameters = accumulate.Adding(matrices, totals[0])
    in_place = jax.grad(lambda total: loss(accumulate.Adding(values, total)))
    apart = jax.jit(lambda total: total + jax.grad(loss)(jnp.asarray(values)))
    programs = [
        jax.jit(function, donate_argnums=0).lower(totals[1]).compile()
        for function in (in_place, apart)
    ]
    found, want = (program(jnp.asarray(totals[1])) for program in programs)
    alike(found, want)
    less, more = (x.memory_analysis().temp_size_in_bytes for x in programs)
    assert more - less > values.nbytes // 2


@pytest.mark.long
def test_packed_logprobs_are_those_of_a_naive_forward():
    rows, _ = batch()
    settings = dataclasses.replace(how(1, 0, 1), tokens_per_micro_batch=6)
    read = jax.jit(partial(update.token_stats, tiny.MODEL, settings=settings))
    given = tiny.params(), tiny.CONTEXTS, rows.tokens, rows.mask, rows.context
    got = read(*given)
    close(*(np.where(rows.mask, x.logp, 0) for x in (got, naive()[2])), atol=1e-5)
    # Within sets of an even id less or more, by the token: all mass at two tokens.
    other = (rows.tokens + 1 + np.arange(tiny.T)) % tiny.V
    noted = np.uint32(1) << other[..., None].astype(np.uint32)
    got = read(*given, support=noted)
    sequence, place = tiny.whole(tiny.CONTEXTS, rows.tokens, rows.context)
    z = tiny.full_logits(tiny.MODEL, tiny.params(), sequence, place) / TEMPERATURE
    own, its = (np.take_along_axis(z, x[..., None], -1) for x in (rows.tokens, other))
    want = -np.logaddexp(
        0, np.where(rows.tokens == other, -np.inf, (its - own)[..., 0])
    )
    close(*(np.where(rows.mask, x, 0) for x in (got.logp, want)), rtol=0, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize(("steps", "tokens"), [(70, 256), (512, 300), (5, 3)])
def test_rows_lie_in_one_line_each_and_are_never_cut(steps, tokens):
    length = np.random.default_rng(0).integers(0, steps + 1, 40).astype(np.int32)
    length[:3] = 0, 1, steps
    packing = lines.Packing.of(jnp.asarray(length), steps=steps, tokens=tokens)
    said = np.arange(40 * steps, dtype=np.int32).reshape(40, steps)
    seen, full = [], 0
    for number in range(int(packing.lines)):
        which, line = packing.at(number)
        which = np.asarray(which)
        here = np.minimum(which, 39)
        rows = said[here]
        exist = (np.arange(steps) < length[here, None]) & (which < 40)[:, None]
        back = line.rows(line.tiles(jnp.asarray(rows)), steps)
        np.testing.assert_array_equal(np.where(exist, back, 0), rows * exist)
        seen += [int(row) for row in which if row < 40]
        full += int(np.sum(np.asarray(line.row) < packing.most))
    assert sorted(seen) == [row for row in range(40) if length[row]]
    assert full == np.sum(-(-length // packing.tile))
    longest = -(-steps // packing.tile)
    assert packing.width == max(tokens // packing.tile, longest)
    assert (int(packing.lines) - 1) * (packing.width - longest) <= full


@pytest.mark.long
def test_rows_are_dealt_to_shards_evenly_and_a_line_has_no_more_than_it_may():
    length = np.random.default_rng(1).geometric(0.02, 61).clip(max=300).astype(np.int32)
    order = np.asarray(lines.dealt(jnp.asarray(length), 4))
    assert order.shape == (4, 16)
    assert sorted(order.reshape(-1)) == [*range(61), 61, 61, 61]
    tokens = np.append(length, 0)[order].sum(1)
    assert tokens.max() - tokens.min() <= length.max()
    packing = lines.Packing.of(jnp.asarray(length), steps=300, tokens=512, rows=3)
    found = [np.asarray(packing.at(n)[0]) for n in range(int(packing.lines))]
    assert {which.shape for which in found} == {(3,)}
    assert sorted(row for which in found for row in which if row < 61) == [*range(61)]


def test_rows_lie_where_their_context_does_and_shards_have_about_as_many_tokens():
    random = np.random.default_rng(1)
    length = random.geometric(0.02, 96).clip(max=300).astype(np.int32)
    context = random.permutation(np.repeat(np.arange(16, dtype=np.int32), 6))
    length[::7] = 0
    of = partial(lines.Homes.of, contexts=16, shards=4)
    found = of(jnp.asarray(length), jnp.asarray(context), rows=24)
    rows = np.asarray(found.row).reshape(4, 24)
    own = np.asarray(found.context).reshape(4, 4)
    assert sorted(own.reshape(-1)) == [*range(16)]
    for here, contexts in zip(rows, own, strict=True):
        assert set(context[here[here < 96]]) <= set(contexts)
    assert sorted(rows[rows < 96]) == [*np.flatnonzero(length)]
    tokens = np.append(length, 0)[rows].sum(1)
    assert tokens.max() - tokens.min() <= np.bincount(context, length).max()
    said = jnp.asarray(random.normal(size=(96, 3)), jnp.float32)
    back = found.back(found.there(said), 96)
    np.testing.assert_array_equal(back, np.where(length[:, None] > 0, said, 0))
    few = of(jnp.asarray(length), jnp.asarray(context), rows=8)
    assert found.whole
    assert not few.whole  # nothing is lost unseen
    assert np.isnan(few.back(few.there(said), 96)).all()


@pytest.mark.long
def test_no_scores_or_mask_of_a_line_by_itself_exist():
    settings = update.Settings(tokens_per_micro_batch=1024, token_chunk=64)
    rows, weight = jax.tree.map(
        lambda x: np.resize(x, (M, 512)) if x.ndim > 1 else x, batch()
    )

    def run(params, rows, weight):
        args = params, tiny.CONTEXTS, rows, weight, token_loss, settings
        return update.gradient(tiny.MODEL, *args, still_old=True)

    inside = jax.make_jaxpr(run)(tiny.params(), rows, weight).jaxpr
    assert max(hlo.sizes(inside)) < 512 * 512


@pytest.mark.long
def test_the_order_of_rows_changes_nothing():
    order = np.random.default_rng(0).permutation(M)
    moved = jax.tree.map(lambda leaf: leaf[order], batch())
    value, grads, own = compiled(*SETTINGS[1])(tiny.params(), *moved, False)
    back = jax.tree.map(lambda leaf: leaf[np.argsort(order)], own)
    alike(masked((value, grads, back)), masked(plain()))


def test_masked_rows_weigh_nothing():
    rows, weight = batch()
    junk = dataclasses.replace(
        rows,
        tokens=np.where(rows.mask, rows.tokens, 7),
        credit=np.where(rows.mask, rows.credit, np.float32(np.nan)),
        logp_old=np.where(rows.mask, rows.logp_old, np.float32(np.nan)),
    )
    got = compiled(*SETTINGS[0])(tiny.params(), junk, weight, False)
    alike(got[:2], plain()[:2])


def test_micro_batches_take_every_so_manieth_row_and_join_again():
    x = np.arange(24).reshape(8, 3)
    several = micro_batches.split({"x": x}, 4)
    assert several["x"].shape == (4, 2, 3)
    np.testing.assert_array_equal(several["x"][1], x[1::4])
    np.testing.assert_array_equal(micro_batches.join(several)["x"], x)


@pytest.mark.first(1)
@pytest.mark.parametrize(("chunk", "exists"), [(0, True), (16, False)])
@pytest.mark.parametrize("closely", [False, True])
def test_no_array_of_rows_by_tokens_by_vocabulary_exists_in_chunks(
    chunk, exists, closely
):
    large = 97
    policy = tiny.model(vocab_size=large)
    given = batch()

    def run(params):
        settings = update.Settings(token_chunk=chunk)
        if closely:
            rows = given[0]
            args = tiny.CONTEXTS, rows.tokens, rows.mask, rows.context, settings
            return update.token_stats(policy, params, *args)
        args = tiny.CONTEXTS, *given, token_loss, settings
        return update.gradient(policy, params, *args, still_old=True)

    params = jax.eval_shape(policy.init, jax.random.key(0))
    largest = max(hlo.sizes(jax.make_jaxpr(run)(params).jaxpr))
    assert (largest >= M * tiny.T * large) == exists


# ----- old log-probs


def ratio_loss(logp, entropy, rows):
    return loss.clipped_ratio(logp, rows.logp_old, rows.credit, rows.mask)


def test_the_first_ratio_is_exactly_one():
    rows, _ = batch()
    run = compiled(*SETTINGS[1], ratio_loss)
    for row, t in [(0, 0), (2, 3), (5, 1), (7, 0)]:
        weight = np.zeros((M, tiny.T), np.float32)
        weight[row, t] = 1
        value, _, _ = run(tiny.params(), rows, weight, True)
        assert value == -rows.credit[row, t] * rows.mask[row, t]
        later, _, own = run(tiny.params(), rows, weight, False)
        ratio = np.exp(own.logp[row, t] - rows.logp_old[row, t])
        clipped = np.clip(ratio, 0.8, 1.2)
        credit = rows.credit[row, t]
        want = -min(ratio * credit, clipped * credit)
        close(later, want * rows.mask[row, t])


def test_old_log_probs_are_the_policys_own_while_it_is_still_old():
    rows, _ = batch()
    logp = rows.logp_old + np.float32(0.1)
    first = update.with_old(rows, logp, True)
    np.testing.assert_array_equal(np.exp(logp - first.logp_old), 1)
    later = update.with_old(rows, logp, jnp.bool_(False))
    np.testing.assert_array_equal(later.logp_old, rows.logp_old)
    none = update.with_old(dataclasses.replace(rows, logp_old=None), logp, True)
    np.testing.assert_array_equal(none.logp_old, logp)

    def sum_old(logp):
        return jnp.sum(update.with_old(rows, logp, True).logp_old)

    assert not jax.grad(sum_old)(logp).any()


# ----- applying it

PARAMS = {"a": np.float32([1, -2]), "b": np.float32([[0.5]])}
GRADS = {"a": np.float32([3, 0]), "b": np.float32([[-4]])}  # norm 5
adam = update.transformation(partial(optax.adamw, 1e-2, weight_decay=0.1), 1.0)


@jax.jit
def apply_adam(opt_state, value, grads, usable):
    return update.apply(adam, PARAMS, opt_state, value, grads, usable)


@cache
def warm():
    """A state whose moments and count are not zero."""
    return apply_adam(adam.init(PARAMS), np.float32(1), GRADS, True)[1]


@pytest.mark.parametrize(
    ("changed", "credit", "imitated", "want"),
    [
        ({}, 0.0, False, False),
        ({}, 0.5, False, True),
        ({}, 0.0, True, True),
        ({"kl": KL(estimator=loss.k3, coefficient=0.1)}, 0.0, False, True),
        ({"entropy_bonus": 0.01}, 0.0, False, True),
    ],
)
def test_rows_without_credit_train_by_what_needs_none(changed, credit, imitated, want):
    mask = np.array([[True, False], [False, False]])
    values = np.where([[True, False], [True, True]], credit, 7.0)  # 7 where no token is
    rows = tiny.batch(mask, np.zeros((2, 2), np.float32), credit=values)
    if imitated:
        weight = np.ones((2, 2), np.float32)
        them = Imitated(tokens=rows.tokens, mask=mask, weight=weight)
        rows = dataclasses.replace(rows, imitated=them)
    assert bool(optimise.trains(override(load("rloo"), changed), rows)) is want


@pytest.mark.parametrize(
    ("value", "junk", "usable"),
    [
        (1.0, 3.0, False),
        (np.nan, 3.0, True),
        (np.inf, 3.0, True),
        (1.0, np.nan, True),
        (1.0, -np.inf, True),
        (np.nan, np.nan, False),
    ],
)
def test_an_unusable_update_is_skipped_as_a_whole_and_said_so(value, junk, usable):
    grads = GRADS | {"a": np.float32([junk, 0])}
    params, state, done = apply_adam(warm(), np.float32(value), grads, usable)
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, state, warm())
    assert not done.applied
    assert done.finite == bool(np.isfinite([value, junk]).all())


def test_a_usable_update_moves_parameters_moments_and_count():
    params, state, done = apply_adam(warm(), np.float32(1), GRADS, True)
    assert done.applied
    assert done.finite
    assert done.loss == 1
    assert done.gradient_norm == 5
    assert all((params[name] != PARAMS[name]).all() for name in ("b",))
    assert optax.tree.get(state, "count") == 2
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(
        lambda x: x.dtype, warm()
    )


@pytest.mark.parametrize("clip", [0.5, 5.0, 100.0, np.inf])
def test_gradients_are_clipped_by_their_global_norm(clip):
    tx = update.transformation(partial(optax.sgd, 1.0), clip)
    args = PARAMS, tx.init(PARAMS), np.float32(0), GRADS, True
    params, _, done = update.apply(tx, *args)
    for name in PARAMS:
        want = PARAMS[name] - GRADS[name] * min(1.0, clip / 5)
        close(params[name], want)
    assert done.gradient_norm == 5


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_learning_rate_warms_up_and_follows_a_cosine(warmup):
    options = {"peak": 2.0, "warmup": warmup, "steps": 10, "end": 0.5}
    for step in range(14):
        share = (min(step, 10) - warmup) / (10 - warmup)
        want = 0.5 + 1.5 * (1 + np.cos(np.pi * share)) / 2
        if step < warmup:
            want = 2.0 * step / warmup
        close(update.warmup_cosine(jnp.int32(step), **options), want)
