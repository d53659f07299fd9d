"""The fields of a config: frozen dataclasses, a group of fields each.

Options of a function are bound by `functools.partial`, so a default stands once, in a
signature. The comment behind a field is what `curax.train --help` says of it. Only the
standard library is imported.
"""

from dataclasses import dataclass

from curax.settings.config_types import (
    Count,
    Devices,
    Function,
    Magnitude,
    Natural,
    Positive,
    Seed,
    Share,
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling of completions."""

    group_size: Count = 8  # G, completions per prompt at most
    prompts: Count = 16  # B, prompts per step
    budget: Natural = 0  # completions per step, pilots included; 0: G for each prompt
    max_tokens: Count = 64  # T, tokens per completion at most
    temperature: Positive = 1.0  # divides the logits; greedy decoding cannot train
    top_k: Natural = 0  # number of likeliest tokens that are drawn from; 0: all
    top_p: Share = 1.0  # mass of the likeliest tokens that are drawn from; 1: all
    off_policy: Function | None = None  # of curax.off_policy, as truncated_ratio:
    # weights of tokens, policy over what was drawn from; None: 1, without top_k, top_p
    replay_support: bool = False  # what top_k and top_p keep at each token is noted,
    # and all log-probs that train are within it: what is drawn trains
    slots: Natural = 0  # completions decoded at a time; 0: every row of the step
    cache_gib: Magnitude = 0.0  # GiB of a device that keys and values may take: as many
    # slots as there is room for, and rows wait for one; 0: what `slots` take
    attempts: Count = 1  # batches of prompts drawn to refill groups that the gate
    # closed; 1: no refill
    chunks: Count = 1  # of a draw; the host verifies one while the next is drawn
    engine: Function | None = None  # of curax.engine, as vllm with its url: a server
    # that draws the completions of a step; None: curax's own sampler
    ahead: Natural = 0  # steps by which the draw is ahead of the update, 0 or 1: at 1
    # the next step's is drawn and verified while this one's trains


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stopping rule for the completions of a prompt."""

    rule: Function  # of curax.stop: (outcome, exists) -> met
    round_size: Count = 8  # completions of a prompt between two tests of the rule


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """Pilot completions, drawn to estimate pass rates; they do not train."""

    draws: Count  # completions per prompt
    every: Count = 1  # steps between copies of the policy that draws them; 1: the
    # policy itself, so that no allocation is ever stale
    norm: Function | None = None  # gradient norm of curax.score; None: all are equal
    root_mean_square: bool = True  # root mean square of the norms of right completions;
    # False: their mean


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Hints written by the policy for its own prompts."""

    max_tokens: Count = 512  # tokens of one writing, which has hints of all levels
    temperature: Magnitude = 1.0  # divides the logits
    tries: Count = 3  # attempts per prompt until a writing can be parsed
    frozen: bool = False  # written by the policy RL starts from, kept beside the policy


@dataclass(frozen=True, kw_only=True)
class Hint:
    """Hints for collapsed groups, which are drawn again; evaluation has no hints."""

    source: Function  # of curax.hint: text of the hints
    levels: Count = 3  # L, strengths of a hint, the weakest first
    width: Count = 512  # H, tokens of a hint at most, its introduction included
    writing: Writing | None = None  # None: the policy writes no hints
    trigger: Function  # of curax.hint: (outcome, exists) -> collapsed groups
    controller: Function | None = None  # (level, pass rate) -> level of the next visit;
    # None: each visit starts without a hint and raises the level until a group opens
    most: Share = 0.5  # largest share of the prompts of a step that get hints
    credit: Function | None = None  # of curax.hint: reweights to train without the
    # hint; None: train with the hint, as drawn


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Selection of prompts by probing candidates before they are trained on."""

    every: Count = 10  # steps between probes
    candidates: Count = 2  # candidates per prompt that is selected
    draws: Count = 8  # completions per candidate
    keep: Function  # of curax.reflect: which candidates are kept
    carried: Magnitude = 0.1  # share of the selection carried over from the last probe


@dataclass(frozen=True, kw_only=True)
class Reflection:
    """Reward by the log-prob of the reference answer after the thought: R3."""

    weights: Function  # of curax.reflect: spread of log-probs -> weights of tokens
    clip_nats: Positive = 8.0  # log-probs are clipped at -clip_nats in the spread
    leave_one_out: bool = False  # weights of a completion leave its own log-probs out
    baseline: Function | None = None  # of curax.reflect: log-prob with a masked thought
    scorer_every: Natural = 1  # steps between copies of the policy that score; 1: the
    # policy itself, 0: the one RL starts from
    answers: bool = False  # tokens after the thought get the credit of the reward too
    length: Function | None = None  # (length, wanted) -> reward of an answer's length
    length_weight: Magnitude = 1.0  # weight of that reward, nats per token
    rubric: Function | None = None  # of curax.reflect: effect of an unfit answer
    direct: Magnitude = 0.0  # weight of the gradient through the reference log-prob
    keep: Function | None = None  # of curax.reflect: groups that train, judged by their
    # own completions; None: all
    queries: Queries | None = None  # None: all prompts in turn


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation of the policy on held-out prompts during training."""

    every: Count = 50  # steps from one evaluation to the next
    prompts: Count = 256  # held-out prompts
    samples: Count = 8  # completions per prompt
    k: Natural = 0  # of pass@k, estimated from these samples; 0: not measured
    distance: bool = False  # measure the KL to the policy RL starts from, which is kept
    confidence: Natural = 0  # k of the confidence of a token; 0: not measured
    window: Count = 2048  # tokens over which confidence is averaged
    format: Function | None = None  # text -> kind, an integer; None: first four tokens


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised fine-tuning on solved examples before RL."""

    steps: Count  # optimizer updates
    rows: Count  # traces per step
    micro_batches: Count = 1  # gradients added up per update; changes memory only
    optimizer: Function  # () -> optax transformation
    clip_norm: Positive = 1.0  # largest global norm of a gradient; inf: no clipping


@dataclass(frozen=True, kw_only=True)
class Update:
    """Optimizer updates from the rows of a step."""

    epochs: Count = 1  # passes over the rows of a step
    minibatches: Count = 1  # optimizer updates per pass
    micro_batches: Count = 1  # gradients added up per update; changes memory only
    tokens_per_micro_batch: Natural = 0  # tokens that each shard of the rows scores at
    # a time, in the warm start too; micro-batches follow, packed on CPUs and TPUs, and
    # on GPUs in float32. 0: micro_batches says it
    behaviour_as_old: bool = False  # the ratio of the loss is over what was drawn from
    # (bypass); False: over the policy at the start of the step
    clip_norm: Positive = 1.0  # largest global norm of a gradient; inf: no clipping
    length_buckets: Count = 1  # lengths T, T/2, ... that micro-batches are cut to
    token_chunk: Natural = 0  # tokens whose logits exist at a time, on each shard of
    # the rows; 0: those of a micro-batch. TPUs have pieces of the vocabulary instead
    patience: Count = 5  # steps in a row without a finite gradient that stop the run


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The difficulty memory: discounted Beta counts per prompt id."""

    half_life: Positive = 6.6  # visits of a prompt that halve earlier counts
    load: str | None = None  # memory.jsonl of another run to start from
    prior: tuple[Positive, Positive] = (1.0, 1.0)  # prior counts (solved, failed)


AXES = ("data", "fsdp", "tensor")  # of a mesh


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis of the mesh; one axis may be -1: all that are left."""

    data: Devices = 1  # rows are sharded, parameters replicated
    fsdp: Devices = 1  # rows and parameters are sharded
    tensor: Devices = 1  # each layer is sharded
    cut_sampler: bool = False  # sampling leaves layers sharded over fsdp and gathers
    # them at every token: for models that do not fit otherwise
    draw_share: Share | None = None  # share of the data axis that draws a step ahead
    # while the rest trains: needs sampling.ahead; None: every device does both


DASHBOARDS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Logging and checkpoints."""

    every: Count = 10  # steps per jitted chunk, after which the host gets metrics
    rollout_prompts: Natural = 2  # prompts per step whose completions are written
    checkpoint_every: Count = 50  # steps between checkpoints; evaluated steps get one
    keep: Count = 2  # latest checkpoints that are kept, beside the best
    drift_nats: Positive | None = None  # log-prob difference of sampler and trainer
    # that raises an alarm; None: 1e-4 for float32 on a CPU, 0.2 elsewhere
    dashboards: tuple[str | Function, ...] = ("tensorboard",)  # that show the run too:
    # tensorboard, wandb, trackio, mlflow, or functions like these of runs.dashboards


@dataclass(frozen=True, kw_only=True)
class KL:
    """KL penalty to the reference policy, the one RL starts from."""

    estimator: Function  # (logp, logp_ref) -> nats per token
    coefficient: Magnitude  # loss per nat


@dataclass(frozen=True, kw_only=True)
class Fields:
    """All fields of a config, unchecked: `curax.config.Config` checks them.

    Stages have no default: a recipe, or its test bed, names each.
    """

    task: Function  # prompts and their verifier
    model: Function  # the policy network
    sampling: Sampling = Sampling()
    pilot: Pilot | None = None  # None: pass rates are those of the memory
    stop: Stop | None = None  # None: every prompt draws what it was allocated
    allocate: Function  # completions per prompt
    objective: Function  # weight f'(p) per prompt
    claim: Function | None = None  # stated f(p) of a paper, for xray; None: objective.f
    gate: Function  # which completions may train
    downsample: Function  # which of them train, at most its option m per prompt
    correct: Function  # weights that undo the bias of the selection
    pool_statistics: bool = True  # advantages use all completions drawn; False: kept
    advantage: Function  # credit per completion
    modulate: Function  # multiplier per token
    hint: Hint | None = None  # None: no hints
    reflection: Reflection | None = None  # None: the task's verifier gives outcomes
    methods: tuple[Function, ...] = ()  # of your own: functions without arguments that
    # give a `step.types.Method`; they take part behind those of curax, in this order
    loss: Function  # loss per token
    aggregate: Function  # weight per token
    shape_reward: Function | None = None  # outcome -> reward; the outcome is unchanged
    kl: KL | None = None  # None: no reference policy
    entropy_bonus: Magnitude = 0.0  # loss per nat of entropy, subtracted
    optimizer: Function  # () -> optax transformation
    update: Update = Update()
    warm_start: WarmStart | None = None  # None: start from the initial parameters
    evaluation: Evaluation = Evaluation()
    memory: Memory = Memory()
    mesh: Mesh = Mesh()
    logging: Logging = Logging()
    steps: Natural = 200  # RL steps; 0: the warm start alone
    seed: Seed = 0  # seed of every random draw
    seeds: Count = 1  # runs side by side, with seeds seed, seed + 1, ...
    staged: bool = False  # use the staged loop although the verifier is a JAX function
