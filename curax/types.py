"""Arrays that pass between stages. Shapes: see CONTRIBUTING, "Words"."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# Arrays of a signature by kind and last axes; `arrays/checks.py` reads what they state.
Float = Annotated[jax.Array, "[...] float"]
FloatB = Annotated[jax.Array, "[..., B] float"]
FloatBG = Annotated[jax.Array, "[..., B, G] float"]
FloatG = Annotated[jax.Array, "[..., G] float"]
FloatGY = Annotated[jax.Array, "[..., G, Y] float"]
FloatMT = Annotated[jax.Array, "[..., M, T] float"]
FloatT = Annotated[jax.Array, "[..., T] float"]
FloatTD = Annotated[jax.Array, "[..., T, D] float"]
FloatV = Annotated[jax.Array, "[..., V] float"]
FloatY = Annotated[jax.Array, "[..., Y] float"]
Int = Annotated[jax.Array, "[...] int"]
Int1 = Annotated[jax.Array, "[..., 1] int"]
IntB = Annotated[jax.Array, "[..., B] int"]
IntBG = Annotated[jax.Array, "[..., B, G] int"]
IntG = Annotated[jax.Array, "[..., G] int"]
IntGY = Annotated[jax.Array, "[..., G, Y] int"]
IntT = Annotated[jax.Array, "[..., T] int"]
Bool = Annotated[jax.Array, "[...] bool"]
BoolB = Annotated[jax.Array, "[..., B] bool"]
BoolBG = Annotated[jax.Array, "[..., B, G] bool"]
BoolG = Annotated[jax.Array, "[..., G] bool"]
BoolMT = Annotated[jax.Array, "[..., M, T] bool"]
BoolT = Annotated[jax.Array, "[..., T] bool"]
BoolY = Annotated[jax.Array, "[..., Y] bool"]
PerPrompt = Annotated[jax.Array, "[B] float"]
Counts = Annotated[jax.Array, "[B] int"]


@flax.struct.dataclass(kw_only=True)
class Prompts:
    """Prompts as tokens, with the targets of their verifier."""

    tokens: jax.Array  # [B, P] int32, left-padded
    mask: jax.Array  # [B, P] bool, True on real tokens
    id: jax.Array  # [B] int32 in [0, num_prompts), identifies the question
    target: Any  # tree of [B, ...], read by the verifier alone
    tail: jax.Array | None = None  # [B] int32, tokens after the place of a hint; None:
    # hints go before all of them


@flax.struct.dataclass(kw_only=True)
class Contexts:
    """Contexts of completions: a prompt, with its hint where there is one."""

    tokens: jax.Array  # [C, P] int32, left-padded
    mask: jax.Array  # [C, P] bool, True on real tokens


@flax.struct.dataclass(kw_only=True)
class Hints:
    """Hints of prompts by level, the weakest first."""

    tokens: jax.Array  # [B, L, H] int32, as they stand in the context; right-padded
    mask: jax.Array  # [B, L, H] bool; all False: there is no hint of that level


@flax.struct.dataclass(kw_only=True)
class DrawRows:
    """Rows to draw. (prompt, member) identifies a row; its position does not."""

    prompt: jax.Array  # [N] int32 in [0, B), the row's prompt; B is at most C
    member: jax.Array  # [N] int32 in [0, G), the row's place in its group
    context: jax.Array  # [N] int32 in [0, C), context of the row
    exists: jax.Array  # [N] bool, False on rows of the budget that are not used


@flax.struct.dataclass(kw_only=True)
class Turns:
    """What an environment wrote into completions, and what it gave for them."""

    observed: jax.Array  # [N, T] bool, True on tokens of observations
    reward: jax.Array  # [N, T] float32, of each turn at its last token; 0 elsewhere
    count: jax.Array  # [N] int32, turns that were answered
    found: dict[str, jax.Array]  # [N] float32 each, what `Environment.measure` says of
    # the last state

    @property
    def outcome(self) -> jax.Array:
        """`[N]` float32, sum of the rewards of a completion; NaN where one is NaN.

        To a multiple of 2^-20: so ten times .1 are 1, at whichever tokens they stand,
        and equal rewards in another order are equal outcomes.
        """
        return jnp.round(jnp.sum(self.reward, -1) * 2.0**20) * 2.0**-20


@flax.struct.dataclass(kw_only=True)
class Rollouts:
    """Completions and the log-probs they were sampled with, after temperature."""

    tokens: jax.Array  # [N, T] int32, `pad` after the end
    # [N, T] bool, True on tokens the policy chose, end tokens included
    mask: Annotated[jax.Array, "[N, T] bool"]
    logp_behaviour: jax.Array  # [N, T] float32, nats, of the distribution drawn from
    # Of an engine's completions the next three are within `support`, where it is noted.
    logp_policy: jax.Array  # [N, T] float32, nats, before top-k and top-p cut it
    entropy: jax.Array  # [N, T] float32, nats, of the policy at that token
    score_sq_norm: jax.Array  # [N, T] float32, |d logp_policy / d logits|^2, in [0, 2]
    finished: jax.Array  # [N] bool, False where max_tokens cut the completion off
    prompt: jax.Array  # [N] int32 in [0, B)
    member: jax.Array  # [N] int32 in [0, G)
    context: jax.Array  # [N] int32 in [0, C)
    exists: jax.Array  # [N] bool
    reward: jax.Array | None = None  # [N] float32, once they are graded: the weighted
    # sum of the terms of their grader, or a method's; None: the outcome
    support: jax.Array | None = None  # [N, T, S], what each token was drawn from, as of
    # `supports.packed`; None: not noted. The score is then that within it
    turns: Turns | None = None  # None: there is no environment

    @property
    def written(self) -> jax.Array:
        """`[N, T]` bool, tokens of the completion, whoever wrote them.

        Those of the policy, `mask`, and of observations that it has read or was to
        read.
        """
        return self.mask if self.turns is None else self.mask | self.turns.observed


@flax.struct.dataclass(kw_only=True)
class Batch:
    """The M rows that an update trains on. Masked rows have no weight."""

    tokens: jax.Array  # [M, T] int32
    mask: jax.Array  # [M, T] bool
    context: jax.Array  # [M] int32 in [0, C)
    credit: jax.Array  # [M, T] float32, multiplies the gradient of each token
    multiplier: jax.Array  # [M, T] float32, modulates the policy term of each token
    logp_behaviour: jax.Array  # [M, T] float32, nats
    logp_policy: jax.Array  # [M, T] float32, nats
    # [M, T] float32, nats; None: the policy is still old, or nothing reads what it was
    logp_old: jax.Array | None
    logp_ref: jax.Array | None  # [M, T] float32, nats; None: no KL to a reference
    imitated: "Imitated | None" = None  # completions to imitate besides; None: none
    off_policy: jax.Array | None = None  # [M, T] float32, weights of a rule that needs
    # all rows of an update; None: until there are any
    support: jax.Array | None = None  # [M, T, S], kept sets that all of these
    # log-probs are within; None: all of the vocabulary


@flax.struct.dataclass(kw_only=True)
class Imitated:
    """Completions to imitate, in the contexts of the same rows."""

    tokens: jax.Array  # [M, T'] int32
    mask: jax.Array  # [M, T'] bool, tokens that are imitated
    weight: jax.Array  # [M, T'] float32, weight of each token


@flax.struct.dataclass(kw_only=True)
class Tokens:
    """Log-probs and statistics of the policy at the tokens of an update; constants."""

    mask: BoolMT  # [M, T] bool
    credit: FloatMT  # [M, T] float32, multiplies the token's gradient
    logp: FloatMT  # [M, T] float32, nats, of the token taken
    logp_old: FloatMT  # [M, T] float32, nats, at the start of the step
    entropy: FloatMT  # [M, T] float32, nats
    # [M, T] float32, |d logp / d logits|^2 = 1 - 2 pi_a + |pi|^2
    score_sq_norm: FloatMT
    entropy_logp_cov: FloatMT  # [M, T] float32, nats, E[pi (log pi + H)]


@flax.struct.dataclass(kw_only=True)
class PromptMemory:
    """Discounted sums per prompt id, over the completions of its earlier visits."""

    draws: jax.Array  # [num_prompts] float32, completions
    solved: jax.Array  # [num_prompts] float32, sum of their outcomes
    square: jax.Array  # [num_prompts] float32, sum of their squared score norms
    tokens: jax.Array  # [num_prompts] float32, sum of their lengths


_0, _HALF, _1 = (cast(jax.Array, np.float32(x)) for x in (0.0, 0.5, 1.0))


@flax.struct.dataclass(kw_only=True)
class Difficulty:
    """Estimated difficulty of each prompt before its completions are drawn.

    A run sets every field. The defaults are those of an empty memory, one number for
    all prompts: `Difficulty(pass_rate=p)` is enough for an allocator that reads p.
    """

    draws: PerPrompt = _0  # [B] float32, completions behind the estimate, discounted
    solved: PerPrompt = _0  # [B] float32, the sum of their outcomes
    pass_rate: PerPrompt = _HALF  # [B] float32 in [0, 1], estimated from these
    norm: PerPrompt = _1  # [B] float32, score norm of completions, up to a factor
    tokens: PerPrompt = _1  # [B] float32, mean length of completions, up to a factor

    @property
    def prompts(self) -> int:
        """B, the number of prompts."""
        return max(np.size(getattr(self, f.name)) for f in dataclasses.fields(self))


@flax.struct.dataclass(kw_only=True)
class HintMemory:
    """Memory of hints by prompt id: the next level, and whether it ever had a hint."""

    level: jax.Array  # [num_prompts] int32, level of the next visit (SAGE-light)
    hinted: jax.Array  # [num_prompts] bool, a group of it was drawn with a hint


@flax.struct.dataclass(kw_only=True)
class Chosen:
    """Prompts selected for training, in the order of use, and the state of the rule."""

    ids: jax.Array  # [K] int32; negative: not selected yet
    level: jax.Array  # [] float32, state of the selection rule; NaN: none
    kept: jax.Array  # [] float32, share of the candidates that were kept
    tokens: jax.Array  # [] float32, tokens drawn to probe the candidates


@flax.struct.dataclass(kw_only=True)
class Weights:
    """Parameters of a policy: what a draw needs of a state."""

    params: Any  # nested dict of arrays, those that are trained
    frozen: Any = None  # nested dict of the others; None: all are trained


@flax.struct.dataclass(kw_only=True)
class Behaviour:
    """What a step's completions are drawn from: parameters, and what was known then."""

    params: Any  # as those of the state it is of
    memory: PromptMemory
    methods: dict[str, Any]
    version: jax.Array  # [] int32, steps that had made these parameters


@flax.struct.dataclass(kw_only=True)
class TrainState(Weights):
    """State of a run. It is saved as one tree; a resumed run continues bit for bit."""

    opt_state: Any  # optax state
    reference: Any  # params that RL began with, for a KL, a distance or the writing of
    # hints; None: nothing asks for them
    memory: PromptMemory
    methods: dict[str, Any] = flax.struct.field(default_factory=dict)  # states by name
    position: jax.Array  # [] int32, training prompts taken so far
    step: jax.Array  # [] int32, steps done
    seed: jax.Array  # [] uint32, from which every random key derives
    behaviour: Behaviour | None = None  # of the next step, which is drawn one step
    # ahead; None: this state


@flax.struct.dataclass(kw_only=True)
class SharedCache:
    """KV cache of decoding slots: contexts held once, and each slot's own tokens.

    Slots lie on D shards, K / D on each; a shard has the prefixes of its own contexts.
    """

    own: Any  # per layer k, v [K, kv_heads, W, d], columns that slots have written, or
    # as `Model.ragged` has them
    prefix: Any  # per layer k, v [D, C, kv_heads, P, d]
    context: jax.Array  # [K] int32 in [0, C), prefix of each slot; C: the slot is idle
    group: int = flax.struct.field(pytree_node=False)  # slots expected to share one
    pages: Any = None  # arrays.pages.Pages, with own columns before those of `own`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A policy as pure functions of its params, a plain nested dict.

    Attributes:
        init: `key -> params`.
        features: `(params, tokens [N, Q] int32, positions [N, Q] int32,
            seen [N, S] bool, cache, column) -> (features [N, Q, D], cache)`.
            Keys and values of the tokens join those of the cache: after them where
            `column` is None (S grows by Q; no cache: S = Q), else written in place
            from `column` on (S is the cache's length). Queries look at the keys `seen`
            names; without a column, of these at their own and those before.
            With `shared` the cache may be a `SharedCache`: `column` is one of the W, S
            is P + W, and a slot looks at the prefix of its context before its own; the
            columns of its pages, if any, stand behind the W.
        head: `params -> [V, D]`, the matrix that turns features into logits.
        axes: tree like params of logical axis names, one per dimension.
        trained: whether the parameter at a path of keys is trained; None: all are.
        ready: `params -> params` in the layout for decoding: layers apart, matrices
            cast once, on a mesh sharded so that no token moves them. Only `head`, and
            `features` with a column, take them. None: as they are.
        load: `sharding -> params`, read from a checkpoint instead of drawn, all or
            some; the sharding is a tree like params, None for one device. None:
            nothing is read.
        packs: `(tokens, T, P) -> Lines`, how rows are to be packed, here, of which a
            micro-batch has so many tokens; None, as its result too: not at all. Then
            `features` takes a `curax.arrays.lines.Visible` in place of `seen`, with a
            line in place of a row, and the cache of all contexts; none need come back.
        shared: `cache -> cache`, keys and values of contexts as a `SharedCache` has
            them, which `features` with a column takes then. None: it does not, and each
            slot's prefix is copied in front of its own columns at every token.
        ragged: `(cache, T) -> cache`, `SharedCache.own` without columns with T of them,
            as `features` has them where, here, keys of so many do not lie as `shared`
            has them, or those alone that hold tokens are read; None, as its result too,
            and without `shared`: neither, and there are as many as were needed.
        paged: columns of a page where so many columns may lie in `arrays.pages`, here;
            0: they are rings. None: always.
        adding: `(params, totals) -> params` for a line or contexts, such that the
            gradient by the totals is these and that of the parameters, added where they
            lie. Each loss calls `features` once, and `head` once or, of contexts, not
            at all, as they are: who replaces one of them has None here, where gradients
            are added when all are there. `features` takes a
            `curax.arrays.accumulate.Adding` as the cache too, of all layers together,
            which are alike.
    """

    init: Callable[[jax.Array], Any]
    features: Callable[..., Any]
    head: Callable[[Any], jax.Array]
    axes: Any
    trained: Callable[[tuple[str, ...]], bool] | None = None
    ready: Callable[[Any], Any] | None = None
    load: Callable[[Any], Any] | None = None
    packs: Callable[[int, int, int], Any] | None = None
    shared: Callable[[Any], Any] | None = None
    ragged: Callable[[Any, int], Any] | None = None
    paged: Callable[[int], int] | None = None
    adding: Callable[[Any, Any], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hinting:
    """Functions that hint the prompts of a task, in JAX, or in numpy if `in_files`.

    A hint is tokens `[B, L, S]` with a mask, right-padded, L levels, the weakest first;
    one without any True is missing.

    Attributes:
        solution: reference solutions, `Prompts -> (tokens [B, S] int32,
            mask [B, S] bool)`, right-padded, without the end.
        wrap: hints with the words that introduce them, `(tokens [B, L, S],
            mask) -> (tokens [B, L, S'], mask)`; what is missing stays so.
        leaks: `(Prompts, tokens [B, L, S], mask) -> [B, L] bool`, hints that give the
            answer away.
        writing_contexts: contexts in which the policy writes hints, `Prompts ->
            Contexts`; None: it cannot.
        parse: the hints in a written text, `(Prompts, tokens [B, T], mask [B, T]) ->
            (tokens [B, L, S], mask)`; None: it cannot.
        from_file: hints of a file, `Prompts -> (tokens [B, L, S], mask)`; None: there
            is no such file.
    """

    solution: Callable[[Prompts], tuple[Any, Any]] | None
    wrap: Callable[[Any, Any], tuple[Any, Any]]
    leaks: Callable[[Prompts, Any, Any], Any]
    writing_contexts: Callable[[Prompts], Contexts] | None = None
    parse: Callable[[Prompts, Any, Any], tuple[Any, Any]] | None = None
    from_file: Callable[[Prompts], tuple[Any, Any]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """A reward of several graders: a weighted sum, with one term as the outcome.

    They are asked on the host: a task that has them is not `on_device`.

    Attributes:
        weights: of the terms, by name.
        outcome: name of the term that is the outcome.
        verify_all: `(targets, completions) -> verdicts by the name of the term`, those
            of a term as of `Task.verify_all`.
    """

    weights: Mapping[str, float]
    outcome: str
    verify_all: Callable[
        [list[Any], list[Any]], Mapping[str, Sequence[float | str | None]]
    ]


@flax.struct.dataclass(kw_only=True)
class Observation:
    """Answer of an environment to a turn; `vmap` gives all of them a leading axis.

    From the host the tokens are a list of integers, or text where turns are text; the
    others are numbers of Python, and of `length` there is no need.
    """

    tokens: Any  # [W] int32, what the policy reads next; W is static
    done: Any  # [] bool, the completion ends here, and nothing is read
    reward: Any  # [] float32, of this turn; NaN: the outcome is missing
    length: Any = None  # [] int32 in [0, W], how many of them there are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """What answers the turns of a completion: pure JAX functions of one episode.

        state_0 = reset(key, target)
        state_i, observation_i = observe(state_{i-1}, turn_i),   i = 1, 2, ...
        outcome = sum of reward_i

    A turn is what the policy writes up to one of the tokens `Task.end`, which is part
    of it. The completion ends where the observation is done, or at `max_tokens`: a row
    that is cut there has the rewards that it got. The functions are called under
    `vmap` and `jit`, also for turns that are none, whose results are dropped: they
    must not raise. States are trees of arrays whose shapes and dtypes never change.

    The same record of functions of Python, which `tasks.environments` runs in worker
    processes, has other arguments: `reset(key, target)` with an integer of 64 bits,
    and `observe(state, turn)` with the turn as text or a list of integers. There a
    state is whatever pickle can send.

    Attributes:
        reset: `(key, target) -> state`. The key, `[]`, is one of the row's own; the
            target is that of its prompt, a tree without the axis of prompts.
        observe: `(state, tokens [T] int32, length [] int32) -> (state, Observation)`.
            The first `length` tokens are the turn, the end token included; those after
            them are `Task.pad`.
        measure: `state -> {name: [] float32}`, of the last state of a completion: means
            of these over completions are the metrics `environment/NAME`; None: there
            are none.
        opening: of functions of Python, `state -> text` that the policy reads first,
            for tasks whose prompts are made of it; None: prompts come from elsewhere.
    """

    reset: Callable[[Any, Any], Any]
    observe: Callable[..., tuple[Any, Observation]]
    measure: Callable[[Any], Mapping[str, Any]] | None = None
    opening: Callable[[Any], str] | None = None


class Turn(NamedTuple):
    """A turn of a completion, as the host asks an environment about it."""

    state: Any  # of the last answer; None: this turn is the first
    key: int  # in [0, 2^64), a function of seed, step, prompt and member
    target: Any  # of the prompt
    tokens: Any  # list of integers without padding, the end token included; or text


class Answer(NamedTuple):
    """What a host environment says to a turn."""

    state: Any  # for the next turn
    tokens: Any  # list of integers, what the policy reads next; or text
    done: bool  # the completion ends here, and nothing is read
    reward: float  # of this turn; NaN: the outcome is missing
    found: Mapping[str, float]  # what it measures of the state


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostEnvironment:
    """What answers turns from outside of the program, many at a time.

    Completions are drawn turn by turn: one of each, then all answers, then the next
    of those that go on.

    Attributes:
        answer: `turns -> answers`, as many; a text in place of one says why there is
            none, and its first word what kind of fault it is, as of
            `Task.verify_all`. Such a completion ends, and its outcome is missing.
        start: prepares it before a run begins, as `Task.start`; None: nothing to do.
        measures: names of `Answer.found`.
        openings: `targets -> answers`, whose tokens are what the policy reads first of
            episodes; a text says why it is not known. None: prompts come from
            elsewhere.
        closed: told the last states of completions that ended before it said so, as
            those that `max_tokens` cuts off; None: a state holds nothing.
    """

    answer: Callable[[list[Turn]], Sequence[Answer | str]]
    start: Callable[[], None] | None = None
    measures: tuple[str, ...] = ()
    openings: Callable[[list[Any]], Sequence[Answer | str]] | None = None
    closed: Callable[[list[Any]], object] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts, their verifier, and functions that show both to a person.

    Attributes:
        vocab_size: V.
        pad: token after the end of a completion.
        end: tokens that end a completion; with an environment, a turn of it.
        num_prompts: training prompts have ids below this.
        num_held_out: held-out prompts have ids below this; no question is on both
            sides.
        prompts: training prompts, `id [B] -> Prompts`, a pure JAX function, or one of
            numpy arrays if `in_files`.
        held_out: held-out prompts, `id [B] -> Prompts`, likewise.
        traces: completions to imitate, `(key, Prompts) -> (tokens [B, T] int32,
            mask [B, T] bool)`; None where there are none. A row without any True is
            not imitated.
        verify: outcome of each completion, in [0, 1], NaN where it is missing.
            On the device `(target [N, ...], tokens [N, T], mask [N, T]) -> [N]`; on
            the host one at a time, `(target, tokens) -> float | None`. None: the
            environment gives outcomes.
        on_device: whether `verify` is a JAX function, or the environment is.
        decode: token ids to readable text.
        in_files: whether prompts and traces are made on the host, as numpy arrays.
        verify_all: on the host all at once instead of one at a time, `(targets,
            completions) -> outcomes`: a float, None, or the reason why it is missing,
            whose first word names the kind (`timeout`, `error: ...`); kinds without a
            metric of their own are counted in `verify/other`.
        start: prepares the verifier before a run begins; raises RuntimeError, in a
            sentence, where that fails. None: there is nothing to do.
        prompt_form: format of prompts as JSON values: `template`, `system`,
            `chat` and `thinking`, as options of `tasks.file_task`; None: prompts are
            not made of text.
        tokenizer: folder with the files of the tokenizer; None: as `prompt_form`.
        summary: summary of the files, printed once when a run begins.
        fingerprint: digest of the questions in the files, of all that is said of them
            there, and of their order; 0: there are none.
        hinting: how prompts are hinted; None: they cannot be.
        reference: reference answers, `Prompts -> (tokens [B, Y] int32, mask [B, Y]
            bool)`, right-padded, the end included; None: there are none.
        delimiter: tokens, one after the other, that end the thinking part of a
            completion; empty: completions have no parts.
        states: whether the text of a completion states an answer that the verifier
            reads; None: nobody knows.
        trace_contexts: contexts of the traces, `(key, Prompts) -> Contexts`, the key
            being that of the traces; None: the prompts themselves.
        terms: of the reward of a host verifier; None: the outcome is the reward.
        environment: what answers the turns of a completion, and gives its outcome in
            place of `verify`: an `Environment` if `on_device`, else a
            `HostEnvironment`; None: a completion is one turn.
    """

    vocab_size: int
    pad: int
    end: tuple[int, ...]
    num_prompts: int
    num_held_out: int
    prompts: Callable[[Any], Prompts]
    held_out: Callable[[Any], Prompts]
    on_device: bool
    decode: Callable[[Any], str]
    traces: Callable[[Any, Prompts], tuple[Any, Any]] | None = None
    verify: Callable | None = None
    in_files: bool = False
    verify_all: (
        Callable[[list[Any], list[Any]], Sequence[float | str | None]] | None
    ) = None
    start: Callable[[], None] | None = None
    prompt_form: Mapping[str, Any] | None = None
    tokenizer: Path | None = None
    summary: str = ""
    fingerprint: int = 0
    hinting: Hinting | None = None
    reference: Callable[[Prompts], tuple[Any, Any]] | None = None
    delimiter: tuple[int, ...] = ()
    states: Callable[[str], bool] | None = None
    trace_contexts: Callable[[Any, Prompts], Contexts] | None = None
    terms: Terms | None = None
    environment: Environment | HostEnvironment | None = None
