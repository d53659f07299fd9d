"""Bytes that compiled programs move, and their operations, where both are known."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from curax.planning import hbm, hlo

MODULE = """HloModule m, is_scheduled=true

FileNames
1 "/home/me/curax/rollout.py"

FunctionNames
1 "draw"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%body (p: (s32[], bf16[64,128], f32[8,128])) -> (s32[], bf16[64,128], f32[8,128]) {
  %p = (s32[], bf16[64,128]{1,0}, f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = bf16[64,128]{1,0} get-tuple-element(%p), index=1
  %x = f32[8,128]{1,0} get-tuple-element(%p), index=2
  %near = bf16[64,128]{1,0:T(8,128)S(1)} copy(%w)
  %y = f32[8,128]{1,0} fusion(%i, %near, %x, %w), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/a/b" stack_frame_id=1}
  ROOT %t = (s32[], bf16[64,128]{1,0}, f32[8,128]{1,0}) tuple(%i, %w, %y)
}

%fused (a: s32[], b: bf16[64,128], c: f32[8,128], d: bf16[64,128]) -> f32[8,128] {
  %a = s32[] parameter(0)
  %b = bf16[64,128]{1,0} parameter(1)
  %c = f32[8,128]{1,0} parameter(2)
  %d = bf16[64,128]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %slice = bf16[1,128]{1,0} dynamic-slice(%d, %a, %zero), dynamic_slice_sizes={1,128}
  %row = f32[1,128]{1,0} convert(%slice)
  ROOT %put = f32[8,128]{1,0} dynamic-update-slice(%c, %row, %a, %zero)
}

%cond (p: (s32[], bf16[64,128], f32[8,128])) -> pred[] {
  %p = (s32[], bf16[64,128]{1,0}, f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(8)
  ROOT %c = pred[] compare(%i, %n), direction=CMP
}

ENTRY %main (w: bf16[64,128], x: f32[8,128]) -> f32[8,128] {
  %w = bf16[64,128]{1,0} parameter(0)
  %x = f32[8,128]{1,0} parameter(1)
  %i = s32[] constant(0)
  %t = (s32[], bf16[64,128]{1,0}, f32[8,128]{1,0}) tuple(%i, %w, %x)
  %while = (s32[], bf16[64,128]{1,0}, f32[8,128]{1,0}) while(%t), condition=%cond, body=%body
  ROOT %y = f32[8,128]{1,0} get-tuple-element(%while), index=2
}
"""  # noqa: E501
COUNTED, OPEN = (MODULE.replace("CMP", how) for how in ("LT", "NE"))
FIRST = "  %i = s32[] constant(0)\n"
(CUT,) = (line for line in MODULE.splitlines() if line.startswith("  %slice ="))
WEIGHTS, ROW, INDEX = 64 * 128 * 2, 128 * 4, 4


def test_a_turn_reads_a_slice_and_writes_one_in_place():
    """And what is copied to memory of the chip is read once, there not at all."""
    known = hbm.of(COUNTED)
    each = WEIGHTS + INDEX + ROW / 2, ROW  # the row of weights has half the bytes
    assert not known.turn
    assert hbm.read(known.call) == 8 * each[0]
    assert hbm.written(known.call) == 8 * each[1]
    open_ = hbm.of(OPEN)  # how often, its data say
    assert not open_.call
    assert (hbm.read(open_.turn), hbm.written(open_.turn)) == each
    most = hbm.moved(open_.turn).worst
    assert most[0] == (WEIGHTS, "bf16[64,128]", "")
    assert most[1][1:] == ("f32[8,128]", "curax/rollout.py:7 a/b")


def test_a_slice_that_is_copied_to_the_chip_is_all_that_is_read():
    """The TPU compiler fetches an array in several slices, side by side."""
    start = (
        "  %s = ((bf16[64,128]{1,0}), bf16[8,128]{1,0:S(1)}, s32[]{:S(2)}) "
        "slice-start(%w), slice={[0:8], [0:128]}\n"
    )
    before, more = hbm.of(COUNTED), hbm.of(COUNTED.replace(FIRST, start, 1))
    assert hbm.read(more.call) - hbm.read(before.call) == 8 * 128 * 2
    assert hbm.written(more.call) == hbm.written(before.call)


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        # ((what it reads), what it makes, marks): what is made alone is written
        (
            "(bf16[64,128]{1,0}, bf16[64,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%w), source_target_pairs={{0,1},{1,0}}",
            *(WEIGHTS, WEIGHTS),
        ),
        (
            "(bf16[64,128]{1,0}, bf16[256,128]{1,0}) all-gather-start(%w)",
            *(WEIGHTS, 4 * WEIGHTS),
        ),
        (
            "((bf16[64,128]{1,0}, s32[]), f32[8,128]{1,0}, u32[]{:S(8)}) "
            "call-start(%w, %i), to_apply=%other",
            *(WEIGHTS + INDEX, 8 * ROW),
        ),
        ("bf16[64,128]{1,0} all-reduce-start(%w), to_apply=%sum", WEIGHTS, WEIGHTS),
        # of slices and what is put that side alone that is in the device's memory
        ("bf16[8,128]{1,0:S(1)} slice(%w), slice={[0:8], [0:128]}", 8 * ROW / 2, 0),
        ("bf16[8,128]{1,0} slice(%near), slice={[0:8], [0:128]}", 0, 8 * ROW / 2),
        (
            "bf16[64,128]{1,0:S(1)} dynamic-update-slice(%near, %piece, %i, %i)",
            *(8 * ROW / 2 + 2 * INDEX, 0),
        ),
        (  # a kernel with two views of an array
            "f32[8,128]{1,0} custom-call(%w, %piece, %x, %w), "
            'custom_call_target="tpu_custom_call"',
            *(WEIGHTS + 8 * ROW, 8 * ROW),
        ),
    ],
)
def test_what_starts_and_what_is_cut_moves_what_it_makes_alone(line, read, written):
    near = (
        "  %near = bf16[64,128]{1,0:S(1)} bitcast(%w)\n"
        "  %piece = bf16[8,128]{1,0} bitcast(%w)\n"
    )
    more = hbm.of(OPEN.replace(FIRST, f"{FIRST}{near}  %new = {line}\n"))
    before = hbm.of(OPEN)
    assert hbm.read(more.call) - hbm.read(before.call) == read
    assert hbm.written(more.call) - hbm.written(before.call) == written


def test_a_fusion_in_a_fusion_that_slices_reads_the_slice():
    """Layers of stacked weights, multiplied where they are cut out."""
    inner = (
        "%cut (d: bf16[64,128], a: s32[], zero: s32[]) -> bf16[1,128] {\n"
        "  %d = bf16[64,128]{1,0} parameter(0)\n  %a = s32[] parameter(1)\n"
        f"  %zero = s32[] parameter(2)\n  ROOT{CUT[1:]}\n}}\n\n"
    )
    call = "  %slice = bf16[1,128]{1,0} fusion(%d, %a, %zero), kind=kLoop, calls=%cut"
    nested = COUNTED.replace(CUT, call).replace("%cond (p", f"{inner}%cond (p")
    assert hbm.read(hbm.of(nested).call) == hbm.read(hbm.of(COUNTED).call)


@pytest.mark.parametrize("deep", [False, True])
def test_a_fusion_in_a_fusion_that_changes_a_shape_alone_hides_no_reader(deep):
    """The TPU compiler has bitcasts so, of weights and of keys that a product reads."""
    plain = COUNTED.replace(CUT, "  %slice = bf16[1,128]{1,0} reduce(%d, %zero)")
    same = (
        "%same (e: bf16[64,128]) -> bf16[64,128] {\n"
        "  %e = bf16[64,128]{1,0} parameter(0)\n"
        "  ROOT %cast = bf16[64,128]{1,0} bitcast(%e)\n}\n\n"
    )
    if deep:
        inner = same.replace("%same", "%inner").replace("%e", "%f")
        same = inner + same.replace("bitcast(%e)", "fusion(%e), calls=%inner")
    call = "  %view = bf16[64,128]{1,0} fusion(%d), kind=kLoop, calls=%same\n"
    nested = plain.replace("  %slice", f"{call}  %slice").replace(
        "reduce(%d", "reduce(%view"
    )
    nested = nested.replace("%cond (p", f"{same}%cond (p")
    known = hbm.read(hbm.of(plain).call)
    assert known == 8 * (2 * WEIGHTS + INDEX)
    assert hbm.read(hbm.of(nested).call) == known


def program(function, *shapes, where=None):
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where) for shape in shapes
    ]
    return jax.jit(function).lower(*args).compile()


def compiled(function, *shapes):
    return hbm.of(program(function, *shapes).as_text())


def test_a_product_reads_both_matrices_and_writes_the_third():
    found = compiled(jnp.dot, (256, 512), (512, 128))
    assert hbm.read(found.call) == 4 * (256 * 512 + 512 * 128)
    assert hbm.written(found.call) == 4 * 256 * 128
    assert hbm.moved(found.call).flops == 2 * 256 * 512 * 128
    assert not found.turn


def test_a_device_receives_what_it_lacks_of_a_matrix_and_writes_all_of_it():
    """Rows and weights cut over fsdp: weights are gathered, and each has its rows."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    cut, whole = (NamedSharding(mesh, P(*axes)) for axes in (("fsdp",), ()))

    def product(x, w):
        return x @ jax.lax.with_sharding_constraint(w, whole)

    text = program(product, (64, 256), (256, 128), where=cut).as_text()
    weights, rows = 4 * 256 * 128, 4 * 8 * 256
    assert hlo.traffic(text).call.received == {"all-gather": weights * 7 / 8}
    moved = hbm.moved(hbm.of(text).call)
    assert moved.read == weights / 8 + rows + weights
    assert moved.written == weights + 4 * 8 * 128
    assert moved.flops == 2 * 8 * 256 * 128


@pytest.mark.parametrize(
    ("shapes", "pairs"),
    [
        # 8 x 10 places, windows of 3 x 3, padding left out: 3 x 8 - 2 and 3 x 5 - 1
        (((2, 3, 8, 10), (5, 3, 3, 3)), 2 * 5 * 3 * (3 * 8 - 2) * (3 * 5 - 1)),
        (((2, 4, 8, 10), (6, 2, 3, 3)), 2 * 6 * 2 * (3 * 8 - 2) * (3 * 5 - 1)),
        (((1, 1, 8, 9), (1, 1, 8, 1)), 8 * 8 * 5 - 5 * (4 * 3 / 2 + 5 * 4 / 2)),
    ],
)
def test_a_convolution_multiplies_what_its_windows_meet(shapes, pairs):
    """A TPU has products as these."""
    groups = shapes[0][1] // shapes[1][1]

    def convolved(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 2), "SAME", feature_group_count=groups
        )

    done = program(convolved, *shapes)
    assert hbm.moved(hbm.of(done.as_text()).call).flops == 2 * pairs
    (said,) = {done.cost_analysis()["flops"]}
    assert said == 2 * pairs


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        (  # heads of a product as places of a window that is padded
            "bf16[32,512,16,128] convolution(%x, %w), window={size=1x16 pad=0_0x15_15 "
            "rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
            2 * 32 * 512 * 1024 * 16 * 128,
        ),
        (  # a product for each of a batch, as holes between its entries
            "bf16[32,512,128] convolution(%x, %y), window={size=32 stride=31 "
            "lhs_dilate=32}, dim_labels=0bf_0io->0bf",
            2 * 32 * 512 * 1024 * 128,
        ),
    ],
)
def test_a_product_that_is_a_convolution_has_the_operations_of_the_product(line, flops):
    text = (
        "HloModule m\n\nENTRY %main (x: bf16[32,512,1024]) -> bf16[] {\n"
        "  %x = bf16[32,512,1024OWN] parameter(0)\n"
        "  %w = bf16[16,128,1024,1] parameter(1)\n"
        "  %y = bf16[32,1024,128] parameter(2)\n"
        f"  ROOT %z = {line}\n}}\n"
    ).replace("OWN", ",1" if "%w" in line else "")
    assert hbm.moved(hbm.of(text).call).flops == flops


@pytest.mark.parametrize("times", [3, 12])
def test_layers_that_are_scanned_are_read_once_each(times):
    """Of all weights an iteration reads its own."""

    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    found = compiled(layers, (4, 128), (times, 128, 128))
    weights = 4 * 128 * 128 * times
    assert weights <= hbm.read(found.call) < 2.2 * weights + 20_000
    assert hbm.moved(found.call).flops == 2 * 4 * 128 * 128 * times


def test_what_is_put_into_an_array_is_all_that_is_written():
    def rows(x, all_):
        return jax.lax.fori_loop(0, 16, lambda i, a: a.at[i].set(x + i), all_)

    found = compiled(rows, (128,), (4096, 128))
    whole = 4 * 4096 * 128  # copied once at most, as the caller keeps its own
    assert hbm.written(found.call) < whole + 64 * 4 * 128
    assert hbm.read(found.call) < whole + 64 * 4 * 128


def test_a_loop_that_ends_by_data_is_counted_by_turns():
    def halved(x, y):
        def one(state):
            return state[0] @ y, state[1] / 2

        return jax.lax.while_loop(lambda state: jnp.max(state[0]) > 1, one, (x, x))[0]

    found = compiled(halved, (128, 128), (128, 128))
    size = 4 * 128 * 128
    assert 2 * size <= hbm.read(found.turn) <= 5 * size
    assert size <= hbm.written(found.turn) <= 4 * size
    assert hbm.moved(found.turn).flops == 2 * 128**3


def test_what_a_program_reserves_is_read_from_what_its_compiler_writes(tmp_path):
    assert hbm.reserved(tmp_path) == 0
    (tmp_path / "module_0001.jit_f.after_optimizations.txt").write_text("HloModule\n")
    assert hbm.reserved(tmp_path) == 0
    report = tmp_path / "module_0001.jit_f.after_optimizations-memory-usage-report.txt"
    own = "Memory Space: default (color=0)\nTotal bytes: 419435008 (400.00MiB)\n"
    vmem = "Memory Space: vmem (color=1)\nTotal bytes: 999999999 (953.67MiB)\n"
    report.write_text(f"{own}  cumulative_size;       size;\n\n{vmem}")
    assert hbm.reserved(tmp_path) == 419_435_008
