"""Plans: estimates, compiled programs, and what they say moves between devices."""

import json
import os
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import small
import tiny
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh
from outputs import message, refusal

from benchmarks import plans
from curax import allocate, score
from curax.arrays import lines
from curax.commands import plan
from curax.config import ConfigError, Mesh, Pilot, load, override
from curax.planning import chips, estimate, hbm, hlo, planner, table
from curax.planning.programs import Compiled
from curax.runs import cache
from curax.step import mesh, room
from curax.types import Rollouts

SMALL = ["--config", str(small.FILE)]
MODULE = """\
HloModule jit_draw

%all-reduce-scatter.1 (x: f32[16,4]) -> f32[4,4] {
  %sum.1 = f32[16,4] all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
}

%async_collective_fusion.2 (x: bf16[8,8]) -> bf16[32,8] {
  %all-gather.2 = bf16[32,8] all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
}

%layer (x: f32[4]) -> f32[4] {
  %sent = (f32[4], f32[4], u32[]) collective-permute-start(%x), source_target_pairs={}
  %done = f32[4] collective-permute-done(%sent)
}

%counts (i: s32[]) -> pred[] {
  %most = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %most), direction=LT
}

%some (x: pred[4]) -> pred[] {
  ROOT %any = pred[] reduce(%x), to_apply=%or
}

%token (x: f32[4]) -> f32[4] {
  %inner = f32[4] while(%x), condition=%counts, body=%layer
  %gathered = bf16[32,8] fusion(%x), calls=%async_collective_fusion.2
  %either = f32[4] conditional(%b, %x, %x), branch_computations={%layer, %nothing}
}

%nothing (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %scattered = f32[4,4] fusion(%x), calls=%all-reduce-scatter.1
  %kept = f32[2,4] reduce-scatter(%x), replica_groups=[4,2]<=[8], to_apply=%add
  %loop = f32[4] while(%x), condition=%some, body=%token
  %next = f32[4] while(%loop), condition=%some, body=%layer
}
"""


def test_collectives_are_counted_as_often_as_their_computation_runs():
    found = hlo.traffic(MODULE)
    assert found.call.count == {"reduce-scatter": 2}
    # 16 x 4 entries over 4 devices, and 2 x 4 that are left of twice as many over 2
    assert found.call.received == {"reduce-scatter": 0.75 * 256 + 0.5 * 64}
    # of two stages the one that moves more, of branches too; three turns; 16 bytes each
    assert found.turn.count == {"all-gather": 1, "collective-permute": 4}
    assert found.turn.received == {"all-gather": 0.75 * 512, "collective-permute": 64}


@pytest.mark.parametrize(
    ("line", "bytes_"),
    [
        ("(f32[4], bf16[8]) all-reduce(%x, %y)", 2 * 3 / 4 * 32),
        ("(f32[4], bf16[8]) all-reduce-start(%x, %y)", 2 * 3 / 4 * 32),
        ("(f32[4]{0:T(8)}, bf16[8]{0}) all-to-all(%x, %y)", 3 / 4 * 32),
        ("((f32[4], f32[2]), (f32[16], f32[8])) all-gather-start(%x, %y)", 72),
        ("(f32[4], f32[4], u32[]) collective-permute-start(%x)", 16),
    ],
)
def test_all_arrays_of_a_collective_are_received(line, bytes_):
    (one,) = hlo.collectives([f"  %z = {line}, replica_groups=[2,4]<=[8]"])
    assert one.received == bytes_


def test_a_turn_is_one_of_a_loop_that_others_run_again_and_again():
    """As the micro-batches of packed rows, which each mini-batch has."""
    minibatch = (
        "%minibatch (x: f32[4]) -> f32[4] {\n"
        "  %micro = f32[4] while(%x), condition=%some, body=%token\n}\n\n"
    )
    outer = "while(%x), condition=%counts, body=%minibatch"
    text = MODULE.replace("while(%x), condition=%some, body=%token", outer)
    text = text.replace("ENTRY", f"{minibatch}ENTRY")
    assert hlo.traffic(text) == hlo.traffic(MODULE)


def reported(fits=None, **sizes):
    """A compiled update, of these sizes."""
    done = Compiled(name="learn", refusal=None, lower_s=0.0, compile_s=0.0, **sizes)
    return planner.Program(
        role="learn",
        compiled=done,
        others=0.0,
        total=0.0,
        fits=fits,
    )


NEEDED = re.compile(r"times what is needed +(.*)$", re.MULTILINE)


def test_what_a_program_does_is_beside_what_it_needs_in_a_turn_and_in_a_call():
    """Without a turn, in all; operations of kernels are not known, so left out."""
    sizes = ["update.minibatches=2", "update.epochs=3", "mesh.tensor=2"]
    sizes.append("update.tokens_per_micro_batch=4")
    run = planner.traced(override(load(small.FILE), sizes))
    found = planner.plan(run, chips.topology("cpu:2"), auto=False, compiles=False)
    work = found.chosen.work["learn"]
    rows, steps = run.parts.train_rows, run.parts.config.sampling.max_tokens
    assert work.turns == 3 * rows * steps / 4

    def moved(times, need, kernels=0.0):
        flops = times[0] * (need.flops - need.attention * (kernels > 0))
        written = times[2] * (need.written + need.received)
        return hbm.Moved(times[1] * need.read, written, (), kernels, flops)

    def shown(**sizes):
        text = table.table(
            "x", replace(found, programs=[[reported(**sizes)]]), compiler=True
        )
        return NEEDED.findall(text)

    kernels = moved((2, 3, 4), work.turn, kernels=1.0), moved((5, 6, 7), work.call, 1.0)
    received = hlo.Moved({"all-gather": 8 * work.turn.received}), hlo.Moved()
    traffic = hlo.Traffic(turn=received[0], call=received[1])
    more = {"traffic": traffic, "temporaries": 9 * work.least}
    order = ["9", "2", "5", "8", "-", "3", "6", "4", "7"]
    assert shown(turn=kernels[0], call=kernels[1], **more) == order
    (held, *_, flops, _, _, _, read, _, written) = shown(
        call=moved((2, 3, 4), work.total)
    )
    assert (held, flops, read, written) == ("-", "2", "3", "4")


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_an_update_needs_what_its_products_do(remat, shape):
    """Each reads two arrays and makes one; weights are gathered, sums are of rows."""
    sizes = ["update.tokens_per_micro_batch=4", f"model.remat={remat}"]
    sizes += ["model.dtype=bfloat16", "model.kv_heads=2", "update.minibatches=1"]
    run = planner.traced(override(load(small.FILE), sizes))
    data, fsdp, tensor = shape
    on = estimate.Cut.of(AbstractMesh(shape, mesh.AXES), run.sizes)
    held = {"parameters": 4.0e6, "optimizer": 8.0e6}
    work = estimate.learn(run.parts, run.sizes, on, held)
    width, heads, inner, vocab, prompt = 16, 16, 16, run.sizes.vocab, run.sizes.prompt
    # x and weights of each product, by whether its input is whole and its output a part
    matrices = {"qkv": 3 * [(width, heads)], "o": [(heads, width)]}
    matrices |= {"in": 2 * [(width, inner)], "out": [(inner, width)]}
    tokens, seen = 4, prompt + 1  # two rows of two, half of which are before a query
    flops = read = written = 0.0
    for name, products in matrices.items():
        again = remat and name != "out"
        for i, o in products:
            flops += 2 * tokens * i * o * (3 + again)
            i, o = (i / tensor, o) if name in ("o", "out") else (i, o / tensor)
            read += 2 * tokens * (i + (o + i + o) + again * i)
            written += 2 * tokens * (o + i + again * o)
    attention = 4 * tokens * heads * seen * (3 + remat)
    q, kqv = heads / tensor, 3 * heads / tensor
    read += 2 * tokens * (kqv + (q + kqv + q) + remat * kqv)
    written += 2 * tokens * (q + kqv + remat * q)
    weights, head = sum(i * o for p in matrices.values() for i, o in p), vocab * width
    flops += 2 * tokens * head * 4  # logits are made again
    read += 2 * ((2 + remat) * weights + 2 * head) / tensor
    gradients = 4 * (weights + head) / tensor / fsdp
    rows = run.parts.train_rows // (data * fsdp)
    context = (
        run.sizes.contexts // (data * fsdp) * prompt * 2 * heads / tensor / rows * 2
    )
    read += gradients + (2 + remat) * 2 * context
    written += gradients + 4 * context
    assert work.turn.flops == (flops + attention) / tensor
    assert work.turn.attention == attention / tensor
    assert work.turn.read == pytest.approx(read, rel=1e-12)
    assert work.turn.written == pytest.approx(written, rel=1e-12)
    sums = tokens * width * 2 * (4 + remat + 2)  # of a layer, embedding and head
    received = 2 * (tensor - 1) / tensor * sums
    moved = 2 * 2 * weights + 2 * head + 2 * weights + 4 * head
    received += moved / tensor * (fsdp - 1) / fsdp
    received += 3 * 2 * context * rows / 2 * (fsdp - 1)  # of contexts: not with rows
    assert work.turn.received == pytest.approx(received, rel=1e-12)


@pytest.mark.parametrize(
    ("tokens", "steps", "name", "rows"),
    [
        (100, 48, "cpu:2", 1),  # lines have three tiles of 32, and a row takes two
        (100, 20, "cpu:2", 5),
        (100, 120, "cpu:2", 1),  # a row is longer than what was asked for
        (600, 250, "v5e:2x1", 2),  # two lines of 256
        (100, 250, "v5e:2x1", 1),
        (100, 40, "v5e:2x1", 2),  # one of 128, in whole tiles
    ],
)
def test_a_micro_batch_has_the_rows_that_its_lines_hold(tokens, steps, name, rows):
    """As `over_lines` packs rows that are all as long as they may be."""
    own = [f"update.tokens_per_micro_batch={tokens}", f"sampling.max_tokens={steps}"]
    own += ["mesh.data=2", "update.minibatches=1", "model.head_dim=64"]
    run = planner.traced(override(load(small.FILE), own))
    place = chips.topology(name)
    (one,) = planner.plan(run, place, auto=False, compiles=False).layouts
    of_tpu = place.chip is not None
    cut = estimate.Cut.of(AbstractMesh((2, 1, 1), mesh.AXES), run.sizes)
    how = estimate.MicroBatches.lines(run.parts, run.sizes, of_tpu=of_tpu)
    assert how is not None
    found = estimate.MicroBatches.of(run.parts, run.sizes, cut, of_tpu=of_tpu)
    share = run.parts.train_rows // 2
    heap = np.full(share // how.together, steps, np.int32)
    packing = lines.Packing.of(heap, steps=steps, tokens=how.tokens, rows=how.rows)
    work = one.work["learn"]
    assert work.turns == found.count == packing.lines
    assert found.computed == how.together * packing.width * packing.tile
    assert found.tokens == rows * steps
    assert found.copied == how.together * how.rows * run.sizes.prompt
    need = work.total.flops - work.call.flops  # of all rows: the last may have fewer
    assert need == pytest.approx(work.turn.flops * share / rows)


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("[4,16]<=[16,4]T(1,0)", 16),
        ("{{0,1,2},{3,4,5}}", 3),
        ("mesh['axis_0'=16,'axis_1'=4] {'axis_0'}", 16),
        ("mesh['axis_0'=2,'axis_1'=4,'axis_2'=3] {'axis_0','axis_1'}", 8),
        ("mesh['axis_0'=8,'axis_1'=3] {'axis_0':(2)4}", 4),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", 4),
    ],
)
def test_groups_of_devices_are_read_however_they_are_written(groups, devices):
    text = f"%x = f32[8] all-gather(%y), replica_groups={groups}, dimensions={{0}}"
    (found,) = hlo.collectives([text])
    assert found.received == 32 * (devices - 1) / devices


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v9:2x2", "v9 is none of v4, v5e, v5p, v6e, cpu"),
        ("v5p", "nothing is no shape of a slice; write for example"),
        ("v5p:4x4", "a slice of v5p has 3 axes, not 2; write"),
        ("v5e:0x2", "0x2 is no shape of a slice"),
        ("cpu:99999", "99999 chips are more than a slice has; write for example"),
    ],
)
def test_a_slice_that_cannot_be_is_told_in_a_sentence(name, says):
    assert says in message(ConfigError, chips.topology, name)
    assert says in refusal(plan.main, *SMALL, "--topology", name)


def test_a_mesh_lies_on_a_slice_if_its_sizes_are_products_of_axes():
    cube = chips.topology("v5p:4x4x4")
    assert chips.lies_on((1, 16, 4), cube)
    assert chips.lies_on((4, 4, 4), cube)
    assert not chips.lies_on((1, 8, 8), cube)
    assert not chips.lies_on((2, 8, 4), cube)
    assert chips.lies_on((1, 1, 4), chips.topology("v5p:2x2x1"))


def test_devices_of_a_cpu_are_made_where_something_is_compiled_alone(monkeypatch):
    place = chips.topology("cpu:3")
    monkeypatch.setenv("XLA_FLAGS", "--xla_some=1")
    plan.prepare(place, compiles=False)
    assert os.environ["XLA_FLAGS"] == "--xla_some=1"
    plan.prepare(place)
    assert os.environ["XLA_FLAGS"].endswith(" --xla_force_host_platform_device_count=3")


def planned(tmp_path, *args):
    """Exit status and JSON of a plan of the shrunk quickstart."""
    status = plan.main([*SMALL, *args, "--out", str(tmp_path / "plan")])
    return status, json.loads((tmp_path / "plan" / "plan.json").read_text())


def test_without_a_mesh_all_that_divide_are_ranked_and_nothing_is_compiled(
    tmp_path, capsys
):
    status, page = planned(tmp_path, "--topology", "v5e:2x2", "--cheap")
    assert status == 0
    assert not page["compiled"]
    found = [tuple(one["mesh"].values()) for one in page["layouts"]]
    # one head of keys is copied; two query heads, of 8 entries, divide over 4 as well
    assert set(found) == {
        (4, 1, 1),
        (2, 2, 1),
        (1, 4, 1),
        (2, 1, 2),
        (1, 2, 2),
        (1, 1, 4),
    }
    seconds = [one["seconds"] for one in page["layouts"]]
    assert seconds == sorted(seconds)
    assert page["best"] == page["layouts"][0]["mesh"]
    state = page["layouts"][0]["state"]
    assert state["optimizer"] >= 2 * state["parameters"] > 0
    out = capsys.readouterr().out
    assert "fits 15.75 GiB per chip, by an estimate" in out
    assert (tmp_path / "plan" / "plan.txt").read_text() in out + "\n"


@pytest.mark.parametrize("fits", [True, False])
def test_what_the_compiler_says_is_the_status_whatever_was_estimated(
    fits, tmp_path, monkeypatch, capsys
):
    little = replace(chips.CHIPS["v5e"], memory_bytes=1.0)
    monkeypatch.setitem(chips.CHIPS, "v5e", little)
    args = ["--topology", "v5e:1x1", "--set", "mesh.data=1"]
    assert planned(tmp_path, *args, "--cheap")[0] == 1
    for module, name, value in (
        (chips, "has_compiler", lambda place: True),
        (chips, "devices", lambda place: []),
        (planner, "_programs", lambda *args: [reported(fits)]),
    ):
        monkeypatch.setattr(module, name, value)
    capsys.readouterr()
    assert planned(tmp_path, *args)[0] == (0 if fits else 1)
    fewer = "it does not fit 0 GiB per chip; smaller micro-batches"
    said = "fits 0 GiB per chip, compiled" if fits else fewer
    assert said in capsys.readouterr().out


@pytest.mark.long
def test_a_run_says_the_cache_that_is_planned():
    config = override(load(small.FILE), ["sampling.slots=6", "sampling.max_tokens=7"])
    run = planner.traced(config)
    for shape, slots, contexts in (((1, 1, 1), 6, 4), ((2, 1, 2), 3, 2)):
        layout = AbstractMesh(shape, mesh.AXES)
        cut = estimate.Cut.of(layout, run.sizes)
        memory = estimate.draw(run.sizes, cut, cut_sampler=False).memory
        got = room.cache_size(run.parts, layout)
        assert (got.slots, got.contexts) == (6, 4)
        assert got.bytes == memory["cache"] + memory["prefix"]
        # One head of keys does not divide over two devices.
        token = 2 * run.sizes.layers * run.sizes.keys * run.sizes.item
        assert got.bytes == token * (slots * 7 + contexts * got.prompt)
        # What is left for one slot less on each device.
        allowed = (got.bytes - 1) / 2**30
        bounded = planner.traced(override(config, {"sampling.cache_gib": allowed}))
        less = room.cache_size(bounded.parts, layout)
        assert (less.slots, less.wanted) == (6 - 6 // slots, 6)
        assert less.bytes == got.bytes - token * 7
        memory = estimate.draw(bounded.sizes, cut, cut_sampler=False).memory
        assert less.bytes == memory["cache"] + memory["prefix"]


@pytest.mark.parametrize(
    ("name", "sizes", "slots"),
    [
        (small.FILE, ["task.on_device=False", "sampling.chunks=4"], 4),
        (small.QUICKSTART.with_name("ada_seq_balanced_exact.py"), [], 256),
    ],
)
def test_a_chunk_or_a_round_has_as_many_slots_in_the_plan_as_in_a_run(
    name, sizes, slots
):
    config = override(load(name), sizes)
    run = planner.traced(replace(config, model=partial(tiny.table)))
    assert run.sizes.rows == run.parts.rows > slots
    assert run.sizes.slots == room.cache_size(run.parts, None).slots == slots


def test_a_run_says_the_pages_that_its_slots_share():
    config = override(load(small.FILE), ["sampling.slots=6", "sampling.max_tokens=16"])
    whole = room.cache_size(planner.traced(config).parts, None)
    assert (whole.slots, whole.pages) == (6, 0)
    allowed = whole.bytes / 2**30 / 2
    run = planner.traced(override(config, {"sampling.cache_gib": allowed}))
    rings = room.cache_size(run.parts, None)
    with tiny.in_pages(2):
        got = room.cache_size(run.parts, None)
        said = cache.line(cast(Any, SimpleNamespace(parts=run.parts, mesh=None)))
    assert rings.slots < got.slots <= got.wanted == 6
    token = 2 * run.sizes.layers * run.sizes.keys * run.sizes.item
    assert allowed * 2**30 - 2 * token < got.bytes <= allowed * 2**30
    text = f"{got.slots} of 6 slots of 16 tokens, which share {got.pages} pages of 2,"
    assert said is not None
    assert text in said


@pytest.mark.long
def test_a_compiled_plan_says_what_both_programs_take(tmp_path, capsys):
    mesh = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    status, page = planned(tmp_path, "--topology", "cpu:8", "--set", *mesh)
    assert status == 0
    (one,) = page["compiled"]
    assert one["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert [program["role"] for program in one["programs"]] == ["draw", "learn"]
    draw, learn = (program["compiled"] for program in one["programs"])
    state = sum(page["layouts"][0]["state"].values())
    assert learn["arguments"] >= state
    assert learn["aliased"] > 0
    assert sum(draw["traffic"]["turn"]["received"].values()) > 0
    assert not learn["traffic"]["turn"]["received"]
    assert sum(learn["traffic"]["call"]["received"].values()) > 0
    assert all(program["total"] > state for program in one["programs"])
    work = page["layouts"][0]["work"]
    assert draw["turn"][0] >= work["draw"]["turn"]["read"] / 2
    out = capsys.readouterr().out
    shown = [line.split() for line in NEEDED.findall(out)]
    wanted = draw["turn"][0] / work["draw"]["turn"]["read"]
    assert float(shown[5][0]) == pytest.approx(wanted, rel=0.01)
    assert [cells.index("-") for cells in shown[1::2]] == [1] * 4  # no turn to learn in
    assert not any("-" in cells for cells in shown[2::2])
    assert "draw moves most per turn, GiB:" in out
    assert all(len(program["call"][2]) == 5 for program in (draw, learn))
    assert "No limit is known for a CPU" in out


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        (
            "gvm_grpo_exact",
            {"pilots/draw": 64, "pilots/explored": None, "draw": 128, "learn": None},
        ),
        ("sage_self", {"draw": 128, "hints/draw": 16, "learn": None}),
        (
            "dro",
            {"queries/draw": 128, "queries/probe_scores": None, "draw": 256}
            | {"references/score": None, "learn": None},
        ),
    ],
)
def test_what_methods_compute_with_parameters_is_planned_by_its_use(name, calls):
    config = load(small.QUICKSTART.with_name(f"{name}.py"))
    run = planner.traced(replace(config, model=partial(tiny.table)))
    rows = [isinstance(call.out, Rollouts) and len(call.out.mask) for call in run.calls]
    assert {call.name: n or None for call, n in zip(run.calls, rows, strict=True)} == (
        calls
    )
    layout = planner.layout(run, chips.topology("v5e:1x1"), Mesh())
    drawn = {call for call, n in calls.items() if n}
    assert set(layout.work) == {*drawn, "learn"}
    for call in drawn:
        tokens = calls[call] * config.sampling.max_tokens
        assert layout.work[call].memory["completions"] == 6 * 4 * tokens


def test_what_is_not_trained_has_no_gradient_in_the_plan():
    """Base matrices of adapters: no products for it, none of it received."""
    args = ["model.lora_rank=2", "mesh.fsdp=2", "update.micro_batches=1"]
    run = planner.traced(override(load(small.FILE), args))
    sizes, (params, base) = run.sizes, (run.state.params, run.state.frozen)
    assert sizes.learned == entries_of(params) < sizes.products
    assert sizes.products == entries_of(params) + entries_of(base)
    (one,) = planner.plan(
        run, chips.topology("v5e:2x1"), auto=False, compiles=False
    ).layouts
    cut = estimate.Cut(rows=2, fsdp=2, data=1, tensor=1, heads=1)
    trains_all = replace(run.parts, model=replace(run.parts.model, trained=None))
    every = replace(sizes, learned=sizes.products)
    learn = estimate.learn(trains_all, every, cut, one.state, in_pieces=True)
    head, base_size = sizes.vocab * sizes.width, sizes.products - sizes.learned
    tokens = sizes.trained * sizes.steps // 2
    prompts = sizes.contexts * sizes.prompt // 2
    less = 2 * tokens * (base_size + head) + 2 * prompts * base_size
    held = (work.memory["prefix"] for work in (learn, one.work["learn"]))
    item, pair = run.sizes.item, 2 * run.sizes.keys * run.sizes.layers
    # Keys and values, their gradients of a micro-batch, and the sums of these.
    assert [n / prompts / pair for n in held] == [2 * item + 4] * 2
    every, own = learn.total, one.work["learn"].total
    assert every.flops - own.flops == less
    times = run.parts.config.update.minibatches  # one micro-batch each
    (pieces,) = {(prompts + tokens - 1) // tokens}  # of contexts, as long
    scattered = (times * (base_size + head) + pieces * base_size) * 4 / 2
    assert every.received - own.received == scattered
    assert own.read < every.read


def entries_of(params):
    """Entries of the matrices of layers."""
    flat = flatten_dict(params)
    return sum(x.size for path, x in flat.items() if "layers" in path and x.ndim > 1)


def test_kept_sets_are_in_the_plan_of_what_draws_and_of_what_learns():
    sizes = {"sampling.top_p": 0.9, "sampling.replay_support": True}
    config = override(load(small.QUICKSTART), sizes)
    run = planner.traced(replace(config, model=partial(tiny.table)))
    one = planner.layout(run, chips.topology("v5e:2x1"), Mesh(data=2))
    token = -(-run.sizes.vocab // 32) * 4
    tokens = config.sampling.max_tokens * token
    drawn, trained = run.parts.rows // 2, run.parts.train_rows // 2
    assert one.work["draw"].memory["kept sets"] == drawn * tokens
    assert one.work["learn"].memory["kept sets"] == (drawn + trained) * tokens
    found = planner.plan(run, chips.topology("v5e:1x1"), auto=False, compiles=False)
    assert "\n    kept sets" in table.table("small", found, compiler=True)


@pytest.mark.long
def test_programs_of_methods_are_compiled_and_told_by_their_names():
    norm = partial(score.gradient, parameters=score.embedding)
    config = replace(
        small.get_config(),
        model=partial(tiny.table),
        pilot=Pilot(draws=2, norm=norm, every=2),
        allocate=partial(allocate.gvm, least=1),
    )
    run = planner.traced(config)
    found = planner.plan(run, chips.topology("cpu:1"), auto=False, compiles=True)
    (programs,) = found.programs
    names = ["pilots/draw", "pilots/explored", "draw", "learn"]
    assert [program.role for program in programs] == names
    state = found.chosen.state
    assert state["states of methods"] == state["parameters"]
    assert all(program.total > sum(state.values()) for program in programs)
    text = table.table("small", found, compiler=True)
    assert re.search(r"^Compiled for .*\n(.*)$", text, re.M)[1].split() == names
    assert re.search(r"MiB received: per turn(.*)$", text, re.M)[1].split() == [*"0000"]
    assert {line.split()[1] for line in NEEDED.findall(text)} == {"-"}  # no estimate
    assert json.loads(json.dumps(table.page(found), allow_nan=False))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--set", "mesh.tensor=3"], "mesh.tensor=3 does not divide the"),
        (["--set", "mesh.fsdp=8"], "takes 8 devices; set them so that their product"),
        (["--set", "seeds=2"], "seeds=2 are as many runs on one device; set seeds=1"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_sentence(args, says, tmp_path):
    words = [*SMALL, "--topology", "v5e:2x2", "--cheap", "--out", tmp_path / "plan"]
    assert says in refusal(plan.main, *words, *args)
    assert not (tmp_path / "plan").exists()


@pytest.mark.long
def test_estimates_are_near_what_the_compiler_said_of_the_table():
    ratios = []
    for page in json.loads(plans.RESULTS.read_text()):
        if page["model"] == "Qwen3-0.6B":
            model, place, quick = page["model"], page["topology"], page["quick"]
            again = plans.planned(model, place, compiles=False, quick=quick)
            assert json.loads(json.dumps(again["layouts"])) == page["layouts"]
        for one in page["compiled"]:
            of = [each for each in page["layouts"] if each["mesh"] == one["mesh"]]
            for program in one["programs"]:
                if program["total"] and of:
                    said = program["compiled"]["temporaries"]
                    work = of[0]["work"][program["role"]]["memory"]
                    ratios.append(sum(work.values()) / said)
    assert len(ratios) == 32
    assert all(1 / 1.2 < ratio < 1.2 for ratio in ratios), ratios


@pytest.mark.long
def test_of_a_checkpoint_config_json_is_read_alone(tmp_path):
    folder = tmp_path / "model"
    args = ["--config", "configs/gsm8k_qwen3_0p6b.py", "--topology", "v5e:2x2"]
    args += ["--cheap", "--out", str(tmp_path / "plan")]
    args += ["--set", f"model.path={folder}", "mesh.fsdp=4"]
    said = refusal(plan.main, *args)
    assert f"{folder}/config.json is not there; set model.path" in said
    folder.mkdir()
    sizes = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    assert plan.main(args) == 0
    page = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert page["sizes"]["layers"] == 2
    matrices = 2 * (16 * 8 * (2 + 1 + 1 + 2) + 3 * 16 * 32)
    assert page["sizes"]["products"] == matrices
