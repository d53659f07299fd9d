"""Roofline estimate of a run from shapes: memory, operations and bytes of a chip.

Nothing is compiled. Bytes of the state are exact; those of a program are sums of the
arrays it cannot do without, and of what compilers were found to keep in an update:
those of TPUs took .91 to 1.19 times as much, and 1.51 where a v5p torus gathers by sums
(docs/plan.md). Times are those of a roofline: the longest of arithmetic, memory and
links, each at its peak.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh

from curax import rollout
from curax.arrays import cache_sizes, frozen, lines, masked
from curax.arrays.sharding import bytes_on_device
from curax.models.transformer import recomputed
from curax.planning.chips import Chip
from curax.settings.sizes import cache_bytes, declared_option, kept_of
from curax.step import room
from curax.step.types import Components
from curax.types import Contexts, Rollouts, TrainState

FLOAT32 = 4
# What TPU compilers were found to hold: without recomputation a layer keeps so many
# times the bytes of its products, with norms, rotations and gates; and sums of
# gradients of contexts take so many times their own bytes.
KEPT_OF_PRODUCTS = 3.25
HELD_OF_SUMS = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Operations and bytes of one chip in a program, with the roofline time they take.

    Attributes:
        flops: of matrix products.
        read: bytes read from memory at least: weights and, in decoding, keys and
            values.
        received: bytes over the links, those of the layout alone.
        turns: of the loop that ends by data, at most: decoding steps, or the
            micro-batches of all mini-batches with rows as long as they may be.
        memory: bytes by part; parts exist at the same time.
        turn_read: bytes that a decoding step has to read where all rings are full: the
            weights, keys and values, and the prefixes in use, once.
    """

    flops: float
    read: float
    received: float
    turns: int
    memory: dict[str, float]
    turn_read: float = 0.0

    def seconds(self, chip: Chip, received: float | None = None) -> dict[str, float]:
        """Seconds by resource; `received`, if given, replaces the estimated bytes."""
        moved = self.received if received is None else received
        return {
            "arithmetic": self.flops / chip.flops_per_s,
            "memory": self.read / chip.bytes_per_s,
            "links": moved / chip.link_bytes_per_s,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of a policy and of a step."""

    layers: int
    width: int  # D
    vocab: int  # V
    query: int  # entries of the queries of a token, all heads
    keys: int  # entries of the keys of a token, all heads of a layer
    kv_heads: int
    products: int  # entries of all matrices of layers, that each token is multiplied by
    learned: int  # of these, entries that are trained
    inner: int  # entries that a layer makes of a token
    item: int  # bytes of an entry in computing
    contexts: int  # C
    prompt: int  # P
    rows: int  # N
    slots: int  # K, at most
    bound: float  # bytes of a device that the cache may take; 0: any
    trained: int  # M
    steps: int  # T
    kept: int  # bytes of the kept set of a token; 0: it is not noted


def shapes(parts: Components, state: TrainState, contexts: Contexts) -> Shapes:
    """Sizes of a run, read from the shapes of its arrays.

    Args:
        parts: components of the run.
        state: shapes of its state.
        contexts: shapes of the contexts of a step.
    """
    model, params = parts.model, frozen.join(state.params, state.frozen)
    head = jax.eval_shape(model.head, params)
    prefix = jax.eval_shape(lambda p, c: rollout.prefill(model, p, c), params, contexts)
    caches = prefix.cache or ()
    kv = caches[0][0].shape if caches else (0, 0, 0, 0)
    layers, products, inner, query = max(len(caches), 1), 0, 0, 0
    leaves: dict[Any, Any] = dict(flatten_dict(params))
    trained, learned = set(flatten_dict(state.params)), 0
    for path, leaf in leaves.items():
        if path[0] != "layers":
            continue
        stacked = not path[1].isdigit()  # over the layers, on the first axis
        own = leaf.shape[1:] if stacked else leaf.shape
        if len(own) > 1:  # a matrix, not a norm or a bias
            products += math.prod(leaf.shape)
            learned += math.prod(leaf.shape) if path in trained else 0
            inner += own[-1] * (layers if stacked else 1)
            query = own[-1] if "q" in path else query
    sizes = parts.config.sampling
    return Shapes(
        layers=layers,
        width=head.shape[1],
        vocab=head.shape[0],
        query=query or kv[1] * kv[3],
        keys=kv[1] * kv[3],
        kv_heads=kv[1],
        products=products,
        learned=learned,
        inner=inner // layers,
        item=jnp.dtype(head.dtype).itemsize,
        contexts=contexts.tokens.shape[0],
        prompt=contexts.tokens.shape[1],
        rows=parts.rows,
        slots=room.wanted_slots(parts),
        bound=cache_bytes(parts.config),
        trained=parts.train_rows,
        steps=sizes.max_tokens,
        kept=bytes_of(room.kept_to_train(parts)),
    )


def drawn(parts: Components, sizes: Shapes) -> Shapes:
    """The sizes of a run with the contexts that its draws read."""
    contexts, prompt = room.drawn_contexts(parts, sizes.contexts, sizes.prompt)
    return dataclasses.replace(sizes, contexts=contexts, prompt=prompt)


def bytes_of(kept: Any) -> int:
    """Bytes of the kept set of a token, of an array `[..., S]` of them; 0 of None."""
    return 0 if kept is None else kept.shape[-1] * kept.dtype.itemsize


def of_draw(
    parts: Components, sizes: Shapes, contexts: Contexts, rollouts: Rollouts
) -> Shapes:
    """The sizes of a run with those of one draw, of these contexts and completions."""
    rows, steps = rollouts.tokens.shape
    return dataclasses.replace(
        sizes,
        contexts=contexts.tokens.shape[0],
        prompt=contexts.tokens.shape[1],
        rows=rows,
        slots=min(parts.config.sampling.slots or rows, rows),
        steps=steps,
        kept=bytes_of(rollouts.support),
    )


def state_bytes(state: TrainState, where: TrainState | None = None) -> dict[str, float]:
    """Bytes of the train state on one chip, by part; exact.

    Args:
        state: arrays or their shapes.
        where: their shardings; None: each has its own.
    """

    def part(name: str) -> int:
        value = getattr(state, name)
        return (
            0 if value is None else bytes_on_device(value, getattr(where, name, None))
        )

    whole = {
        "parameters": part("params") + part("frozen"),
        "optimizer": part("opt_state"),
        "reference": part("reference"),
        "memory of prompts": part("memory"),
        "states of methods": part("methods"),
        "what draws ahead": part("behaviour"),
    }
    return {name: size for name, size in whole.items() if size}


def drawing_bytes(state: TrainState, where: TrainState) -> dict[str, float]:
    """Bytes of a chip that draws ahead and does not train, by part.

    It has what it draws by, and while it draws that of the step before.

    Args:
        state: shapes.
        where: their shardings on the mesh that draws.
    """
    own = bytes_on_device(state.behaviour, where.behaviour)
    whole: dict[str, float] = {"what draws ahead": own, "what drew before": own}
    if state.frozen is not None:
        whole["frozen"] = bytes_on_device(state.frozen, where.frozen)
    return whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Number of shards into which a mesh cuts each kind of array."""

    rows: int
    fsdp: int
    data: int
    tensor: int
    heads: int  # of keys: 1 where they do not divide

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, sizes: Shapes) -> "Cut":
        """Numbers of shards on a mesh."""
        data, fsdp, tensor = (mesh.shape[axis] for axis in ("data", "fsdp", "tensor"))
        heads = tensor if sizes.kv_heads and sizes.kv_heads % tensor == 0 else 1
        return cls(rows=data * fsdp, fsdp=fsdp, data=data, tensor=tensor, heads=heads)

    def share(self, rows: int) -> int:
        """Rows per chip out of `rows`; the last ones may be padding."""
        return -(-rows // self.rows)


def attention_flops(sizes: Shapes, queries: float, keys: float) -> float:
    """FLOPs of attention for one sequence in all layers: scores and weighted values."""
    return 4.0 * sizes.layers * sizes.query * queries * keys


def draw(sizes: Shapes, cut: Cut, *, cut_sampler: bool) -> Work:
    """Work of a chip in sampling completions that all have T tokens.

    Each decoding step reads the weights, the ring of every slot, which has grown to its
    width when the first rows end, and the prefixes of as many groups as slots hold. All
    rows of a slot follow one another, so the loop makes at least ceil(N / K) T steps.
    """
    tensor = cut.tensor
    token = 2 * sizes.layers * sizes.keys * sizes.item / cut.heads  # keys and values
    where = cache_sizes.Places(
        contexts=sizes.contexts, prompt=sizes.prompt, steps=sizes.steps, shards=cut.rows
    )
    whole = where.slots(sizes.slots, bound=sizes.bound, token=token)
    slots = cut.share(whole)
    turns = -(-sizes.rows // whole) * sizes.steps
    head = sizes.vocab * sizes.width
    matrices = (sizes.products + head) * sizes.item / tensor
    length = sizes.prompt + sizes.steps
    rings, prefixes = where.tokens(whole)
    groups = -(-slots * sizes.contexts // sizes.rows)  # at a time, on a device
    read = token * (rings + min(groups * sizes.prompt, prefixes))
    stages = itertools.pairwise((0, *cache_sizes.widths(sizes.prompt, sizes.steps)))
    unread = slots * sum((b - a) * (sizes.steps - b) for a, b in stages)  # by the first
    each = 2.0 * (sizes.products + head) + attention_flops(sizes, 1, length)
    prompts = cut.share(sizes.contexts) * sizes.prompt
    first = prompts * (
        2.0 * sizes.products + attention_flops(sizes, 1, sizes.prompt / 2)
    )
    reduced = 2 * (tensor - 1) / tensor * sizes.width * sizes.item * 2 * sizes.layers
    gathered = matrices * (cut.fsdp - 1) / cut.fsdp
    kept = 1 / cut.fsdp if cut_sampler else 1.0
    return Work(
        flops=(turns * slots * each - unread * attention_flops(sizes, 1, 1) + first)
        / tensor,
        read=turns * (matrices + read) - unread * token,
        received=turns * slots * reduced
        + prompts * reduced
        + gathered * (turns if cut_sampler else 2),
        turns=turns,
        turn_read=matrices + read,
        memory={
            "weights of the sampler": (sizes.products * kept + head)
            * sizes.item
            / tensor,
            "cache": rings * token,
            "prefix": prefixes * token,
            "logits": 2.0 * slots * sizes.vocab * FLOAT32 / tensor,
            "completions": 6.0 * cut.share(sizes.rows) * sizes.steps * FLOAT32,
            **kept_sets(sizes, cut.share(sizes.rows)),
        },
    )


def kept_sets(sizes: Shapes, rows: int) -> dict[str, float]:
    """Bytes of the kept sets of some rows; none where they are not noted."""
    return {"kept sets": float(rows * sizes.steps * sizes.kept)} if sizes.kept else {}


def learn(
    parts: Components,
    sizes: Shapes,
    cut: Cut,
    state: dict[str, float],
    *,
    in_pieces: bool = False,
) -> Work:
    """Work of a chip in an update whose rows all have T tokens.

    With `in_pieces` logits are those of a piece of the vocabulary, as on TPUs.

    Forward 2, backward 4 operations per entry and token, 2 of an entry that is not
    trained, and 2 more where `model.remat` recomputes everything, those of attention
    with dots too; the contexts besides, without a head, twice forward.
    """
    how, tensor = parts.config.update, cut.tensor
    passes = how.epochs
    again = recomputed(declared_option(parts.config.model, "recomputes", False))
    remat = again == "everything"
    head, factor = sizes.vocab * sizes.width, 8.0 if remat else 6.0
    full = parts.model.trained is None  # all is trained, the head too
    learned = sizes.learned + (head if full else 0)
    rows = cut.share(sizes.trained)
    tokens, prompts = rows * sizes.steps, cut.share(sizes.contexts) * sizes.prompt
    keys = sizes.prompt + sizes.steps / 2
    flops = factor * tokens * (sizes.products + head)
    flops -= 2.0 * tokens * (sizes.products + head - learned)
    attention = rows * attention_flops(sizes, sizes.steps, keys)
    flops += (3.0 if again == "none" else 4.0) * attention
    flops += (factor + 2) * prompts * sizes.products
    flops -= 2.0 * prompts * (sizes.products - sizes.learned)
    micro = how.micro_batches
    if how.tokens_per_micro_batch:  # of each shard of the rows
        micro = math.ceil(tokens / how.minibatches / how.tokens_per_micro_batch)
    parts_of = how.minibatches * micro
    at_once = max(1, -(-rows // parts_of)) * sizes.steps
    matrices = (sizes.products + head) * sizes.item / tensor
    gathers, times = 3 if remat else 2, parts_of + how.minibatches
    apart = (cut.fsdp - 1) / cut.fsdp
    received = times * gathers * matrices * apart  # weights, for each micro-batch
    received += times * apart * learned * FLOAT32 / tensor
    shard = state["parameters"]  # of a chip, those that are trained
    if not full:
        shard = learned * FLOAT32 / tensor / cut.fsdp
    received += times * 2 * (cut.data - 1) / cut.data * shard
    sums = 2 * (tensor - 1) / tensor * sizes.width * sizes.item
    received += (tokens + prompts) * sums * sizes.layers * (6 if remat else 4)
    token = 2 * sizes.layers * sizes.keys / cut.heads
    # On TPUs lines have two rows at least, as `Model.packs` has it.
    packs = how.tokens_per_micro_batch and not (
        in_pieces and 2 * sizes.prompt > sizes.steps
    )
    kept = kept_of(parts.config) if packs and not sizes.kept else 0
    of_update = sizes.trained // how.minibatches
    at_home = lines.places(of_update, sizes.contexts, cut.rows, kept)
    if not at_home:
        # Each micro-batch gathers all contexts of a copy, and sums their gradients.
        whole = prompts * cut.fsdp * token * sizes.item
        received += parts_of * (gathers + 1) * whole * apart
    inner = (sizes.inner / tensor + 2 * sizes.width) * sizes.item
    each = {  # bytes that a layer keeps of a token, by what is recomputed
        "everything": sizes.width * sizes.item,
        "dots": inner,
        "none": KEPT_OF_PRODUCTS * inner,
    }
    # Of rows, and of as many tokens of contexts.
    held = sizes.layers * (at_once + min(at_once, prompts)) * each[again]
    of_logits = min(at_once, how.token_chunk or at_once)
    logits = of_logits * sizes.vocab * FLOAT32 / tensor
    if in_pieces:
        logits = min(at_once * sizes.vocab * FLOAT32 / tensor, masked.PIECE)
    # A copy of the parameters adds up gradients of the contexts of all copies, unless
    # these lie with their rows; where rows lie on several shards of it, each
    # micro-batch gives them anew.
    sums_held = HELD_OF_SUMS * ((1 if at_home else cut.data) + (cut.fsdp > 1))
    trained = shard if full else 0.0
    cast = sizes.item if trained and sizes.item < FLOAT32 else 0
    # The head is whole along `fsdp`, and so is its gradient, in pieces and added up.
    of_head = 2 * FLOAT32 if trained else sizes.item * (cut.fsdp > 1)
    return Work(
        flops=passes * flops / tensor,
        read=passes * times * gathers * matrices
        + 5 * shard
        + passes * 10.0 * (tokens + prompts) * sizes.layers * inner,
        received=passes * received,
        turns=passes * how.minibatches * micro,
        memory={
            "gradients": 2.0 * trained,
            "weights as they are read": sizes.products * cast / tensor / cut.fsdp,
            "head": head * of_head / tensor,
            "activations": held + 3.0 * at_once * inner,
            "prefix": prompts * token * (sizes.item + sums_held * FLOAT32),
            "logits": 2.0 * logits,
            "completions": 8.0 * rows * sizes.steps * FLOAT32,
            # Of all that were drawn, and of those that train once more.
            **kept_sets(sizes, cut.share(sizes.rows) + rows),
        },
    )
