"""The work that every system is given. Standard library only: all of them import it.

A random Qwen3-style decoder in float32; prompts with a group of completions each,
temperature 1; then one GRPO update over all of them: AdamW, no KL term.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

LEARNING_RATE = 1e-6  # small: the policy, hence the lengths, stay what they were
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
PAD = 0  # never in a prompt; tunix masks it out where it was sampled
EMBEDDING_STD = 0.02  # of tied embeddings: logits near uniform, so ends come by chance
PROMPTS = 1024  # different prompts


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Shapes of the model and of one iteration, the same for every system."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    prompts: int = 16
    group_size: int = 8
    prompt_tokens: int = 32
    max_tokens: int = 64
    slots: int = 128  # rows decoded at a time
    hazard: float = 0.0  # chance per token that a completion ends; 0: never

    @property
    def rows(self) -> int:
        """Completions per iteration."""
        return self.prompts * self.group_size

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a completion: the last ones of the vocabulary."""
        count = round(self.hazard * self.vocab_size)
        return tuple(range(self.vocab_size - count, self.vocab_size))

    @property
    def parameters(self) -> int:
        """Parameters of the model, its head tied to the embeddings."""
        inner, inner_kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        block = 2 * self.width * (inner + inner_kv) + 3 * self.width * self.mlp_width
        norms = 2 * self.width + 2 * self.head_dim
        embedding = self.vocab_size * self.width
        return self.layers * (block + norms) + self.width + embedding


_nano = partial(
    Workload,
    layers=4,
    width=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp_width=1024,
    vocab_size=512,
)
_small = partial(
    Workload,
    layers=12,
    width=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    mlp_width=2048,
    vocab_size=4096,
)
_shared = partial(_nano, prompt_tokens=512, max_tokens=128, slots=64)
_qwen3 = partial(
    Workload,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
)


def _length(tokens: int, varied: bool) -> Workload:
    """Completions of `tokens`; or of an eighth in the mean, cv near 1, in few slots."""
    prompts = max(4, 8192 // tokens) if varied else max(1, 2048 // tokens)
    return _nano(
        name=f"length{tokens}{'varied' * varied}",
        prompts=prompts,
        slots=2 * prompts if varied else 8 * prompts,
        max_tokens=tokens,
        hazard=8 / tokens if varied else 0.0,
    )


# In the order in which they are measured; the first four are those of the targets.
WORKLOADS = {
    work.name: work
    for work in (
        _nano(name="nano"),
        _small(name="small"),
        # At this hazard lengths cut off at 64 tokens have a coefficient of variation
        # of 0.8; there are four times as many rows as slots.
        _nano(name="unequal", prompts=64, hazard=0.035),
        # 128 tokens in the mean, 1,024 at most.
        _nano(name="long", prompts=64, max_tokens=1024, hazard=1 / 128),
        *(_length(t, varied) for t in (256, 1024, 4096) for varied in (False, True)),
        # A context of 512 tokens is that of 8 completions, and of 32.
        _shared(name="shared8", prompts=8, group_size=8),
        _shared(name="shared32", prompts=2, group_size=32),
        _nano(name="vocabulary", vocab_size=151_936, prompts=4, slots=32),
    )
}
QWEN3 = {
    "qwen3-0.6b": partial(_qwen3, name="qwen3-0.6b", width=1024, mlp_width=3072),
    "qwen3-1.7b": partial(_qwen3, name="qwen3-1.7b", width=2048, mlp_width=6144),
    # Its own head is not tied to the embeddings.
    "qwen3-8b": partial(
        _qwen3, name="qwen3-8b", width=4096, layers=36, heads=32, mlp_width=12288
    ),
}


def named(words: str) -> Workload:
    """The workload of a name, or the one whose fields are written as JSON."""
    if words.startswith("{"):
        return Workload(**json.loads(words))
    return WORKLOADS[words]


def prompts(work: Workload) -> list[list[int]]:
    """Random prompts, equal for every system, of tokens that are no end and no pad."""
    draw = random.Random(0)
    usable = range(PAD + 1, work.vocab_size - len(work.ends))
    return [draw.choices(usable, k=work.prompt_tokens) for _ in range(PROMPTS)]


def reward(tokens: Sequence[int]) -> float:
    """Share of even tokens: costs nothing, and differs within a group."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def mean_and_cv(lengths: Sequence[int]) -> tuple[float, float]:
    """Mean and coefficient of variation."""
    mean = sum(lengths) / len(lengths)
    variance = sum((length - mean) ** 2 for length in lengths) / len(lengths)
    return mean, math.sqrt(variance) / mean
