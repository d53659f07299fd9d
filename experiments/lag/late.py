"""Lags of more than a step, and a sampler in bfloat16: a loop of one's own.

Command:  python -m experiments.lag.late          runs what `late.json` lacks
          python -m experiments.lag.late --show   makes the tables of it

What trains is drawn by the policy of so many updates before, whose parameters the loop
keeps; the first ones all draw from the start. Eight seeds side by side, each from its
own warm start, 208 updates of 128 completions each; estimator and aggregation of GRPO,
without its KL. Arms differ in lag, in the precision of the sampler, and in what a token
is weighed by, which `bypass` clips besides.
"""

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import curax
from curax.compare import statistics
from curax.settings.tables import markdown
from curax.step import loops
from experiments.lag.show import shown

HERE = Path(__file__).parent
SEEDS, UPDATES, PROMPTS, EACH = 8, 208, 16, 8
RATES = (3e-3, 3e-4)


def weighed(rule: Any, logp, behaviour, advantage, mask):
    """REINFORCE with weights of policy over behaviour, which are not differentiated."""
    weight = rule(jax.lax.stop_gradient(logp), behaviour, mask)
    return curax.loss.reinforce(logp, behaviour, weight * advantage, mask)


def of_sequence(logp, behaviour, mask):
    """Weights of whole sequences, at most 2."""
    return curax.off_policy.truncated_ratio(logp, behaviour, mask, per="sequence")


RULES: dict[str, Any] = {
    "uncorrected": curax.loss.reinforce,
    "tokens": partial(weighed, curax.off_policy.truncated_ratio),
    "sequences": partial(weighed, of_sequence),
    "bypass": curax.loss.clipped_ratio,
}
ARMS = [
    ("float32", 0, "uncorrected"),
    ("bfloat16", 0, "uncorrected"),
    ("bfloat16", 0, "tokens"),
    *itertools.product(["float32"], (1, 4), RULES),
    *itertools.product(["bfloat16"], (4,), ("uncorrected", "tokens")),
]


def parts_of(rate: float, sampler: str = "float32", prompts: int = 512) -> Any:
    """The components of the recipe, at a learning rate and a precision."""
    config = curax.load("grpo")
    config = curax.override(
        config,
        {
            "optimizer.learning_rate": rate,
            "task.num_prompts": prompts,
            "model.dtype": sampler,
        },
    )
    return curax.build(config)


def outcomes(rate: float, arm: tuple[str, int, str], starts: Any) -> Any:
    """Held-out pass rates, tokens and gaps of an arm, `[SEEDS]` each.

    A gap is the root mean square of the log-ratio, policy over sampler, over all tokens
    drawn.
    """
    sampler, lag, rule = arm
    parts, draws = parts_of(rate), parts_of(rate, sampler)

    def one(carry, key):
        state, kept, count = carry
        slot = count % (lag + 1)
        kept = jax.tree.map(lambda all_, x: all_.at[slot].set(x), kept, state.params)
        oldest = jnp.where(count < lag, 0, (count - lag) % (lag + 1))
        params = jax.tree.map(lambda all_: all_[oldest], kept)
        prompts = parts.task.prompts(jax.random.randint(key, (PROMPTS,), 0, 512))
        past = state.replace(params=params)
        drawn = curax.sample(draws, past, prompts, EACH, key)
        grid = curax.reward.on_device(parts.task, prompts, drawn).reshape(-1, EACH)
        credit = curax.advantage.standardised(grid, grid >= 0).reshape(-1)
        rows = curax.datum(
            prompts,
            drawn.tokens,
            drawn.mask,
            advantage=credit,
            logp=drawn.logp_behaviour,
            context=drawn.context,
        )
        share = curax.aggregate.sequence_mean(drawn.mask)
        gradient, seen = curax.forward_backward(
            parts, state, rows, RULES[rule], weight=share
        )
        gap = jnp.where(drawn.mask, seen["logp"] - drawn.logp_behaviour, 0)
        state = curax.optim_step(parts, state, gradient)
        told = drawn.mask.sum(dtype=jnp.int32), jnp.sum(gap**2)
        return (state, kept, count + 1), told

    @jax.jit
    @jax.vmap
    def whole(state, seed):
        kept = jax.tree.map(lambda x: jnp.stack([x] * (lag + 1)), state.params)
        keys = jax.random.split(jax.random.key(seed), UPDATES)
        carry, (tokens, gaps) = jax.lax.scan(one, (state, kept, jnp.int32(0)), keys)
        (_, outcome), _ = loops.held_out_outcomes(parts, carry[0])
        return jnp.nanmean(outcome), tokens.sum(), jnp.sqrt(gaps.sum() / tokens.sum())

    return whole(starts, jnp.arange(SEEDS, dtype=jnp.uint32))


def run(path: Path) -> None:
    """Run what the file lacks, arm by arm; it is written after each."""
    found = json.loads(path.read_text()) if path.exists() else {}
    seeds = jnp.arange(SEEDS, dtype=jnp.uint32)
    # The warm start has an optimizer of its own: it is the same at every rate.
    parts = parts_of(RATES[0], prompts=1 << 14)
    starts = jax.jit(jax.vmap(partial(curax.init, parts)))(seeds)
    for rate in RATES:
        wanted = {named(rate, arm): arm for arm in ARMS}
        left = {name: arm for name, arm in wanted.items() if name not in found}
        for name, arm in left.items():
            rates, tokens, gap = map(np.asarray, outcomes(rate, arm, starts))
            found[name] = {
                "rate": rates.tolist(),
                "tokens": tokens.tolist(),
                "gap_nats": gap.tolist(),
            }
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}: {shown(rates)}, {gap.mean():.2g} nats", flush=True)


def gaps(found: dict[str, Any], rate: float) -> dict[tuple[Any, str], np.ndarray]:
    """Pass rates of each arm less the control's, and its uncorrected one's, by seed."""
    rates = {arm: np.array(found[named(rate, arm)]["rate"]) for arm in ARMS}
    bases = {"on policy": lambda arm: ARMS[0], "uncorrected": plain}
    return {
        (arm, name): there - rates[base(arm)]
        for arm, there in rates.items()
        for name, base in bases.items()
        if arm != base(arm)
    }


def plain(arm: Any) -> Any:
    """The arm of the same sampler and lag that nothing corrects."""
    return *arm[:2], "uncorrected"


def named(rate: float, arm: Any) -> str:
    """An arm in the file."""
    return " ".join(map(str, (rate, *arm)))


def table(found: dict[str, Any], rate: float) -> str:
    """Every arm at a learning rate, less the control and its uncorrected one."""
    own, rows = gaps(found, rate), []
    for arm in ARMS:
        about = found[named(rate, arm)]
        less = (own.get((arm, base)) for base in ("on policy", "uncorrected"))
        cells = [*map(str, arm), shown(np.array(about["rate"]))]
        cells += ["" if gap is None else shown(gap, signed=True) for gap in less]
        rows.append([*cells, f"{np.mean(about['gap_nats']):.2g}"])
    head = ["sampler", "lag", "weights", "pass rate", "less on policy"]
    return markdown([*head, "more than uncorrected", "gap, nats"], rows)


def main() -> None:
    """Run, or show."""
    parser = argparse.ArgumentParser(prog="python -m experiments.lag.late")
    parser.add_argument("--show", action="store_true", help="make the tables")
    path = HERE / "late.json"
    if parser.parse_args().show:
        found = json.loads(path.read_text())
        print(*(table(found, rate) for rate in reversed(RATES)), sep="\n\n")
        own = {
            (rate, *name): gap
            for rate in RATES
            for name, gap in gaps(found, rate).items()
        }
        p = np.array(stats.ttest_1samp([*own.values()], 0, axis=1)[1]).tolist()
        judged = zip(own, p, statistics.holm(p), strict=True)
        sure = [str(name) for name, chance, level in judged if chance < 1 - level]
        print(f"\nOf {len(p)} gaps Holm's correction leaves: {'; '.join(sure)}.")
    else:
        run(path)


if __name__ == "__main__":
    main()
