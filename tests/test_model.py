"""The transformer: pinned parameters, naive numpy, caches, padding, causality."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import close

from curax.models import transformer

N, Q, BEFORE = 3, 6, 4
features = tiny.jit(tiny.MODEL.features)
TOKENS = np.random.default_rng(1).integers(0, tiny.V, (N, Q)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(Q, dtype=np.int32), (N, Q))
CAUSAL = np.broadcast_to(np.tril(np.ones((Q, Q), bool)), (N, Q, Q))


@cache
def whole():
    return features(tiny.params(), TOKENS, POSITIONS, CAUSAL)


@cache
def beginning():
    at = TOKENS[:, :BEFORE], POSITIONS[:, :BEFORE], CAUSAL[:, :BEFORE, :BEFORE]
    return features(tiny.params(), *at)


# Checkpoints depend on these. Name: shape, logical axes.
LAYER = {
    "attention_norm.scale": ((16,), (None,)),
    "down.kernel": ((24, 16), ("mlp", "embed")),
    "gate.kernel": ((16, 24), ("embed", "mlp")),
    "k.kernel": ((16, 8), ("embed", "heads")),
    "k_norm.scale": ((8,), (None,)),
    "mlp_norm.scale": ((16,), (None,)),
    "o.kernel": ((16, 16), ("heads", "embed")),
    "q.kernel": ((16, 16), ("embed", "heads")),
    "q_norm.scale": ((8,), (None,)),
    "up.kernel": ((16, 24), ("embed", "mlp")),
    "v.kernel": ((16, 8), ("embed", "heads")),
}
OUTER = {
    "embed": ((11, 16), ("vocab", "embed")),
    "head": ((11, 16), ("vocab", "embed")),
    "norm.scale": ((16,), (None,)),
}
PARAMETERS = OUTER | {
    f"layers.{i}.{name}": leaf for i in range(2) for name, leaf in LAYER.items()
}
STACKED = OUTER | {
    f"layers.{name}": ((2, *shape), (None, *axes))
    for name, (shape, axes) in LAYER.items()
}


def by_name(tree, **options):
    leaves = jax.tree_util.tree_leaves_with_path(tree, **options)
    return {".".join(key.key for key in path): leaf for path, leaf in leaves}


def test_parameters_keep_their_names_shapes_and_logical_axes():
    axes = by_name(tiny.MODEL.axes, is_leaf=lambda node: isinstance(node, tuple))
    params = by_name(tiny.params())
    assert {name: (p.shape, axes[name]) for name, p in params.items()} == PARAMETERS
    assert {p.dtype for p in params.values()} == {np.dtype("float32")}
    assert len(axes) == len(PARAMETERS)


def test_scanned_layers_have_stacked_parameters_of_the_same_values():
    scanned = tiny.model(scan_layers=True)
    axes = by_name(scanned.axes, is_leaf=lambda node: isinstance(node, tuple))
    one, many = (tiny.jit(m.init)(jax.random.key(0)) for m in (tiny.MODEL, scanned))
    shapes = {name: (leaf.shape, axes[name]) for name, leaf in by_name(many).items()}
    assert shapes == STACKED
    jax.tree.map(np.testing.assert_array_equal, stacked(one), many)


def stacked(params):
    """The parameters of unrolled layers as those of scanned ones."""
    both = [params["layers"][str(i)] for i in range(2)]
    return params | {"layers": jax.tree.map(lambda *p: jnp.stack(p), *both)}


def test_a_tied_model_reads_logits_off_the_embedding_table():
    tied = tiny.model(tied=True)
    shapes = jax.eval_shape(tied.init, jax.random.key(0))
    assert set(by_name(shapes)) == set(PARAMETERS) - {"head"}
    assert set(by_name(tied.axes, is_leaf=lambda n: isinstance(n, tuple))) == set(
        by_name(shapes)
    )
    assert tied.head(tiny.params()) is tiny.params()["embed"]
    assert tiny.MODEL.head(tiny.params()) is tiny.params()["head"]


def test_initial_parameters_have_the_stated_spread():
    policy = tiny.model(vocab_size=64, width=64, mlp_width=96, heads=8)
    params = by_name(tiny.jit(policy.init)(jax.random.key(0)))
    spread = {name: np.std(leaf) for name, leaf in params.items()}
    inputs = {"head": 64, "q": 64, "k": 64, "v": 64, "gate": 64, "up": 64}
    # Two residual branches in each of two layers: a quarter of the variance.
    inputs |= {"o": 4 * 64, "down": 4 * 96}
    for name, got in spread.items():
        short = name.split(".")[2] if name.startswith("layers") else name
        want = 0.3 if name == "embed" else inputs.get(short, np.inf) ** -0.5
        close(got, want, rtol=0.06, err_msg=name)
    scales = [leaf for name, leaf in params.items() if name.endswith("scale")]
    assert all((np.asarray(leaf) == 1).all() for leaf in scales)
    one, two = (params[f"layers.{i}.q.kernel"] for i in range(2))
    assert not np.allclose(one, two)


# ----- against naive numpy, in float64


def naive_rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def naive_rotation(x, position, theta=10_000.0):
    """Entries i and i + d/2 are one complex number, turned by its own frequency."""
    half = x.shape[-1] // 2
    turned = x[..., :half] + 1j * x[..., half:]
    turned = turned * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag], -1)


def naive_attention(q, k, v, mask):
    """One query of one head at a time; q `[heads, Q, d]`, k and v `[kv_heads, S, d]`"""
    out = np.zeros_like(q)
    for h, t in np.ndindex(*q.shape[:2]):
        own = h // (len(q) // len(k))
        score = np.exp(k[own][mask[t]] @ q[h, t] / np.sqrt(q.shape[-1]))
        out[h, t] = score / score.sum() @ v[own][mask[t]]
    return out


def naive_features(params, tokens):
    x = params["embed"][tokens]
    for i in range(2):
        own = params["layers"][str(i)]
        y = naive_rms(x, own["attention_norm"]["scale"])
        q, k, v = (
            (y @ own[name]["kernel"]).reshape(len(x), -1, 8).swapaxes(0, 1)
            for name in "qkv"
        )
        q, k = (
            naive_rms(z, own[n]["scale"]) for n, z in (("q_norm", q), ("k_norm", k))
        )
        q, k = (
            np.stack([naive_rotation(z[:, t], t) for t in range(len(x))], 1)
            for z in (q, k)
        )
        y = naive_attention(q, k, v, np.tril(np.ones((len(x),) * 2, bool)))
        x = x + y.swapaxes(0, 1).reshape(len(x), -1) @ own["o"]["kernel"]
        y = naive_rms(x, own["mlp_norm"]["scale"])
        gate = y @ own["gate"]["kernel"]
        y = gate / (1 + np.exp(-gate)) * (y @ own["up"]["kernel"])
        x = x + y @ own["down"]["kernel"]
    return naive_rms(x, params["norm"]["scale"])


def test_the_model_is_its_definition():
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), tiny.params())
    got, _ = whole()
    for n in range(N):
        close(got[n], naive_features(params, TOKENS[n]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_attention_is_its_definition(heads, kv_heads):
    random = np.random.default_rng(0)
    q = random.normal(size=(2, heads, 3, 8)).astype(np.float32)
    k, v = random.normal(size=(2, 2, kv_heads, 5, 8)).astype(np.float32)
    mask = random.random((2, 3, 5)) < 0.5
    mask[..., 2] = True
    got = transformer.attention(q, k, v, mask)
    for n in range(2):
        close(got[n], naive_attention(q[n], k[n], v[n], mask[n]), atol=1e-5)
    nowhere = transformer.attention(q, k, v, np.zeros_like(mask))
    mean = np.repeat(v.mean(-2, keepdims=True), heads // kv_heads, 1)
    close(nowhere, np.broadcast_to(mean, q.shape), atol=1e-5)


def test_what_a_mask_hides_does_not_matter():
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(3, 1, 2, 4, 8)).astype(np.float32)
    mask = np.arange(4) < np.array([[[1], [2], [2], [2]]])
    hidden = np.arange(4)[:, None] >= 2
    want = transformer.attention(q, k, v, mask)
    got = transformer.attention(
        q, np.where(hidden, np.float32(1e4), k), np.where(hidden, 1e4, v), mask
    )
    np.testing.assert_array_equal(got, want)


def test_rotation_is_its_definition_and_depends_on_distance_alone():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 1, 1, 3, 8)).astype(np.float32)
    turn = partial(transformer.rotate, theta=10_000.0)
    positions = np.array([[0, 5, 700]], np.int32)
    got = np.asarray(turn(x, positions))
    for t, position in enumerate(positions[0]):
        close(got[0, 0, t], naive_rotation(x[0, 0, t], position), atol=2e-4)
    for shift in (3, 50):
        near = np.sum(turn(x, positions) * turn(y, positions + 2), -1)
        far = np.sum(turn(x, positions + shift) * turn(y, positions + 2 + shift), -1)
        close(near, far, atol=1e-3)


# ----- caches, padding, causality


def test_decoding_token_by_token_into_a_growing_cache_is_the_full_forward():
    want, (_, cache) = whole()[0], beginning()
    for t in range(BEFORE, Q):
        at = TOKENS[:, t, None], POSITIONS[:, t, None], CAUSAL[:, t, None, : t + 1]
        got, cache = features(tiny.params(), *at, cache)
        close(got[:, 0], want[:, t], atol=1e-5)


def test_decoding_in_place_in_any_column_order_is_the_full_forward():
    want, _ = whole()
    junk = jnp.full((N, 1, Q, 8), 100.0)
    cache, seen = ((junk, junk), (junk, junk)), np.zeros((N, 1, Q), bool)
    for t, column in enumerate(np.random.default_rng(0).permutation(Q)):
        seen[..., column] = True
        got, cache = features(
            tiny.params(),
            TOKENS[:, t, None],
            POSITIONS[:, t, None],
            seen,
            cache,
            np.int32(column),
        )
        close(got[:, 0], want[:, t], atol=1e-5)


def test_padding_on_the_left_changes_nothing():
    want, _ = whole()
    short = Q - 4
    tokens = np.roll(TOKENS, 4, 1)  # what stands under the padding is junk
    positions = np.maximum(POSITIONS - 4, 0)
    mask = CAUSAL & (np.arange(Q) >= 4)
    got, _ = features(tiny.params(), tokens, positions, mask)
    close(got[:, 4:], want[:, :short], atol=1e-5)


@pytest.mark.parametrize("t", [0, 3, 5])
def test_no_feature_depends_on_a_later_token(t):
    other = TOKENS.copy()
    other[:, t] = (other[:, t] + 1) % tiny.V
    one, _ = whole()
    two, _ = features(tiny.params(), other, POSITIONS, CAUSAL)
    np.testing.assert_array_equal(one[:, :t], two[:, :t])
    assert (np.abs(one[:, t:] - two[:, t:]).max(-1) > 1e-3).all()


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_are_unrolled_layers(remat):
    scanned = tiny.jit(tiny.model(scan_layers=True, remat=remat).features)
    params, alike = stacked(tiny.params()), partial(close, atol=1e-6)
    jax.tree.map(alike, scanned(params, TOKENS, POSITIONS, CAUSAL), whole())
    rest = TOKENS[:, BEFORE:], POSITIONS[:, BEFORE:], CAUSAL[:, BEFORE:]
    got, cache = scanned(params, *rest, beginning()[1])
    close(got, whole()[0][:, BEFORE:], atol=1e-6)
    jax.tree.map(alike, cache, whole()[1])
    column = np.zeros((N, 1, BEFORE), bool) | (np.arange(BEFORE) < 2)
    at = TOKENS[:, :1], POSITIONS[:, :1], column, beginning()[1], np.int32(1)
    want = features(tiny.params(), *at)
    jax.tree.map(alike, scanned(params, *at), want)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_remat_keeps_less_and_changes_no_gradient(scan_layers):
    params = stacked(tiny.params()) if scan_layers else tiny.params()

    def kept_and_gradient(remat):
        model = tiny.model(scan_layers=scan_layers, remat=remat)

        def loss(params):
            return jnp.sum(model.features(params, TOKENS, POSITIONS, CAUSAL)[0] ** 2)

        _, pull = jax.vjp(loss, params)
        size = sum(leaf.size for leaf in jax.tree.leaves(pull))
        return size, tiny.jit(jax.grad(loss))(params)

    more, want = kept_and_gradient(False)
    less, got = kept_and_gradient(True)
    assert less < more / 2
    jax.tree.map(partial(close, rtol=1e-5, atol=1e-5), got, want)


# ----- bfloat16 and errors


def test_in_bfloat16_features_are_near_those_in_float32():
    low = tiny.model(dtype=jnp.bfloat16)
    got, cache = tiny.jit(low.features)(tiny.params(), TOKENS, POSITIONS, CAUSAL)
    assert {leaf.dtype for leaf in jax.tree.leaves((got, cache))} == {
        np.dtype(jnp.bfloat16)
    }
    want, _ = whole()
    off = np.abs(np.asarray(got, np.float32) - want)
    assert 1e-4 < off.max() < 0.08  # features have mean square 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"heads": 4, "kv_heads": 3},
            "model.heads=4 is no multiple of kv_heads=3; set model.kv_heads to 1.",
        ),
        (
            {"head_dim": 7},
            "model.head_dim=7 must be even, for rotary halves; set it to 8.",
        ),
    ],
)
def test_impossible_heads_are_refused_in_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny.model(**options)
