"""The transformer: pinned parameters, naive numpy, caches, padding, causality."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention
import tiny
from contracts import close

from curax.arrays import masked
from curax.arrays.frozen import join, split
from curax.models import rotary, transformer
from curax.models.rotary import RopeScaling

N, Q, BEFORE = 3, 6, 4
features = jax.jit(tiny.MODEL.features)
TOKENS = np.random.default_rng(1).integers(0, tiny.V, (N, Q)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(Q, dtype=np.int32), (N, Q))
SEEN = np.ones((N, Q), bool)


@cache
def whole():
    return features(tiny.params(), TOKENS, POSITIONS, SEEN)


@cache
def beginning():
    at = TOKENS[:, :BEFORE], POSITIONS[:, :BEFORE], SEEN[:, :BEFORE]
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


@pytest.mark.long
def test_scanned_layers_have_stacked_parameters_of_the_same_values():
    scanned = tiny.model(scan_layers=True)
    axes = by_name(scanned.axes, is_leaf=lambda node: isinstance(node, tuple))
    one, many = (jax.jit(m.init)(jax.random.key(0)) for m in (tiny.MODEL, scanned))
    shapes = {name: (leaf.shape, axes[name]) for name, leaf in by_name(many).items()}
    assert shapes == STACKED
    jax.tree.map(np.testing.assert_array_equal, tiny.stacked(one), many)


@pytest.mark.first(1)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_options_add_and_drop_the_parameters_they_name_and_no_others(scan_layers):
    def shapes(**options):
        policy = tiny.model(scan_layers=scan_layers, **options)
        axes = by_name(policy.axes, is_leaf=lambda node: isinstance(node, tuple))
        params = by_name(jax.eval_shape(policy.init, jax.random.key(0)))
        return {name: (p.shape, axes[name]) for name, p in params.items()}

    def layer(leaves):
        if not scan_layers:
            return {f"layers.{i}.{n}": leaf for i in range(2) for n, leaf in leaves}
        return {f"layers.{n}": ((2, *s), (None, *axes)) for n, (s, axes) in leaves}

    base = shapes()
    norms = {name for name in base if "q_norm" in name or "k_norm" in name}
    assert set(shapes(qk_norm=False)) == set(base) - norms
    sizes = {"q": 16, "k": 8, "v": 8}
    bias = layer([(f"{n}.bias", ((size,), ("heads",))) for n, size in sizes.items()])
    assert shapes(qkv_bias=True) == base | bias
    adapters = [
        ("q.lora_a", ((16, 3), ("embed", None))),
        ("q.lora_b", ((3, 16), (None, "heads"))),
        ("down.lora_a", ((24, 3), ("mlp", None))),
        ("down.lora_b", ((3, 16), (None, "embed"))),
    ]
    got = shapes(lora_rank=3, lora_modules=("q", "down"))
    assert got == base | layer(adapters)


def test_a_tied_model_reads_logits_off_the_embedding_table():
    tied = tiny.model(tied=True)
    shapes = jax.eval_shape(tied.init, jax.random.key(0))
    assert set(by_name(shapes)) == set(PARAMETERS) - {"head"}
    assert set(by_name(tied.axes, is_leaf=lambda n: isinstance(n, tuple))) == set(
        by_name(shapes)
    )
    assert tied.head(tiny.params()) is tiny.params()["embed"]
    assert tiny.MODEL.head(tiny.params()) is tiny.params()["head"]


@pytest.mark.long
def test_initial_parameters_have_the_stated_spread():
    policy = tiny.model(vocab_size=64, width=64, mlp_width=96, heads=8)
    params = by_name(jax.jit(policy.init)(jax.random.key(0)))
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


# ----- adapters, and what parameters are kept in


@pytest.mark.long
def test_an_adapted_model_begins_as_the_base_model():
    adapted = tiny.model(lora_rank=4)
    one, two = (jax.jit(m.init)(jax.random.key(0)) for m in (tiny.MODEL, adapted))
    one, two = by_name(one), by_name(two)
    assert len(two) == len(one) + 2 * 7 * 2
    for name, leaf in two.items():
        if name.endswith("lora_b"):
            assert not leaf.any()
        elif name.endswith("lora_a"):
            bound = leaf.shape[0] ** -0.5
            assert 0.8 * bound < np.abs(leaf).max() <= bound
        else:
            np.testing.assert_array_equal(leaf, one[name])
    draws = [leaf for name, leaf in two.items() if name.endswith("q.lora_a")]
    assert not np.allclose(*draws)


def test_adapters_alone_are_trained():
    assert tiny.MODEL.trained is None
    adapted = tiny.model(lora_rank=1, lora_modules=("q", "up"))
    assert adapted.trained
    names = by_name(jax.eval_shape(adapted.init, jax.random.key(0)))
    trained = {name for name in names if adapted.trained(tuple(name.split(".")))}
    assert trained == {
        f"layers.{i}.{matrix}.lora_{half}"
        for i in range(2)
        for matrix in ("q", "up")
        for half in "ab"
    }


@pytest.mark.long
def test_what_adapters_leave_is_held_as_products_read_it_and_no_bit_changes():
    adapted = tiny.model(lora_rank=2, dtype=jnp.bfloat16, qkv_bias=True)
    like = jax.eval_shape(adapted.init, jax.random.key(0))
    for name, leaf in by_name(like).items():
        frozen = name.rpartition(".")[2] in ("embed", "head", "kernel", "bias")
        assert leaf.dtype == (jnp.bfloat16 if frozen else jnp.float32), name
    drawn = tiny.random_params(adapted)
    half = jax.tree.map(lambda x, one: x.astype(one.dtype), drawn, like)
    seen = tiny.CONTEXTS.mask
    rows = tiny.CONTEXTS.tokens, jnp.cumsum(seen, -1), seen
    (trained, frozen), (_, narrow) = (split(adapted, x) for x in (drawn, half))

    @jax.jit
    def slopes(trained, frozen):
        def total(trained):
            params = join(frozen, trained)
            features, _ = adapted.features(params, *rows)
            logits = features @ adapted.head(params).T
            return jnp.sum(logits.astype(jnp.float32) ** 2), logits

        return jax.grad(total, has_aux=True)(trained)

    got, want = slopes(trained, narrow), slopes(trained, frozen)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.long
def test_parameters_are_kept_in_the_precision_asked_for_and_adapters_in_float32():
    options = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16, "qkv_bias": True}
    low = tiny.model(lora_rank=2, **options)
    params = jax.jit(low.init)(jax.random.key(0))
    for name, leaf in by_name(params).items():
        kept = jnp.float32 if "lora" in name else jnp.bfloat16
        assert leaf.dtype == kept, name
    got, _ = jax.jit(low.features)(params, TOKENS, POSITIONS, SEEN)
    assert got.dtype == jnp.bfloat16


def test_the_output_head_is_in_the_precision_that_the_model_computes_in():
    for tied in (False, True):
        low = tiny.model(dtype=jnp.bfloat16, tied=tied)
        want = tiny.params()["embed" if tied else "head"].astype(jnp.bfloat16)
        np.testing.assert_array_equal(low.head(tiny.params()), want)


# ----- against naive numpy, in float64


def naive_rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def naive_rotation(x, position, theta=10_000.0, scaling=None):
    """Entries i and i + d/2 are one complex number, turned by its own frequency."""
    half = x.shape[-1] // 2
    turned = x[..., :half] + 1j * x[..., half:]
    frequency = theta ** (-np.arange(half) / half)
    if scaling:
        frequency = np.array([naive_scaling(f, scaling) for f in frequency])
    turned = turned * np.exp(1j * position * frequency)
    return np.concatenate([turned.real, turned.imag], -1)


def naive_scaling(frequency, scaling):
    """By wavelength in tokens, as Llama 3 was published."""
    wavelength = 2 * np.pi / frequency
    window = scaling.original_max_position_embeddings
    if wavelength < window / scaling.high_freq_factor:
        return frequency
    if wavelength > window / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (window / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def naive_product(x, own, scale):
    y = x @ own["kernel"] + own.get("bias", 0.0)
    return y + scale * (x @ own["lora_a"] @ own["lora_b"]) if "lora_a" in own else y


def naive_features(params, tokens, scaling=None, scale=0.0):
    x = params["embed"][tokens]
    for i in range(2):
        own = params["layers"][str(i)]
        y = naive_rms(x, own["attention_norm"]["scale"])
        q, k, v = (
            naive_product(y, own[name], scale).reshape(len(x), -1, 8).swapaxes(0, 1)
            for name in "qkv"
        )
        if "q_norm" in own:
            q = naive_rms(q, own["q_norm"]["scale"])
            k = naive_rms(k, own["k_norm"]["scale"])
        q, k = (
            np.stack(
                [naive_rotation(z[:, t], t, scaling=scaling) for t in range(len(x))], 1
            )
            for z in (q, k)
        )
        y = test_attention.naive(q, k, v, np.tril(np.ones((len(x),) * 2, bool)))
        y = y.swapaxes(0, 1).reshape(len(x), -1)
        x = x + naive_product(y, own["o"], scale)
        y = naive_rms(x, own["mlp_norm"]["scale"])
        gate = naive_product(y, own["gate"], scale)
        y = gate / (1 + np.exp(-gate)) * naive_product(y, own["up"], scale)
        x = x + naive_product(y, own["down"], scale)
    return naive_rms(x, params["norm"]["scale"])


# So short a window that a tiny model has slow, quick and interpolated pairs.
SCALING = RopeScaling(
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 0),
        ({"qk_norm": False, "qkv_bias": True}, 0),
        ({"qk_norm": False, "rope_scaling": SCALING}, 0),
        ({"lora_rank": 2, "lora_alpha": 6.0, "qkv_bias": True}, 3),
        ({"lora_rank": 2, "lora_modules": ("k", "down")}, 8),
    ],
)
def test_the_model_is_its_definition(options, scale):
    policy = tiny.model(**options)
    params = tiny.random_params(policy)
    got, _ = jax.jit(policy.features)(params, TOKENS, POSITIONS, SEEN)
    exact = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    for n in range(N):
        want = naive_features(exact, TOKENS[n], options.get("rope_scaling"), scale)
        close(got[n], want, rtol=1e-4, atol=2e-5)


def test_rotation_is_its_definition_and_depends_on_distance_alone():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 1, 1, 3, 8)).astype(np.float32)

    def turn(x, positions, **options):
        angles = rotary.cos_sin(jnp.asarray(positions), 8, 10_000.0, **options)
        return rotary.rotate(x, *angles)

    positions = np.array([[0, 5, 700]], np.int32)
    got = np.asarray(turn(x, positions))
    for t, position in enumerate(positions[0]):
        close(got[0, 0, t], naive_rotation(x[0, 0, t], position), atol=2e-4)
    scaled = np.asarray(turn(x, positions, scaling=SCALING))
    for t, position in enumerate(positions[0]):
        want = naive_rotation(x[0, 0, t], position, scaling=SCALING)
        close(scaled[0, 0, t], want, atol=2e-4)
    for shift in (3, 50):
        near = np.sum(turn(x, positions) * turn(y, positions + 2), -1)
        far = np.sum(turn(x, positions + shift) * turn(y, positions + 2 + shift), -1)
        close(near, far, atol=1e-3)


@pytest.mark.parametrize("seeds", [0, 3])
def test_a_cpu_computes_the_cosine_of_an_angle_once(seeds, monkeypatch):
    def turned(q, k, positions):
        angles = rotary.cos_sin(positions, 8, 10_000.0)
        return rotary.rotate(q, *angles), rotary.rotate(k, *angles)

    floats, ints = jnp.float32, jnp.int32
    shapes = ((4, 4, 5, 8), floats), ((4, 2, 5, 8), floats), ((4, 5), ints)
    lead = (seeds,) * bool(seeds)
    args = [jax.ShapeDtypeStruct((*lead, *shape), of) for shape, of in shapes]

    def text():  # a function of its own each time: jit keeps programs
        function = partial(turned)
        return jax.jit(jax.vmap(function) if seeds else function).lower(*args)

    assert text().compile().as_text().count("cosine(") == 1
    assert "case" in text().as_text()
    monkeypatch.setattr(rotary, "platform", lambda: "tpu")
    assert "case" not in text().as_text()


def test_sums_leave_out_a_leading_axis_of_one_row():
    """Beside one a CPU takes long for sums of products; the numbers are the same."""
    policy, params = tiny.model(), tiny.random_params(tiny.model())
    tokens, positions, seen = TOKENS[:1], POSITIONS[:1], np.ones((1, Q), bool)

    def nats(params, rows):
        every, *at = (jnp.repeat(one, rows, 0) for one in (tokens, positions, seen))
        x, _ = policy.features(params, every, *at)
        logp, entropy = masked.token_logprobs(x, policy.head(params), every)
        return jnp.mean(jnp.sum(logp + entropy, -1))

    slope = jax.jit(jax.value_and_grad(nats), static_argnums=1)
    sums = re.findall(
        r"stablehlo\.reduce\(.*: \(tensor<(\S+)>,", slope.lower(params, 1).as_text()
    )
    width = params["embed"].shape[-1]
    assert f"{Q}x{width}xf32" in sums
    assert not {f"1x{Q}x{width}xf32", f"1x{Q}x8xf32"} & {*sums}  # 8: of a head
    assert sums.count(f"1x{Q}x{tiny.V}xf32") == 1  # the maximum
    one, two = (jax.tree.leaves(slope(params, rows)) for rows in (1, 2))
    for own, twice in zip(one, two, strict=True):
        close(own, twice, atol=1e-5)


# ----- caches, padding, causality


def test_decoding_token_by_token_into_a_growing_cache_is_the_full_forward():
    want, (_, cache) = whole()[0], beginning()
    for t in range(BEFORE, Q):
        at = TOKENS[:, t, None], POSITIONS[:, t, None], SEEN[:, : t + 1]
        got, cache = features(tiny.params(), *at, cache)
        close(got[:, 0], want[:, t], atol=1e-5)


def test_decoding_in_place_in_any_column_order_is_the_full_forward():
    want, _ = whole()
    junk = jnp.full((N, 1, Q, 8), 100.0)
    cache, seen = ((junk, junk), (junk, junk)), np.zeros((N, Q), bool)
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
    got, _ = features(tiny.params(), tokens, positions, SEEN & (np.arange(Q) >= 4))
    close(got[:, 4:], want[:, :short], atol=1e-5)


@pytest.mark.parametrize("t", [0, 3, 5])
def test_no_feature_depends_on_a_later_token(t):
    other = TOKENS.copy()
    other[:, t] = (other[:, t] + 1) % tiny.V
    one, _ = whole()
    two, _ = features(tiny.params(), other, POSITIONS, SEEN)
    np.testing.assert_array_equal(one[:, :t], two[:, :t])
    assert (np.abs(one[:, t:] - two[:, t:]).max(-1) > 1e-3).all()


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "everything"])
def test_scanned_layers_are_unrolled_layers(remat):
    scanned = jax.jit(tiny.model(scan_layers=True, remat=remat).features)
    params, alike = tiny.stacked(tiny.params()), partial(close, atol=1e-6)
    jax.tree.map(alike, scanned(params, TOKENS, POSITIONS, SEEN), whole())
    rest = TOKENS[:, BEFORE:], POSITIONS[:, BEFORE:], SEEN
    got, cache = scanned(params, *rest, beginning()[1])
    close(got, whole()[0][:, BEFORE:], atol=1e-6)
    jax.tree.map(alike, cache, whole()[1])
    column = np.zeros((N, BEFORE), bool) | (np.arange(BEFORE) < 2)
    at = TOKENS[:, :1], POSITIONS[:, :1], column, beginning()[1], np.int32(1)
    want = features(tiny.params(), *at)
    jax.tree.map(alike, scanned(params, *at), want)


@pytest.mark.long
@pytest.mark.parametrize("scan_layers", [False, True])
def test_remat_keeps_less_and_changes_no_gradient(scan_layers):
    params = tiny.stacked(tiny.params()) if scan_layers else tiny.params()

    def kept_and_gradient(remat):
        model = tiny.model(scan_layers=scan_layers, remat=remat)

        def loss(params):
            return jnp.sum(model.features(params, TOKENS, POSITIONS, SEEN)[0] ** 2)

        _, pull = jax.vjp(loss, params)
        size = sum(leaf.size for leaf in jax.tree.leaves(pull))
        return size, jax.jit(jax.grad(loss))(params)

    more, want = kept_and_gradient("none")
    some, other = kept_and_gradient("dots")
    less, got = kept_and_gradient("everything")
    assert less < some < more
    assert less < more / 2
    jax.tree.map(partial(close, rtol=1e-5, atol=1e-5), got, want)
    jax.tree.map(partial(close, rtol=1e-5, atol=1e-5), other, want)


def test_remat_is_one_of_three_or_true_or_false():
    said = [transformer.recomputed(x) for x in (False, True, *transformer.REMAT)]
    assert said == ["none", "everything", "none", "dots", "everything"]
    with pytest.raises(ValueError, match=r"model\.remat='dot' is none of none, dots"):
        tiny.model(remat="dot")


# ----- bfloat16 and errors


def test_in_bfloat16_features_are_near_those_in_float32():
    low = tiny.model(dtype=jnp.bfloat16)
    got, cache = jax.jit(low.features)(tiny.params(), TOKENS, POSITIONS, SEEN)
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
        (
            {"lora_rank": 2, "lora_modules": ("q", "gate_proj")},
            "model.lora_modules names 'gate_proj', but a layer has q, k, v, o, gate, "
            "up, down; name gate instead.",
        ),
        (
            {"lora_rank": 2, "lora_modules": ("head",)},
            "model.lora_modules names 'head', but a layer has q, k, v, o, gate, up, "
            "down; name some instead.",
        ),
        (
            {"lora_rank": 2, "lora_modules": ()},
            "model.lora_modules=() leaves nothing to train; name some of q, k, v, o, "
            "gate, up, down, or set model.lora_rank to 0.",
        ),
    ],
)
def test_impossible_sizes_are_refused_in_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tiny.model(**options)


def test_a_band_of_frequencies_that_is_empty_is_refused_in_a_sentence():
    sentence = (
        "rope_scaling.high_freq_factor=1.0 must be above low_freq_factor=1.0; set it "
        "to 4.0."
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        RopeScaling(high_freq_factor=1.0)
