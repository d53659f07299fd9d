"""Roofline estimate of a run from shapes: memory, operations and bytes of a chip.

Nothing is compiled. Bytes of the state are exact; those of a program are sums of the
arrays it cannot do without, and of what compilers were found to keep: docs/plan.md says
how near they are to what is compiled. Times are those of a roofline: the longest of
arithmetic, memory and links, each at its peak.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.spmd import logical_axis_rules
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, use_abstract_mesh

from curax import rollout
from curax.arrays import cache_sizes, frozen, lines, masked, sharding
from curax.arrays.sharding import bytes_on_device
from curax.models.transformer import recomputed
from curax.planning.chips import Chip
from curax.settings.groups import AXES
from curax.settings.sizes import cache_bytes, declared_option, kept_of
from curax.step import mesh as meshes
from curax.step import room
from curax.step.types import Components
from curax.types import Contexts, Rollouts, TrainState

FLOAT32 = 4
# What TPU compilers were found to hold: without recomputation a layer keeps so many
# times the bytes of its products, with norms, rotations and gates.
KEPT_OF_PRODUCTS = 4.5


@dataclasses.dataclass(frozen=True)
class Need:
    """What a chip cannot do without, in a call or in a turn of its loop.

    Attributes:
        flops: of matrix products, 2 for each pair of entries.
        attention: of these, those of scores and weighted values, over valid keys.
        read: bytes read from memory, if each product reads its operands once and the
            rest is fused with products; weights, keys, values and the state once.
        written: bytes written so.
        received: bytes over the links, by the layout.
    """

    flops: float = 0.0
    attention: float = 0.0
    read: float = 0.0
    written: float = 0.0
    received: float = 0.0

    def plus(self, other: "Need", times: float = 1.0) -> "Need":
        """The sum of this and so many times another."""
        pairs = zip(*map(dataclasses.astuple, (self, other)), strict=True)
        return Need(*(own + times * more for own, more in pairs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Operations and bytes of one chip in a program, with the roofline time they take.

    Attributes:
        call: what it needs outside its loop that ends by data.
        turn: in a turn: a decoding step where all rings are full, or a micro-batch.
        turns: of the loop that ends by data, at most: decoding steps, or the
            micro-batches of all mini-batches with rows as long as they may be.
        spared: by turns in which rings are not yet full, or that have fewer rows.
        memory: bytes by part; parts exist at the same time.
        least: bytes of temporaries that an update needs: gradients, weights of a layer
            and of the head that are cast or gathered, what is kept between layers by
            `model.remat`, a chunk of logits, keys and values of contexts and gradients
            of these.
    """

    call: Need
    turn: Need
    turns: int
    spared: Need = Need()
    memory: dict[str, float]
    least: float = 0.0

    @property
    def total(self) -> Need:
        """What it needs in all."""
        return self.call.plus(self.turn, self.turns).plus(self.spared, -1.0)

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Seconds by resource."""
        need = self.total
        return {
            "arithmetic": need.flops / chip.flops_per_s,
            "memory": (need.read + need.written) / chip.bytes_per_s,
            "links": need.received / chip.link_bytes_per_s,
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
    # Entries of a token that products of all layers, attention among them, read and
    # make: of which all devices of a tensor axis have the whole, and each a part.
    ins: tuple[int, int]
    outs: tuple[int, int]
    last: int  # entries of the last matrix of all layers, whose product is not redone
    item: int  # bytes of an entry in computing
    contexts: int  # C
    prompt: int  # P
    rows: int  # N
    slots: int  # K, at most
    bound: float  # bytes of a device that the cache may take; 0: any
    trained: int  # M
    steps: int  # T
    kept: int  # bytes of the kept set of a token; 0: it is not noted

    def streams(self, tensor: int) -> tuple[float, ...]:
        """Bytes of a token that products read and write on a chip, forward."""
        both = self.ins, self.outs
        return tuple((whole + part / tensor) * self.item for whole, part in both)


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
    layers, products, inner, query, last = max(len(caches), 1), 0, 0, 0, 0
    sides = np.zeros((2, 2), int)  # (in, out), (whole, part)
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
            times = layers if stacked else 1
            inner += own[-1] * times
            query = own[-1] if "q" in path else query
            last += math.prod(leaf.shape) if "down" in path else 0
            ends = np.diag([own[0], own[-1]]) * times  # the whole in, a part out
            summed = "o" in path or "down" in path  # of a part in, the whole out
            sides += ends[:, ::-1] if summed else ends
    keys = kv[1] * kv[3]
    query = query or keys
    sides[:, 1] += layers * np.array([query + 2 * keys, query])
    sizes = parts.config.sampling
    return Shapes(
        layers=layers,
        width=head.shape[1],
        vocab=head.shape[0],
        query=query,
        keys=keys,
        kv_heads=kv[1],
        products=products,
        learned=learned,
        inner=inner // layers,
        ins=tuple(sides[0].tolist()),
        outs=tuple(sides[1].tolist()),
        last=last,
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
    attention = attention_flops(sizes, 1, length)
    prompts = cut.share(sizes.contexts) * sizes.prompt
    first = prompts * attention_flops(sizes, 1, sizes.prompt / 2)
    # Two sums of a token in each layer, and its embedding.
    summed = sizes.width * sizes.item * (2 * sizes.layers + 1)
    reduced = 2 * (tensor - 1) / tensor * summed
    gathered = matrices * (cut.fsdp - 1) / cut.fsdp
    kept = 1 / cut.fsdp if cut_sampler else 1.0
    ins, outs = sizes.streams(tensor)
    return Work(
        turn=Need(
            flops=slots * (2.0 * (sizes.products + head) + attention) / tensor,
            attention=slots * attention / tensor,
            read=matrices + read,
            written=slots * token,
            received=slots * reduced + gathered * cut_sampler,
        ),
        call=Need(
            flops=(prompts * 2.0 * sizes.products + first) / tensor,
            attention=first / tensor,
            read=sizes.products * sizes.item / tensor + prompts * ins,
            written=prompts * outs,
            received=prompts * reduced + gathered * (not cut_sampler),
        ),
        turns=turns,
        spared=Need(
            flops=unread * attention_flops(sizes, 1, 1) / tensor,
            read=unread * token,
        ),
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How a chip computes the rows of a mini-batch that all have T tokens.

    Attributes:
        count: micro-batches of it.
        tokens: of the rows of one.
        computed: of one, with those that fill up its lines.
        pieces: in which contexts are run backward.
        packed: whether rows are packed into lines.
        copied: tokens of contexts that its lines have copies of.
    """

    count: int
    tokens: int
    computed: int
    pieces: int
    packed: bool
    copied: int = 0

    @classmethod
    def of(
        cls, parts: Components, sizes: Shapes, cut: Cut, *, of_tpu: bool
    ) -> "MicroBatches":
        """Those of an update, as `curax.update.gradient` makes them."""
        how, steps = parts.config.update, sizes.steps
        given = how.tokens_per_micro_batch  # of each shard of the rows
        rows = sizes.trained // how.minibatches
        of_copy, contexts = (-(-n // cut.data) for n in (rows, sizes.contexts))
        fewest = how.micro_batches
        if given:
            fewest = -(-of_copy * steps // (given * cut.fsdp))
        count = sharding.parts(of_copy, fewest, cut.fsdp)
        apart = -(-contexts * sizes.prompt // (of_copy * steps // count))
        pieces = sharding.parts(contexts, apart, cut.fsdp)
        if packing := cls.lines(parts, sizes, of_tpu=of_tpu):
            own = cut.share(rows)
            together = min(packing.together, own)
            each = together * packing.longest(steps)
            return cls(
                count=-(-own // each),
                tokens=min(each, own) * steps,
                computed=together * math.prod(packing.width(steps)),
                pieces=pieces,
                packed=True,
                copied=together * packing.rows * sizes.prompt * (cut.fsdp == 1),
            )
        tokens = -(-of_copy // (count * cut.fsdp)) * steps
        return cls(
            count=count, tokens=tokens, computed=tokens, pieces=pieces, packed=False
        )

    @staticmethod
    def lines(parts: Components, sizes: Shapes, *, of_tpu: bool) -> lines.Lines | None:
        """How rows are packed, on a TPU or here; None: they are not."""
        tokens, packs = parts.config.update.tokens_per_micro_batch, parts.model.packs
        if not tokens or not packs:
            return None
        if not of_tpu:
            return packs(tokens, sizes.steps, sizes.prompt)
        device = AbstractDevice(device_kind="TPU", num_cores=1, platform="tpu")
        alone = AbstractMesh((1,) * len(AXES), AXES, abstract_device=device)
        with use_abstract_mesh(alone), logical_axis_rules(meshes.RULES):
            return packs(tokens, sizes.steps, sizes.prompt)


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
    trained, and 2 more where `model.remat` recomputes everything, but for the last
    product of a layer, those of attention with dots too, and always of the head; the
    contexts besides, without a head. Weights are gathered for both passes, the head
    once.
    """
    how, tensor = parts.config.update, cut.tensor
    again = recomputed(declared_option(parts.config.model, "recomputes", False))
    remat = again == "everything"
    head = sizes.vocab * sizes.width
    full = parts.model.trained is None  # all is trained, the head too
    rows, item = cut.share(sizes.trained), sizes.item
    tokens, prompts = rows * sizes.steps, cut.share(sizes.contexts) * sizes.prompt
    micro = MicroBatches.of(parts, sizes, cut, of_tpu=in_pieces)
    parts_of, at_once = how.minibatches * micro.count, micro.computed
    shard = state["parameters"]  # of a chip, those that are trained
    if not full:
        shard = sizes.learned * FLOAT32 / tensor / cut.fsdp
    ins, outs = sizes.streams(tensor)

    def passes(tokens: float, keys: float, times: float, head: int) -> Need:
        """Need of some tokens, that see so many keys each, forward and backward."""
        own = head if full else 0  # entries of the head that are trained
        flops = 4.0 * (sizes.products + head) + 2.0 * (sizes.learned + own + head)
        flops += 2.0 * remat * (sizes.products - sizes.last)
        attention = attention_flops(sizes, tokens, keys) / tensor
        attention *= 3.0 if again == "none" else 4.0
        ins_again = ins - sizes.last / sizes.width * item / tensor
        outs_again = outs - sizes.layers * sizes.width * item
        added = times * (sizes.learned + own) * FLOAT32 / tensor / cut.fsdp
        layers, top = (times * n * item / tensor for n in (sizes.products, head))
        slopes = times * (sizes.learned * item + own * FLOAT32) / tensor
        sums = sizes.layers * (5 if remat else 4) + (2 if head else 1)
        summed = tokens * sizes.width * item * sums
        return Need(
            flops=tokens * flops / tensor + attention,
            attention=attention,
            read=tokens * ((1 + full) * (ins + outs) + remat * ins_again)
            + (2 + remat) * layers
            + 2 * top
            + added,
            written=tokens * (ins + outs + remat * outs_again) + added,
            received=(2 * layers + top + slopes) * (cut.fsdp - 1) / cut.fsdp
            + 2 * (tensor - 1) / tensor * summed,
        )

    kept = kept_of(parts.config) if micro.packed and not sizes.kept else 0
    of_update = sizes.trained // how.minibatches
    at_home = lines.places(of_update, sizes.contexts, cut.rows, kept)
    pairs = prompts * 2 * sizes.layers * sizes.keys / cut.heads  # keys and values
    read, slopes = pairs * item, pairs * FLOAT32
    gathered = 0.0
    if not at_home:  # contexts of a copy, for both passes; and sums of their gradients
        gathered = 3 * read * (cut.fsdp - 1)

    def turn_of(n: float) -> Need:  # so many tokens
        share = n / tokens  # of contexts
        return passes(n, sizes.prompt + sizes.steps / 2, 1.0, head).plus(
            Need(
                read=(2 + remat) * read * share,
                written=slopes * share,
                received=gathered,
            )
        )

    turns = how.epochs * parts_of
    turn = turn_of(micro.tokens)
    less = turn.plus(turn_of(tokens / parts_of), -1.0)  # the last has fewer rows
    opt_state = state.get("optimizer", 0.0)
    narrow = item * (full and item < FLOAT32) / tensor  # as weights are read
    cast = sizes.products * narrow / cut.fsdp
    each_update = Need(
        read=2 * shard + opt_state,
        written=shard + opt_state + cast,
        received=2 * (cut.data - 1) / cut.data * shard,
    )
    call = passes(prompts, sizes.prompt / 2, micro.pieces, 0).plus(Need(read=slopes))
    call = call.plus(each_update, how.minibatches)
    inner = (sizes.inner / tensor + 2 * sizes.width) * sizes.item
    each = {  # bytes that a layer keeps of a token, by what is recomputed
        "everything": sizes.width * sizes.item,
        "dots": inner,
        "none": KEPT_OF_PRODUCTS * inner,
    }
    # Of a micro-batch, or of a piece of contexts after all of them.
    held = sizes.layers * at_once * each[again]
    of_logits = min(at_once, how.token_chunk or at_once)
    logits = of_logits * sizes.vocab * FLOAT32 / tensor
    if in_pieces:
        logits = min(at_once * sizes.vocab * FLOAT32 / tensor, masked.PIECE)
    # Gradients of a micro-batch stand beside the total, or are added to it in place.
    in_place = full and micro.packed and parts.model.adding
    beside = 0.0 if in_place else sizes.learned * FLOAT32 / tensor / cut.fsdp
    # Weights that are cast or gathered: of a layer, and the head, whole along `fsdp`.
    apart = bool(narrow) or cut.fsdp > 1
    weights = (sizes.products / sizes.layers + head) * apart * item / tensor
    # A copy of the parameters adds up gradients of the contexts of all copies, unless
    # these lie with their rows. A micro-batch has copies of its lines' own contexts and
    # their gradients, else adds in place too, or has gradients of all.
    of_lines = micro.copied * 4 * sizes.layers * sizes.keys * item / cut.heads
    sums = slopes * (1 if at_home else cut.data)
    sums += of_lines or (0.0 if in_place else read)
    return Work(
        call=Need().plus(call, how.epochs),
        turn=turn,
        turns=turns,
        spared=Need().plus(less, turns),
        least=shard + weights + held + logits + read + slopes,
        memory={
            "gradients": shard + beside + full * head * FLOAT32 / tensor,
            "weights as they are read": weights,
            "activations": held + 3.0 * at_once * inner,
            "prefix": read + sums,
            "logits": 2.0 * logits,
            "completions": 8.0 * rows * sizes.steps * FLOAT32,
            # Of all that were drawn, and of those that train once more.
            **kept_sets(sizes, cut.share(sizes.rows) + rows),
        },
    )
