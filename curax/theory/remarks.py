"""Sentences on a prediction: departures from the claim, and assumptions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax.config import Config
from curax.settings import sizes
from curax.settings.config_paths import full_name, options
from curax.settings.config_types import present
from curax.settings.declared import declared
from curax.step import stages
from curax.theory import hint_levels, visits
from curax.theory.predict import Prediction
from curax.theory.stated_objective import Claim

SIDES = (0.05, 0.95)  # pass rates at which a weight is compared with the claim
FAR = 1.5  # a weight so many times too large, or too small, is a warning
BIASED = 0.02  # a larger bias of the pass rate is a warning
UNEQUAL = 0.005  # a larger relative change of a weight by hints is a note


def differences(p: np.ndarray, over: np.ndarray, name: str) -> list[str]:
    """Phrases on weights that differ from those of the claimed objective by over FAR.

    Args:
        p: `[R]` pass rates.
        over: `[R]` weight over claimed weight, 1 at p = 1/2.
        name: of the claimed objective.
    """
    found = []
    for side in SIDES:
        times = float(np.interp(side, p, over))
        if times > FAR:
            found.append(f"weights p={side:g} prompts {times:.1f}x more than {name}.")
        elif 0 < times < 1 / FAR:
            found.append(
                f"weights p={side:g} prompts {1 / times:.1f}x less than {name}."
            )
    return found


def warnings(claim: Claim, seen: Prediction) -> list[str]:
    """Phrases on weights at or below 0, a missing claim, and biased pass rates."""
    p, found = seen.p, []
    inside = (p >= SIDES[0]) & (p <= SIDES[1])
    backwards = p[inside & ~(seen.weight > 0)]
    if backwards.size:
        found.append(
            f"gives no weight to prompts of p={backwards[0]:.2g} to "
            f"{backwards[-1]:.2g}, or pushes them down."
        )
    if claim.slope is None:
        found.append("states no objective; set claim to a function f of the pass rate.")
    bias = np.nan_to_num(seen.rate - p)
    worst = np.abs(bias).argmax()
    if abs(bias[worst]) > BIASED:
        found.append(
            f"stops at pools whose pass rates are off by up to {bias[worst]:+.2f}, at "
            f"p={p[worst]:.2g}."
        )
    return found


# ----- what a prediction assumes


def assumptions(
    config: Config, seen: Prediction, num_prompts: int | None = None
) -> list[str]:
    """Sentences on the assumptions of the prediction of a recipe.

    Args:
        config: the recipe.
        seen: its prediction.
        num_prompts: of the task, as of `visits.visits`.
    """
    found = _on_knowledge(config, seen, num_prompts)
    if config.sampling.attempts > 1:
        found.append(
            f"Closed groups are replaced: {seen.attempts:.2f} batches are drawn per "
            f"step, and {seen.placed:.0%} of the open groups in them find a place, "
            "whatever their pass rate."
        )
    if seen.lengths:
        found.append(
            "Completions are judged by how long they are or how they end: this is for "
            "short ones that end by themselves."
        )
    return found + _on_the_loss(config) + _on_the_update(config)


def _on_knowledge(
    config: Config, seen: Prediction, num_prompts: int | None
) -> list[str]:
    """Sentences on pilots and memory, the allocator's knowledge of a prompt."""
    found = []
    if seen.known:
        source = "pilots" if config.pilot else "remembered draws"
        found.append(
            f"What is known of a prompt is taken to be {seen.known:.0f} {source} at "
            "its present pass rate; norms and lengths are taken to be all alike."
        )
    how = config.hint
    by_visit = how and (how.controller or hint_levels.recalls(how))
    if not (visits.remembers(config) or by_visit):
        return found
    known = visits.num_prompts(config) if num_prompts is None else num_prompts
    drawn = config.steps * config.sampling.prompts
    if known is None:
        found.append(
            "How many prompts the task has is not known, for its files are not "
            f"there: all are taken to come back in each of {config.steps} steps; "
            "set the options of task and model that name files."
        )
    elif visits.remembers(config) and not visits.visits(config, known):
        found.append(
            f"No prompt comes back within the run, which takes {drawn} of {known}, "
            "so that the memory it reads holds nothing; set steps to more than "
            f"{known // config.sampling.prompts}, or load a memory."
        )
    return found


def _on_the_loss(config: Config) -> list[str]:
    """Sentences on effects left out: aggregation, loss, token weights, penalties."""
    found = []
    if not sums_tokens(config):
        found.append(
            f"{_called(config.aggregate)} divides by numbers of tokens or of "
            "completions in the batch: this is up to a common factor, for completions "
            "of one length."
        )
    if not is_policy_gradient(config):
        loss = _called(config.loss)
        found.append(f"{loss} is not the policy gradient, even at ratio 1.")
    modulate = _called(config.modulate)
    if not declared(config.modulate, "constant", False):
        found.append(f"{modulate} weighs tokens, which is not counted here.")
    found += _on_the_sampler(config)
    if declared(options(config.task).get("grader"), "other_terms", False):
        found.append(
            "The reward has several terms, by graders.weighted; this is of the outcome "
            "alone, at the weight 1."
        )
    if config.kl or config.entropy_bonus:
        found.append("The KL penalty or the entropy bonus comes on top.")
    return found


def _on_the_sampler(config: Config) -> list[str]:
    """Sentences on what is optimised where completions are not drawn from the policy.

    Nothing on weights alone: sampler and trainer are taken to agree.
    """
    found = [*_on_truncation(config), *_on_a_lag(config)]
    weighs = found and sizes.corrects_sampling(config)
    return found + (_on_weights(config.sampling.off_policy) if weighs else [])


def _on_a_lag(config: Config) -> list[str]:
    """Sentences where completions are drawn before the update that precedes theirs."""
    if not config.sampling.ahead:
        return []
    drawn = "Completions are drawn one update before they train"
    if config.update.behaviour_as_old:
        return [
            f"{drawn}, and the ratio of {_called(config.loss)} is over the policy that "
            "drew (update.behaviour_as_old): w is exact for completions of one token, "
            "at the pass rate p of that policy, where its clip does not bind."
        ]
    if not sizes.corrects_sampling(config):
        return [
            f"{drawn}, and nothing corrects that: w is that of a policy that moves "
            "little in one update. sampler/drift_nats tells how far it moved."
        ]
    rule = present(config.sampling.off_policy)
    if (per := sizes.ratio_per(rule)) != "sequence":
        how = "one token at a time" if per == "token" else "by means over tokens"
        return [
            f"{drawn}, and {_called(rule)} weighs {how}: w is exact for "
            "completions of one token, at the pass rate p of the policy that drew; of "
            "longer ones the beginnings stay those of that policy."
        ]
    return [
        f"{drawn}, and {_called(rule)} weighs whole completions: p is the pass rate of "
        "the policy that drew, and w multiplies the gradient of the pass rate of the "
        "one that trains, where no weight is clipped."
    ]


def _on_truncation(config: Config) -> list[str]:
    """Sentences where top_k or top_p cuts the policy's distribution."""
    if not sizes.truncates(config):
        return []
    cut = "top_k or top_p cuts off what the policy may say"
    if config.sampling.replay_support:
        return [
            f"{cut}, and what trains is cut alike (sampling.replay_support): w "
            "multiplies the gradient of the pass rate of what is drawn, what is cut "
            "off held fixed."
        ]
    if config.update.behaviour_as_old:
        return [
            f"{cut}, and the ratio of {_called(config.loss)} is over what is drawn "
            "(update.behaviour_as_old), within its clip: prefixes and what follows "
            "stay those of what is drawn, and tokens where more is cut off than the "
            "clip allows do not learn to be less likely. No w(p) describes what is "
            "optimised."
        ]
    if not sizes.corrects_sampling(config):
        return [
            f"{cut}, and nothing corrects that: w multiplies the gradient of the pass "
            "rate of what is drawn, what is cut off held fixed. On top comes a pull on "
            "the mass kept at each token, C+ times its mean score among right "
            "completions and C- times that among wrong ones, which is not counted: no "
            "w(p) describes it. sampler/cut_mass tells how much is cut off."
        ]
    rule = present(config.sampling.off_policy)
    called = _called(rule)
    return [f"{cut}, and {_on_ratios(called, sizes.ratio_per(rule))}"]


def _on_ratios(called: str, per: str) -> str:
    """Phrase on what is optimised with the ratios of truncation that a rule takes."""
    if per == "token":
        return (
            f"{called} weighs one token at a time: prefixes and what "
            "follows stay those of what is drawn. This holds for completions of one "
            "token; of longer ones no w(p) describes what is optimised."
        )
    if per == "sequence":
        return (
            f"{called} weighs whole completions, so p is the pass rate of what is "
            "drawn, and w multiplies the gradient of the probability to be right and "
            "not cut off; E[C-] / (1 - p), wrong over 1 - p in xray.json, multiplies "
            "that of not being cut off, which comes on top. What is cut off has no "
            "part."
        )
    return (
        f"{called} weighs whole completions by a mean over their tokens, which is "
        "their ratio for those of one token alone; of longer ones no w(p) describes "
        "what is optimised."
    )


def _on_weights(rule: Any) -> list[str]:
    """Sentences on what a rule does to weights that are another rule's."""
    found = []
    while (inner := sizes.declared_option(rule, "weighs")) is not None:
        called = _called(rule)
        found.append(
            f"{called} divides weights by their mean in an update: this is up to a "
            "common factor."
            if declared(rule, "of_batch", False)
            else f"{called} drops what is outside its band, which is counted as if it "
            "were inside."
        )
        rule = inner
    return found


def _on_the_update(config: Config) -> list[str]:
    """Sentences on several updates per step, and on groups too small to learn from."""
    found = []
    if (updates := sizes.updates_of(config)) > 1:
        found.append(
            f"w is that of one update, and a step makes {updates}: the first of "
            f"{updates} updates is this; the ratios of later ones have left 1. Where "
            f"the optimizer does not rescale gradients, a step moves by {updates} w."
        )
    least, called_least = sizes.least_group(config.advantage, "advantage")
    few = sizes.declared_option(config.allocate, "floor")
    if isinstance(few, int) and few < least and called_least:
        found.append(
            f"allocate.least={few} lets a prompt draw fewer than {least} completions, "
            f"of which {called_least} learns nothing; set allocate.least to {least}."
        )
    return found


def hint_assumptions(
    config: Config, seen: Prediction, num_prompts: int | None = None
) -> list[str]:
    """Sentences on the assumptions of the prediction of hints; none without hints.

    Args:
        config: the recipe.
        seen: prediction without hints, with `hints` filled in.
        num_prompts: of the task, as of `visits.visits`.
    """
    how, hints = config.hint, seen.hints
    if not (how and hints):
        return []
    called = how.credit and _called(how.credit)
    found = [
        "w, signal and draws are with hints, bias and noise as if there were none. "
        "What writing hints costs is not counted; no hint is missing, too long or "
        "dropped.",
        {
            1: "What hinted groups train are pass rates under hints, held fixed: their "
            "coefficients, w1 and on, are not in w.",
            0: f"{called} makes hinted groups train p itself: w is the sum over all "
            "levels.",
            None: f"No coefficient of a gradient of p describes what {called} makes "
            "hinted groups train; w is of those without a hint.",
        }[hint_levels.credited(how)],
    ]
    if how.most < 1:
        found.append(
            f"At most {how.most:.0%} of the prompts of a step are hinted, in the order "
            "of the batch; what this leaves out is counted."
        )
    if any("statistics" in text for text in seen.how):
        found.append("The rest of a batch is taken to be drawn without hints.")
    recalls, often = hint_levels.recalls(how), visits.visits(config, num_prompts)
    if recalls:
        found.append(
            "A prompt has no hint until it was solved at an earlier visit, which is "
            "counted; in the end all were."
        )
    if how.controller or recalls:
        found.append(
            f"Levels are those of {often} visits of a run, at one pass rate."
            if often > 1
            else "No prompt comes back within the run, so that all are drawn without a "
            "hint; set more steps."
        )
    if not how.controller:
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.nan_to_num(np.abs(hints.weight[0] / seen.weight - 1)).max()
        if off > UNEQUAL:
            found.append(
                "Groups that are drawn again had credit, which is lost: w of groups "
                f"without a hint is up to {off:.0%} off what it is without hints."
            )
    return found


def _called(function: Any) -> str:
    """Name of a function of a config, as `module.function`."""
    return full_name(function).removeprefix("curax.")


def sums_tokens(config: Config) -> bool:
    """Whether the weight of a token is independent of the rest of the batch."""
    whole = np.ones((4, 8), bool)
    short = whole.copy()
    short[0, 4:], short[1] = False, False
    weights = [
        np.asarray(stages.called(config, "aggregate", mask)) for mask in (whole, short)
    ]
    return np.allclose(weights[0][short], weights[1][short])


def is_policy_gradient(config: Config) -> bool:
    """Whether d loss / d logp of a token is minus its credit, at ratio 1."""
    logp = -np.arange(1, 13, dtype=np.float32).reshape(4, 3) / 8
    mask = np.ones((4, 3), bool)
    credit = np.array([[1.5], [0.5], [-0.5], [-1.5]], np.float32) * mask

    @jax.jit
    def slope(now: jax.Array) -> jax.Array:
        def total(now: jax.Array) -> jax.Array:
            return jnp.sum(stages.called(config, "loss", now, logp, credit, mask))

        return jax.grad(total)(now)

    return np.allclose(slope(logp), -credit, atol=1e-3)
