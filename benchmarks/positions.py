"""python -m benchmarks.positions: key positions that decoding reads, and their tokens.

Slots are simulated that draw completions in turn, of equal or exponentially distributed
lengths. Printed is the share of their own positions that is read and holds no token: of
rings that grow in stages, of blocks of a slot that hold tokens, as a CPU and the kernel
of TPUs read them, and of pages. With --pages the sampler draws by a policy that reads
nothing, in memory for so many rings, with rings and with pages, and what it would move
with Qwen3-0.6B is printed. With --topology a draw of that, or of --model, is compiled,
and what a turn moves printed beside what it must. Needs libtpu.
"""

import argparse
import math
import sys
from typing import NamedTuple

import numpy as np

from curax.arrays import cache_sizes
from curax.models import softmax
from curax.settings.tables import markdown

GIB = 2**30
CONTEXTS, GROUP, PROMPT, SLOTS = 32, 8, 512, 64  # of `--topology`
WEIGHTS = 2 * 596_049_920  # bytes of those of Qwen3-0.6B, in bfloat16
TOKEN = 28 * 2 * 8 * 128 * 2  # bytes of keys and values of a token of Qwen3-0.6B
DRAWS = ((512, 2048), (2048, 8192))  # mean and longest completions


class Simulated(NamedTuple):
    """What a draw reads, all layers alike: positions in turns of all slots."""

    turns: int
    held: int  # of tokens
    read: dict[str, int]  # by way of reading


def simulated(
    rows: int, slots: int, mean: int, most: int, context: int, *, unequal: bool
) -> Simulated:
    """Positions that are read of rings that hold so many completions in turn."""
    random = np.random.default_rng(0)
    drawn = np.ceil(random.exponential(mean, rows)) if unequal else np.full(rows, mean)
    queue = list(np.clip(drawn, 1, most).astype(int))
    blocks = {"blocks": softmax.BLOCK, "kernel": softmax.BLOCK // 2}
    length, count = np.array(queue[:slots]), np.zeros(slots, int)
    del queue[:slots]
    stages = list(cache_sizes.widths(context, most))
    time, held, read = 0, 0, dict.fromkeys(("rings", *blocks, "pages"), 0)
    while (works := count < length).any():
        if len(stages) > 1 and (count[works] >= stages[0]).any():
            del stages[0]
        count[works] += 1
        held += count[works].sum()
        read["rings"] += slots * stages[0]
        for way, block in blocks.items():
            age = (time - np.arange(-(-most // block) * block)) % most
            seen = (
                (age < count[:, None]) & works[:, None] & (np.arange(len(age)) < most)
            )
            read[way] += seen.reshape(slots, -1, block).any(2).sum() * block
        read["pages"] += (-(-count[works] // softmax.BLOCK) * softmax.BLOCK).sum()
        for slot in np.nonzero(count == length)[0]:
            if queue:
                length[slot], count[slot] = queue.pop(0), 0
        time += 1
    return Simulated(time, held, read)


class Drawn(NamedTuple):
    """What one draw took, of a shard."""

    slots: int
    turns: int
    rows: float  # at a time, on average
    again: float  # tokens read for rows that began anew, per token of all
    read: float  # bytes: weights, keys and values of blocks that hold tokens, prefixes


def drawn(mean: float, most: int, groups: int, page: int) -> Drawn:
    """A draw of exponential lengths in the memory of `SLOTS` rings.

    Args:
        mean: of the lengths; infinity: all have the longest.
        most: longest.
        groups: rows of a prompt.
        page: columns; 0: slots have rings.
    """
    import jax
    import jax.numpy as jnp

    from curax import allocate, rollout
    from curax.types import Contexts, Model, SharedCache

    turns, piece = [], softmax.BLOCK // 2

    def features(params, tokens, positions, seen, cache=None, column=None):
        del params, positions, column
        wide = jnp.ones((*tokens.shape, 1))
        if not isinstance(cache, SharedCache):
            return wide, ((jnp.ones((len(tokens), 1, PROMPT, 1)),) * 2,)
        blocks = jnp.sum(softmax.blocks_seen(seen[:, PROMPT:], piece)[1])
        held = jnp.zeros(CONTEXTS, bool).at[cache.context].set(True, mode="drop")
        active = jnp.sum(cache.context < CONTEXTS)
        row = len(tokens), active, blocks * piece, jnp.sum(held)
        jax.debug.callback(lambda *row: turns.append(row), *row)
        return wide, cache

    chance = 1 / mean
    policy = Model(
        init=lambda key: {},
        features=features,
        head=lambda params: jnp.log(jnp.array([[chance + 1e-30], [1 - chance]])),
        axes={},
        shared=lambda cache: cache,
        ragged=cache_sizes.widened,
        paged=lambda columns: page,
    )
    contexts = Contexts(
        tokens=jnp.zeros((CONTEXTS, PROMPT), jnp.int32),
        mask=jnp.ones((CONTEXTS, PROMPT), bool),
    )
    how = rollout.Settings(
        max_tokens=most,
        end=(0,),
        pad=1,
        cache_bytes=8.0 * (SLOTS * most + CONTEXTS * PROMPT),
    )
    asked = allocate.rows_to_draw(jnp.full(CONTEXTS, groups), rows=CONTEXTS * groups)
    draw = jax.jit(lambda key: rollout.sample(policy, {}, contexts, asked, key, how))
    rows = jax.device_get(draw(jax.random.key(0)))
    jax.effects_barrier()
    slots, active, own, held = np.array(turns, float).T
    needed = rows.mask.sum() - rows.exists.sum()  # the last of a row is read by none
    read = len(turns) * WEIGHTS + TOKEN * (own.sum() + PROMPT * held.sum())
    again = active.sum() / needed - 1
    return Drawn(int(slots[0]), len(turns), active.mean(), again, read)


def print_pages() -> int:
    """Draws in the memory of `SLOTS` rings, with these and with pages."""
    head = ["rows, mean of", "way", "slots", "turns", "rows at a time"]
    head += ["drawn twice", "TiB moved"]
    rows = []
    for groups in (8, 64):
        for mean, most in (*DRAWS, (1024, 2048), (math.inf, 2048)):
            for way, page in (("rings", 0), ("pages", softmax.BLOCK)):
                found = drawn(mean, most, groups, page)
                lengths = "all" if mean == math.inf else f"{mean} of"
                kind = f"{CONTEXTS * groups}, {lengths} {most}"
                cells = f"{found.rows:.0f}", f"{found.again:.3f}"
                cells += (f"{found.read / 2**40:.1f}",)
                rows.append([kind, way, str(found.slots), str(found.turns), *cells])
                print(*rows[-1], file=sys.stderr)
    print(markdown(head, rows))
    return 0


class Compiled(NamedTuple):
    """A draw of a model, compiled for a chip."""

    besides: float  # bytes that a turn moves beside keys and values; NaN: refused
    weights: float  # bytes of all
    token: float  # of keys and values
    lies: float  # of a token as it lies in the cache, whose rows may be filled up
    took: float  # seconds to compile


def compiled(model: str, name: str, most: int) -> Compiled:
    """What a turn of a draw moves."""
    import jax

    from benchmarks import plans
    from curax.planning import chips, programs
    from curax.step import mesh, room, states

    sizes = {"prompts": CONTEXTS, "group_size": GROUP, "max_tokens": most}
    sizes["slots"] = SLOTS
    own = (f"sampling.{key}={value}" for key, value in sizes.items())
    run = plans.traced(model, (*plans.SETTINGS, *own))
    on = mesh.make(run.parts.config.mesh, chips.devices(chips.topology(name)))
    assert on is not None
    where = states.sharding_of(run.parts, on, run.state)
    done, _ = programs.planned(run.parts, on, where, run.calls[0], quick=False)
    weights = 2 * sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    token = 2 * run.sizes.layers * run.sizes.keys * run.sizes.item
    whole = room.cache_size(run.parts, on).bytes  # counted, whatever is skipped
    moved = math.nan if done.refusal else done.turn.read - whole + done.turn.written
    lies = whole / (SLOTS * most + CONTEXTS * PROMPT)
    return Compiled(moved, weights, token, lies, done.compile_s)


def main() -> int:
    """Print the tables of docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topology", help="compile for this chip, as v6e:1x1")
    parser.add_argument(
        "--model",
        default="Qwen3-0.6B",
        help="what is compiled: of benchmarks.plans, or a folder with config.json",
    )
    parser.add_argument("--pages", action="store_true", help="draw with pages")
    chosen = parser.parse_args()
    if chosen.pages:
        return print_pages()
    if chosen.topology:
        return print_moved(chosen.model, chosen.topology)
    ways = "rings", "blocks", "kernel", "pages"
    draws = (
        (64, 64, 1024, 1024, False),
        (512, 64, 1024, 1024, False),
        (512, 64, 128, 1024, True),
        (512, 512, 128, 1024, True),
        (512, 64, 512, 4096, True),
    )
    rows = []
    for number, slots, mean, most, unequal in draws:
        found = simulated(number, slots, mean, most, PROMPT, unequal=unequal)
        kind = f"{number}, mean {mean} of {most}" if unequal else f"{number} of {most}"
        shares = (1 - found.held / found.read[way] for way in ways)
        rows.append([kind, str(slots), *(f"{share:.2f}" for share in shares)])
    print(markdown(["completions", "slots", *ways], rows))
    return 0


def print_moved(model: str, name: str) -> int:
    """What a turn moves, beside what it must, of draws whose lengths are exponential.

    It must read weights, keys and values of all tokens, and prefixes of the contexts
    that 64 slots have at a time.
    """
    head = ["mean of", "must, GiB", "moved, GiB", "times", "by rings", "compiled in, s"]
    rows = []
    for mean, most in DRAWS:
        done = compiled(model, name, most)
        found = simulated(CONTEXTS * GROUP, SLOTS, mean, most, PROMPT, unequal=True)
        prefixes = SLOTS / GROUP * PROMPT
        needed = done.weights + done.token * (prefixes + found.held / found.turns)
        ours, rings = (
            done.besides + done.lies * (prefixes + found.read[way] / found.turns)
            for way in ("kernel", "rings")
        )
        cells = needed / GIB, ours / GIB, ours / needed, rings / needed
        rows.append(
            [f"{mean} of {most}", *(f"{x:.2f}" for x in cells), f"{done.took:.0f}"]
        )
    print(markdown(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
