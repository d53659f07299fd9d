"""Recipes, and sizes of each, by predicted progress per cost, beside a baseline.

    cost of a prompt = a T draws + b T rows trained,   T tokens per completion

and every recipe has as many prompts per step as the cost of a step pays for. Rows that
train without credit are counted, since a step computes them. `progress` says what
progress is, and under which assumptions; `course` how runs are followed. A recipe is
told apart from the baseline where the interval of its gap at the end of a run leaves
out 0 when it is widened on both sides by the worst error that was judged.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from curax.config import Config, ConfigError, load
from curax.settings import errors
from curax.settings.config_paths import describe
from curax.settings.declared import declared
from curax.settings.machine import cores
from curax.settings.recipes import recipes
from curax.settings.sizes import checkpoint_of
from curax.theory import course, predict, progress, sizes, visits
from curax.theory.moments import rows_per_prompt
from curax.theory.population import Population, means
from curax.theory.sizes import Size
from curax.theory.stated_objective import claimed
from curax.theory.summary import pass_rates

BELIEFS = (0.1, 1.0, 10.0)  # factors of both beliefs over which a ratio is shown
# Of a run whose time scale nobody knows: shares of what is unsolved that the baseline
# solves until it ends; the middle one is shown.
SOLVED = (0.1, 0.3, 0.6)
STEPS = 200  # of a run, where nothing says how many
SCALES = np.geomspace(1e-4, 30, 40)  # lengths of a step that are tried
POINTS = 32  # stretches of a run
# The worst that a predicted gap to RLOO missed a measured one by, in the picture of
# experiments/map/README.md, which a test holds beside these two: of recipes with a
# fixed number of draws, 2 at least; of those which draw until a rule says that they are
# done. Pilots and n = 1 were never judged, and get the larger. Judged were predictions
# by measured gradients, in steps of a known length; by the default beliefs, in six
# regimes of the map, the worst at a fixed number was .161.
WORST, WORST_DRAWN, BY_DEFAULT = 0.09, 0.29, 0.17
BASELINE = "rloo"  # what all were measured beside
# What was measured of right completions alone, `right_only`, beside RLOO at equal
# tokens drawn, nearest to a mean pass rate before RL up to this; figures of
# docs/choose_a_recipe.md, as a test asks.
MEASURED = {
    0.1: "next to nothing is right and no prompt comes back: +.110 ± .058 on chains",
    0.18: "an eighth to a sixth is right: +.036 ± .026 on text, over six starts",
    0.45: "a fifth to a third is right: +.028 ± .020 on text, over six starts",
    1.0: "most is right: neither lead nor loss shown, +.006 ± .009 on chains",
}


@dataclass(frozen=True, kw_only=True)
class Known:
    """Quantities known or assumed before training: pass rates, costs, kappa, rho."""

    population: Population
    prompts: int  # K, training prompts
    visits: int | None = None  # of a run to each prompt; None: by steps and prompts
    steps: int | None = None  # of a run; None: those of each recipe
    loaded: bool = False  # a run starts from the memory that gave the pass rates
    cost: tuple[float, float] = (1.0, 1.0)  # of a token drawn, of a token trained
    budget: int = 128  # completions whose draw and training a step costs as much as
    tokens: float | None = None  # per completion; None: as measured, else all alike
    references: bool = False  # prompts have reference solutions
    # As measured on the embedded task (docs/choose_a_recipe.md).
    shared: float = 0.02  # rho, cosine of the gradients of two prompts
    explained: float = 0.3  # kappa, share of a score that lies along the outcome
    varied: float = 1.0  # nu, how far right completions vary against wrong ones
    by_rate: progress.ByRate | None = None  # kappa, G^2, rho by pass rate, if measured


class Candidates(NamedTuple):
    """Recipes to compare, and why others are not."""

    configs: dict[str, Config]
    alike: dict[str, list[str]]  # other names of recipes with the same credit
    skipped: list[str]  # sentences
    baselines: tuple[str, ...] = (BASELINE,)  # the first that can be followed


# ----- which recipes


def candidates(own: Mapping[str, Config], *, references: bool) -> Candidates:
    """Recipes to compare: those of configs/ and the user's own, where predictable.

    Files that take another recipe to a checkpoint are left out, and recipes whose
    credit is that of another are compared once. The user's own are baselines, and
    BASELINE after them.

    Args:
        own: configs by name, compared besides.
        references: whether prompts have reference solutions.
    """
    found, why_not = dict(own), dict[str, list[str]]()
    for name, path in recipes().items():
        config = load(path)
        if name not in found and config.steps and not checkpoint_of(config):
            found[name] = config
    kept: dict[Any, str] = {}
    alike: dict[str, list[str]] = {}
    for name in sorted(found, key=lambda name: _order(name, found[name], own)):
        config = found[name]
        if why := _unpredicted(config, references):
            why_not.setdefault(why, []).append(name)
            continue
        same = kept.setdefault(_credit_of(config), name)
        if same != name:
            alike.setdefault(same, []).append(name)
    skipped = [f"{', '.join(names)}: {why}" for why, names in why_not.items()]
    configs = {name: found[name] for name in kept.values()}
    return Candidates(configs, alike, skipped, (*own, BASELINE))


def _order(name: str, config: Config, own: Mapping[str, Config]) -> tuple[Any, ...]:
    """Sort key that puts the plainest name of alike recipes first."""
    plain = declared(config.modulate, "constant", False)
    return name not in own, not plain, name == "quickstart", len(name), name


def _unpredicted(config: Config, references: bool) -> str | None:
    """Reason why a recipe is left out, the end of a sentence; None if it is not."""
    if config.reflection and not references:
        return "rewards by reference answers, and there are none."
    if config.reflection:
        return "rewards by the log-prob of references, which follow no pass rate."
    if config.hint and not (references or declared(config.hint.source, "recall", None)):
        return "hints from reference solutions, and there are none."
    if config.hint:
        return (
            "groups drawn again with hints, whose noise is not predicted; each has an "
            "x-ray of its own."
        )
    return None


def _credit_of(config: Config) -> tuple[Any, ...]:
    """Key of all that a recipe's credit depends on; equal for alike recipes."""
    fields = ("allocate", "objective", "gate", "downsample", "correct", "advantage")
    fields += ("shape_reward", "pool_statistics", "memory", "stop")
    written = [repr(describe(getattr(config, name))) for name in fields]
    return sizes.size_of(config), *written


# ----- one size


def predicted(config: Config, size: Size, known: Known) -> dict[str, Any] | str:
    """Draws, cost and progress of a recipe at a size; an error sentence if refused.

    Args:
        config: the recipe.
        size: sizes per prompt; the number of prompts follows from the cost of a step.
        known: what is known before training.
    """
    a, b = known.cost
    guess = size.draws / (2 if config.stop else 1) * (1 + size.attempts) / 2
    spent = (guess + size.pilots) * a + min(size.draws, size.kept) * b
    prompts = max(round(known.budget * (a + b) / spent), 1)
    rates = known.population.rates
    p = np.unique(rates)
    p = p if len(p) <= 32 else pass_rates()
    try:
        sized = sizes.resized(config, size, min(prompts, known.prompts))
        held, often = _memory(sized, known)
        with errors.config_errors(sized):
            seen = predict.predict(sized, p, rates, remembered=held, often=often)
    except ConfigError as error:
        return str(error)
    mean = partial(seen.mean, rates)
    if not (np.isfinite(seen.noise) & np.isfinite(seen.spread)).all():
        return f"it gives no weight to prompts of p={p[seen.weight == 0][0]:.2g}."
    lengths = np.ones_like(p) * (known.tokens or 1.0)
    each = means(known.population, known.population.tokens, p)
    if known.tokens is None and each is not None:
        lengths = each
    drawn = mean(seen.draws) * seen.attempts
    trained = rows_per_prompt(sized) * sized.update.epochs
    whole = mean(lengths) * known.budget * (a + b)
    spent = a * mean(seen.draws * lengths) * seen.attempts + b * trained * mean(lengths)
    share = whole / spent  # prompts per step at this cost, not rounded
    if not 0.5 <= share < known.prompts + 0.5:
        return f"a step of this cost has {share:.2g} prompts, of {known.prompts}."
    return {
        "n": size.draws,
        "most": size.most,
        "m": min(size.draws, size.kept),
        "pilots": size.pilots,
        "attempts": size.attempts,
        "prompts": max(round(share), 1),
        "draws": drawn * share,
        "trained": trained * share,
        "exact": not seen.how,
        "visits": often,
        "error": missed(known)[bool(sized.stop or sized.pilot or size.draws < 2)],
        "remark": remark(sized, seen, mean(seen.draws), back=bool(held or often)),
        "moments": None
        if sized.sampling.attempts > 1
        else course.of_prediction(
            seen,
            (a * seen.draws * lengths + b * trained * mean(lengths))
            / (mean(lengths) * (a + b)),
            share,
        ),
    } | _ratios(seen, sized, known, share)


def _memory(config: Config, known: Known) -> tuple[float | None, int]:
    """Draws of a prompt in a memory that is loaded, if any, and visits to a prompt."""
    draws = known.population.draws
    held = float(draws.mean()) if known.loaded and draws is not None else None
    if known.visits is not None:
        return held, known.visits
    steps = config.steps if known.steps is None else known.steps
    return held, visits.visits(replace(config, steps=steps), known.prompts)


def _sizes(config: Config, known: Known) -> list[Size]:
    """Sizes to predict: only the recipe's own where allocation lacks its memory."""
    held, often = _memory(config, known)
    if visits.remembers(config) and held is None and not often:
        return [sizes.size_of(config)]
    return list(sizes.grid(config))


def _ratios(
    seen: predict.Prediction, sized: Config, known: Known, share: float
) -> dict[str, Any]:
    """Progress at the assumed kappa and rho, and at BELIEFS times both of them."""
    square = means(known.population, known.population.square, seen.p)
    square = 1.0 if square is None else square
    share_of, axes = known.explained, np.full((1, len(seen.p)), known.shared**0.5)
    if known.by_rate:
        share_of, square, axes = known.by_rate.at(seen.p)

    def at(by_shared: float, by_explained: float) -> progress.Progress:
        explained = np.minimum(share_of * by_explained, 1.0)
        return progress.progress(
            seen,
            known.population.rates,
            progress.believed(seen.p, explained, square, known.varied),
            axes=progress.at_most_one(axes * by_shared**0.5),
            prompts=sized.sampling.prompts,
            attempts=sized.sampling.attempts,
            total=known.prompts,
        )

    own = at(1.0, 1.0)
    both = itertools.product(BELIEFS, repeat=2)
    return {
        "progress": own.of(share),
        "limit": own.limit,
        "noise_prompts": own.noise,
        "beliefs": [at(*factors).of(share) for factors in both],
    }


def _ends(moments: course.Recipe, known: Known) -> np.ndarray:
    """`[BELIEFS^2, SCALES]` mean held-out pass rates at which a run ends."""
    rates = course.binned(known.population.rates)
    if known.by_rate:
        gradients = course.of_rates(known.by_rate, known.varied)
    else:
        beliefs = known.explained, known.varied, known.shared
        gradients = course.of_beliefs(*beliefs)
    steps = STEPS if known.steps is None else known.steps
    found = [
        course.course(
            moments,
            rates,
            gradients.believed(*factors),
            SCALES,
            budget=float(steps * known.budget),
            total=float(known.prompts),
            step="length",
            points=POINTS,
        ).mean[-1]
        for factors in itertools.product(BELIEFS, repeat=2)
    ]
    return np.stack(found)


def missed(known: Known) -> tuple[float, float]:
    """By how much a gap at the end may be wrong: of fixed draws, and of others."""
    return (WORST if known.by_rate else BY_DEFAULT), WORST_DRAWN


def follow(rows: Sequence[dict[str, Any]], base: dict[str, Any], known: Known) -> None:
    """Add where a run ends to the best size of each recipe, beside the baseline.

    "end" is the mean pass rate of held-out prompts where the run of the middle belief
    ends, whose baseline solves SOLVED[1] of what was unsolved; "beside", "beside_low"
    and "beside_high" are its difference to the baseline there, and the least and the
    most over BELIEFS and SOLVED, widened by "error". All four are None where batches
    are filled by drawing again, which is needed more or less often on the way. "told"
    is "above", "below" or "not told apart" from the baseline, by that interval.

    Args:
        rows: of `rank`, the best first; "moments" are taken off.
        base: one of them, the baseline, whose "moments" are not None.
        known: what is known before training.
    """
    every = {id(row): row.pop("moments") for row in rows}
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        best.setdefault(row["recipe"], row)
    other, at = _ends(every[id(base)], known), np.arange(len(SCALES))
    start = float(known.population.rates.mean())
    levels = [start + (1 - start) * share for share in SOLVED]
    places = [[course.reaching(own, level) for level in levels] for own in other]

    def read(ends: np.ndarray) -> np.ndarray:  # [BELIEFS^2, SOLVED]
        pairs = zip(places, ends, strict=True)
        return np.array([np.interp(place, at, own) for place, own in pairs])

    beside = read(other)
    middle = len(places) // 2, len(SOLVED) // 2
    for row in best.values():
        moments = every[id(row)]
        if moments is None:
            names = "end", "beside", "beside_low", "beside_high"
            row |= dict.fromkeys(names) | {"told": "not followed"}
            continue
        own = read(_ends(moments, known))
        gap = own - beside
        error = 0.0 if row is base else max(row["error"], base["error"])
        low, high = float(gap.min()) - error, float(gap.max()) + error
        row |= {"end": float(own[middle]), "beside": float(gap[middle])}
        row |= {"beside_low": low, "beside_high": high}
        told = "above" if low > 0 else "below" if high < 0 else "not told apart"
        row["told"] = "the baseline" if row is base else told


def remark(
    config: Config, seen: predict.Prediction, draws: float, *, back: bool
) -> str:
    """Short remark on a recipe: memory, pilots, batches, draws or objective.

    Args:
        config: the recipe, sized.
        seen: its prediction.
        draws: of a prompt, mean over prompts.
        back: whether a memory holds anything when it is read.
    """
    if visits.remembers(config):
        if not back:
            return "no prompt comes back: nothing is remembered"
        if not seen.known:
            return "all prompts draw alike: what is remembered decides nothing"
        return f"remembers {seen.known:.0f} draws of a prompt"
    if config.pilot:
        return f"{config.pilot.draws / draws:.0%} of its draws are pilots"
    if config.sampling.attempts > 1:
        most = config.sampling.attempts
        return f"{seen.attempts:.1f} batches drawn to fill one, {most} at most"
    if config.stop:
        low, high = seen.draws.min(), seen.draws.max()
        return f"{low:.0f} to {high:.0f} draws, by pass rate"
    claim = claimed(config).name
    return "asks for p" if claim == "p" else f"asks for {claim}, judged by p"


# ----- all of them


def rank(
    among: Candidates,
    known: Known,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Recipes in their sizes, by progress at one cost of a step, as JSON.

    Args:
        among: of `candidates`.
        known: what is known before training.
        on_progress: called with how many sizes are done, and of how many.

    Returns:
        "rows", a size of a recipe each, by "gain", the most first: its progress over
        that of the baseline at its best size, with the least and the largest over
        beliefs; the best size of each recipe with what `follow` adds; a sentence under
        "measured"; and sentences under "notes", and under "skipped" on the recipes
        left out.

    Raises:
        ConfigError: no baseline could be predicted.
    """
    work = [
        (name, size)
        for name, one in among.configs.items()
        for size in _sizes(one, known)
    ]
    rows, refused = [], {}
    # Nearly all is compiling, which releases Python's lock.
    with ThreadPoolExecutor(min(cores(), 4)) as pool:
        found = pool.map(lambda of: predicted(among.configs[of[0]], of[1], known), work)
        for done, ((name, _), row) in enumerate(zip(work, found, strict=True), 1):
            if isinstance(row, str):
                refused.setdefault(name, row)
            else:
                rows.append({"recipe": name} | row)
            on_progress(done, len(work))
    rows.sort(key=lambda row: (-round(row["progress"], 9), row["n"]))
    base = _baseline(among, rows)
    if base is None:
        name = among.baselines[-1]
        why = refused.get(name, "it is not there.").rstrip(".")
        raise ConfigError(
            f"{name}, with which all are compared, cannot be predicted ({why}); change "
            "--budget or --prompts."
        )
    other = base["progress"], base["beliefs"]
    for row in rows:
        pairs = zip(row.pop("beliefs"), other[1], strict=True)
        ratios = [own / best for own, best in pairs]
        row["gain"], row["baseline"] = row["progress"] / other[0], row is base
        row["gain_low"], row["gain_high"] = min(ratios), max(ratios)
    follow(rows, base, known)
    ranked = {row["recipe"] for row in rows}
    skipped = [f"{name}: {why}" for name, why in refused.items() if name not in ranked]
    given = ("prompts", "visits", "cost", "budget", "tokens")
    beliefs = ("shared", "explained", "varied")
    return {
        "population": known.population.source,
        **{name: getattr(known, name) for name in (*given, *beliefs)},
        "by_rate": known.by_rate is not None,
        "steps": STEPS if known.steps is None else known.steps,
        "solved": SOLVED,
        "rows": rows,
        "alike": among.alike,
        "caveat": UNSHOWN,
        "errors": missed(known),
        "measured": next(
            text
            for most, text in MEASURED.items()
            if known.population.rates.mean() <= most
        ),
        "notes": _notes(among, known),
        "skipped": among.skipped + skipped,
    }


# Spearman's correlations of the tables of experiments/map/README.md, as a test asks.
UNSHOWN = (
    "No rank: with runs that were tuned and measured the order of steps had rank "
    "correlations of -.90 to +.56, that of ends of -.52 to +.95."
)


def _baseline(
    among: Candidates, rows: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """The best row of the first baseline whose best size can be followed, if any."""
    for name in among.baselines:
        also = (one for one, others in among.alike.items() if name in others)
        name = next(also, name)
        best = next((row for row in rows if row["recipe"] == name), None)
        if best and best["moments"] is not None:
            return best
    return None


def _notes(among: Candidates, known: Known) -> list[str]:
    """Sentences on empty memories, token weights and the meaning of progress."""
    found = []
    idle = [
        name
        for name, one in among.configs.items()
        if visits.remembers(one) and _memory(one, known) == (None, 0)
    ]
    if idle:
        found.append(
            "No prompt comes back, so that a memory holds nothing when it is read, and "
            f"{', '.join(sorted(idle))} draw as for prompts never seen; more visits "
            "change that, or memory.load."
        )
    uncounted = [
        name
        for name, one in among.configs.items()
        if not declared(one.modulate, "constant", False)
    ]
    if uncounted:
        found.append(f"Token weights are not counted: {', '.join(uncounted)}.")
    found.append(
        "Progress is that of the pass rate, averaged over the prompts: a recipe that "
        "asks for another objective on purpose is judged by it all the same."
    )
    return found
