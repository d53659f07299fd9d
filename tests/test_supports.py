"""Kept sets: what is noted of a draw, and that what trains is within it."""

from dataclasses import replace
from functools import cache, lru_cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import close
from hypothesis import given
from hypothesis import strategies as st
from test_loops import TINY, assert_same, trained
from test_mesh import cube
from test_rollout import naive_cut
from test_update import spread

import curax
from curax import loss, off_policy, score, update
from curax.arrays import choice, masked, supports
from curax.config import ConfigError, Mesh, override
from curax.runs import cache as held
from curax.step import draw, drivers, loops, mesh, room
from curax.step.build import build
from curax.step.learn import prepared

V = 96  # three words of bits, so that two ids are fewer
FORMS = {
    "ids": {"top_k": 2, "top_p": 0.9},
    "bits": {"top_k": 20, "top_p": 0.8},
    "of top-p": {"top_k": 0, "top_p": 0.6},
}
for_every_form = pytest.mark.parametrize("form", FORMS)
seeds = st.integers(0, 2**32 - 1)


# ----- what is noted


@partial(jax.jit, static_argnames=("top_k", "count"))
def there_and_back(logp, first, top_k, count):
    noted = supports.packed(logp, top_k=top_k)
    return noted, supports.among(noted, first, count)


@pytest.mark.parametrize(("top_k", "size"), [(0, 3), (2, 2), (3, 3)])
@given(seeds, st.integers(0, 90))
def test_what_is_noted_is_read_again_from_any_token_on(top_k, size, seed, first):
    random = np.random.default_rng(seed)
    most = random.integers(0, (top_k or 70) + 1, (2, 3, 1))
    kept = random.random((2, 3, 70)).argsort(-1) < most
    logp = np.where(kept, -random.exponential(size=kept.shape), -np.inf)
    noted, got = there_and_back(np.float32(logp), first, top_k, 24)
    assert noted.shape == (2, 3, size)
    assert noted.dtype == (jnp.int32 if top_k == 2 else jnp.uint32)
    want = np.pad(kept, ((0, 0), (0, 0), (0, 60)))[..., first : first + 24]
    np.testing.assert_array_equal(got, want)
    lists = [random.permutation(np.flatnonzero(one)) for one in kept[0]]
    like = supports.shape(70, top_k)
    np.testing.assert_array_equal(
        np.sort(supports.of_ids(lists, like)), np.sort(noted[0])
    )


@pytest.mark.parametrize(
    ("vocab", "top_k", "size", "kind"),
    [
        (151_936, 0, 4748, "uint32"),
        (151_936, 20, 20, "int32"),
        (151_936, 4747, 4747, "int32"),
        (151_936, 4748, 4748, "uint32"),
        (33, 1, 1, "int32"),
        (32, 1, 1, "uint32"),
    ],
)
def test_of_ids_and_bits_that_is_noted_which_takes_fewer_bytes(
    vocab, top_k, size, kind
):
    found = supports.shape(vocab, top_k)
    assert (found.shape, str(found.dtype)) == ((size,), kind)


truncate = jax.jit(choice.truncate, static_argnames=("top_k", "top_p", "ties"))


@pytest.mark.parametrize("size", [11, choice.MANY])
@given(seeds)
def test_of_equally_likely_tokens_as_many_are_kept_as_there_is_room_for(size, seed):
    z = np.random.default_rng(seed).integers(0, 4, (3, size)).astype(np.float32)
    logp = np.asarray(jax.nn.log_softmax(z))
    got = np.asarray(truncate(logp, top_k=4, top_p=1.0, ties=False))
    for row, cut in zip(logp, got, strict=True):
        want = np.sort(np.argsort(-row, kind="stable")[:4])
        np.testing.assert_array_equal(np.flatnonzero(np.isfinite(cut)), want)
        close(np.exp(cut).sum(), 1)


# ----- log-probs within it


def naive(logits, token, kept):
    """Log-prob, entropy, square, coupling of what is kept, and their gradients."""
    with jax.enable_x64(True):
        own = kept | (np.arange(V) == token[..., None])
        return spread(jnp.where(own, logits.astype(float), -1e9), token)


@cache
def within(top_k, chunk, columns):
    @jax.jit
    def read(features, head, token, kept):
        noted = supports.packed(jnp.where(kept, 0.0, -jnp.inf), top_k=top_k)
        options = {"temperature": 0.7, "chunk": chunk, "support": noted}
        with tiny.in_pieces(columns):
            return masked.token_logprobs_and_moments(features, head, token, **options)

    return read


@pytest.mark.first(3)
@pytest.mark.parametrize(("chunk", "columns"), [(0, 0), (4, 0), (0, 4)])
@pytest.mark.parametrize("top_k", [0, 2])
@given(seeds)
def test_what_is_within_a_kept_set_is_its_definition(top_k, chunk, columns, seed):
    """Behind the end of a row, where nothing is kept, the token alone is."""
    random = np.random.default_rng(seed)
    features = np.float32(random.normal(size=(2, 5, 6)))
    head = np.float32(random.normal(size=(V, 6)))
    token = random.integers(0, V, (2, 5)).astype(np.int32)
    most = random.integers(0, (top_k or V) + 1, (2, 5, 1))
    kept = random.random((2, 5, V)).argsort(-1) < most
    got = within(top_k, chunk, columns)(features, head, token, kept)
    want = naive(features.astype(float) @ head.astype(float).T / 0.7, token, kept)
    for one, other in zip(got, want, strict=True):
        close(one, other, rtol=1e-4, atol=2e-5)
    order = random.permutation(V)
    new = np.argsort(order).astype(np.int32)[token]
    moved = within(top_k, chunk, columns)(features, head[order], new, kept[..., order])
    for one, other in zip(moved, got, strict=True):
        close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize(("chunk", "columns"), [(0, 0), (4, 0), (0, 4)])
def test_gradients_are_those_with_the_set_held_fixed(chunk, columns):
    random = np.random.default_rng(0)
    features = np.float32(random.normal(size=(2, 5, 6)))
    head = np.float32(random.normal(size=(V, 6)))
    token = random.integers(0, V, (2, 5)).astype(np.int32)
    kept = random.random((2, 5, V)) < 0.1
    weight = np.float32(random.normal(size=(4, 2, 5)))

    def slopes(function):
        def total(features, head):
            each = zip(weight, function(features, head), strict=True)
            return sum(jnp.sum(w * part) for w, part in each)

        return jax.jit(jax.grad(total, (0, 1)))(features, head)

    def at_once(features, head):
        logits = jnp.einsum("ntd,vd->ntv", features, head) / 0.7
        own = kept | (np.arange(V) == token[..., None])
        return spread(jnp.where(own, logits, -1e9), token)

    read = within(0, chunk, columns)
    got = slopes(lambda features, head: read(features, head, token, kept))
    jax.tree.map(partial(close, rtol=1e-4, atol=1e-5), got, slopes(at_once))


# ----- from the draw to the gradient


POLICY = tiny.table(vocab_size=V)


@cache
def params():
    noise = np.random.default_rng(0).normal(size=(V, 8))
    return {"embed": jnp.asarray(noise, jnp.float32)}


def draw_and_differentiate(form, params):
    """Rows, log-probs within what they were drawn from, and a gradient within it."""

    def known(rows):
        return {"logp": rows.logp_behaviour, "support": rows.support}

    def token_loss(logp, entropy, rows):
        value = loss.clipped_ratio(logp, rows.logp_old, rows.credit, rows.mask)
        return jnp.where(rows.mask, value - 0.1 * entropy, 0.0)

    how = tiny.settings(slots=4, temperature=1.5, support=True, **FORMS[form])
    settings = update.Settings(
        temperature=1.5, micro_batches=2, token_chunk=6, length_buckets=2
    )
    drawn = POLICY, params, tiny.ROWS, how
    return tiny.draw_and_differentiate(*drawn, known, token_loss, settings)


@cache
def on_one(form):
    run = jax.jit(partial(draw_and_differentiate, form))
    return jax.device_get(run(params()))


@pytest.mark.first(1)
@for_every_form
def test_the_kept_set_is_what_top_k_and_top_p_leave_at_each_token(form):
    rows = on_one(form)[0]
    assert rows.support.dtype == (np.int32 if form == "ids" else np.uint32)
    kept = np.asarray(supports.among(jnp.asarray(rows.support), 0, V))
    embed = np.asarray(params()["embed"], np.float64)
    last = np.asarray(tiny.CONTEXTS.tokens)[rows.context, -1:]
    before = np.concatenate([last, rows.tokens[:, :-1]], -1)
    logits = embed[before] @ embed.T / 1.5
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    which = np.argwhere(rows.mask)
    assert len(which) > 20
    for n, t in which:
        cut = naive_cut(logp[n, t], *FORMS[form].values())
        np.testing.assert_array_equal(kept[n, t], np.isfinite(cut))
        close(rows.logp_behaviour[n, t], cut[rows.tokens[n, t]], atol=1e-5)
        chance = np.exp(cut)
        square = 1 - 2 * chance[rows.tokens[n, t]] + (chance**2).sum()
        close(rows.score_sq_norm[n, t], square, atol=1e-5)
    assert (rows.logp_behaviour > rows.logp_policy + 0.05)[rows.mask].any()


@for_every_form
def test_the_trainer_says_of_a_token_what_it_was_drawn_with(form):
    """Replay: ratio 1 on-policy, up to rounding."""
    rows, _, _, own = on_one(form)
    close(own.logp[rows.mask], rows.logp_behaviour[rows.mask], rtol=0, atol=1e-5)


@pytest.mark.long
@for_every_form
def test_a_gradient_within_kept_sets_on_eight_devices_is_that_on_one(form):
    """A device has a part of the vocabulary, and of each set what lies in it."""
    where = mesh.of_params(cube(), POLICY.axes, params())
    run = partial(draw_and_differentiate, form)
    run = jax.jit(run, out_shardings=(None, None, where, None))
    with mesh.use(cube()):
        got = jax.device_get(run(jax.device_put(params(), where)))
    np.testing.assert_array_equal(got[0].support, on_one(form)[0].support)
    jax.tree.map(partial(close, rtol=1e-4, atol=1e-5), got, on_one(form))


@pytest.mark.first(1)
@for_every_form
def test_norms_of_scores_are_within_what_was_drawn_from(form):
    rows = jax.tree.map(jnp.asarray, on_one(form)[0])
    kept = np.asarray(supports.among(rows.support, 0, V))

    @jax.jit
    @partial(jax.vmap, in_axes=(None, 0, 0, 0, 0))
    @jax.grad
    def slope(embed, last, tokens, mask, kept):
        before = jnp.concatenate([last, tokens[:-1]])
        logits = jnp.einsum("td,vd->tv", embed[before], embed) / 1.5
        logp = jax.nn.log_softmax(jnp.where(kept, logits, -1e9))
        own = jnp.take_along_axis(logp, tokens[:, None], -1)[:, 0]
        return jnp.sum(jnp.where(mask, own, 0.0))

    last = tiny.CONTEXTS.tokens[rows.context, -1:]
    args = last, rows.tokens, rows.mask, kept
    want = jnp.sqrt(jnp.sum(slope(params()["embed"], *args) ** 2, (1, 2)))
    norm = partial(score.gradient, POLICY, micro_batches=2)
    got = jax.jit(norm)(params(), tiny.CONTEXTS, rows, 1.5)
    close(got, want, rtol=1e-4, atol=1e-5)
    # Of the output head alone: sum_t (e_y - mu_t) h_t^T.
    embed = np.asarray(params()["embed"])
    before = np.concatenate([last, rows.tokens[:, :-1]], -1)
    mu = np.where(kept, np.exp(embed[before] @ embed.T / 1.5), 0)
    mu /= np.maximum(mu.sum(-1, keepdims=True), 1e-9)
    error = np.where(rows.mask[..., None], np.eye(V)[rows.tokens] - mu, 0)
    whole = np.einsum("ntv,ntd->nvd", error, embed[before]) / 1.5
    norm = jax.jit(partial(score.last_layer, POLICY, vocab_chunk=20))
    got = norm(params(), tiny.CONTEXTS, rows, 1.5)
    close(got, np.sqrt((whole**2).sum((1, 2))), rtol=1e-4, atol=1e-5)


# ----- runs


def replayed(*changes):
    cut = ["sampling.top_p=0.9", "sampling.temperature=2"]
    return override(TINY, [*cut, "sampling.replay_support=true", *changes])


@lru_cache
def reference():
    return trained(replayed())


def names(rows, start):
    return {name for row in rows for name in row if name.startswith(start)}


@pytest.mark.long
def test_what_is_replayed_needs_no_correction_and_has_no_gap():
    """Replay: with several mini-batches and a KL."""
    rows = reference()[1]
    for row in rows:
        assert 0 < row["sampler/drift_nats"] < 1e-4
        assert 0.05 < row["sampler/cut_mass"] < 0.1
        assert row["update/count"] == 2
    assert not names(rows, "off_policy/")


@pytest.mark.long
def test_old_policy_and_reference_are_cut_like_the_policy():
    """Replay: before any update all log-probs of a batch are those drawn with."""
    config = replace(replayed(), model=tiny.table, warm_start=None)
    parts = build(config)

    @jax.jit
    def batch(state):
        drawn = draw.attempt(drivers.Traced(), parts, state, None)
        *_, batch = prepared(parts, state, drawn)
        return batch, drawn.rollouts.logp_policy

    rows, whole = batch(curax.init(parts, 1))
    on = np.asarray(rows.mask)
    for name in ("logp_policy", "logp_old", "logp_ref"):
        got = np.asarray(getattr(rows, name))
        close(got[on], rows.logp_behaviour[on], rtol=0, atol=1e-5)
    assert (np.asarray(rows.logp_behaviour - whole)[on] > 0.05).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        ["task.on_device=false", "sampling.chunks=4", "update.micro_batches=2"],
        pytest.param(["staged=true"], marks=pytest.mark.long),
        pytest.param(["update.tokens_per_micro_batch=12"], marks=pytest.mark.long),
        pytest.param(["update.token_chunk=3"], marks=pytest.mark.long),
        pytest.param(["sampling.slots=3"], marks=pytest.mark.long),
        pytest.param([Mesh(data=2, fsdp=2, tensor=2)], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_replay_is_the_same_by_every_driver_and_in_any_pieces(changes):
    if isinstance(changes[0], Mesh):
        config = override(replayed(), {"mesh": changes[0]})
    else:
        config = replayed(*changes)
    assert_same(trained(config, loops.Staged, (1, 2, 1)), reference())


AHEAD = "sampling.ahead=1", "sampling.off_policy=off_policy.ratio"


@lru_cache
def from_the_host():
    return trained(replayed(*AHEAD, "task.on_device=false"), loops.Staged, (1, 2, 1))


@pytest.mark.long
def test_one_step_ahead_drivers_agree():
    assert_same(from_the_host(), trained(replayed(*AHEAD)))


@pytest.mark.long
def test_one_step_ahead_the_lag_alone_is_left():
    """Replay: kept sets are those of the policy that drew."""
    rows = from_the_host()[1]
    assert not names(rows, "off_policy/truncation")
    gap = [row["off_policy/lag_chi_square"] for row in rows]
    assert abs(gap[0]) < 1e-5 < max(map(abs, gap[1:]))
    for row in rows:
        close(row["off_policy/ratio_mean"], row["off_policy/lag_ratio_mean"])


def test_of_an_engine_there_is_room_for_tokens_as_likely_as_the_last():
    changes = ["sampling.top_p=1", "sampling.top_k=1"]
    engine = {"sampling.engine": list, "sampling.off_policy": off_policy.none}
    configs = replayed(*changes), override(replayed(*changes), engine)
    for config, size in zip(configs, (1, 2), strict=True):
        parts = replace(build(config), model=POLICY)
        shape = room.kept_to_train(parts)
        assert shape == jax.ShapeDtypeStruct((size,), np.int32)


def test_what_is_noted_is_told_before_a_run_and_refused_where_it_cannot_be(monkeypatch):
    loop = SimpleNamespace(parts=build(replayed()), mesh=None)
    monkeypatch.setattr(held, "device_bytes", lambda: 2**30)
    assert held.kept_sets(loop) == (
        "Kept sets: 0.00037 MiB of 1 GiB of a device, 4 bytes of each token."
    )
    monkeypatch.setattr(held, "device_bytes", lambda: 100)
    with pytest.raises(ConfigError, match=r"set sampling\.top_k=1, of"):
        held.kept_sets(loop)
    loop.parts = build(TINY)
    assert held.kept_sets(loop) is None
