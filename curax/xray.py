"""python -m curax.xray: the objective a recipe really optimises, before any training.

Draws what `predict` computes, as a table, a picture and JSON, and says in words where
the recipe departs from the objective it states.
"""

import glob
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curax.config import (
    Config,
    ConfigError,
    describe,
    least_group,
    load,
    option,
    override,
    truncates,
    updates_of,
)
from curax.settings.cli import Parser, survives_closed_output, write_whole
from curax.settings.config_paths import full_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from curax.theory.predict import Prediction
    from curax.theory.stated_objective import Claim

SHOWN = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
LOWEST = 0.001  # pass rates are looked at from here to 1 - LOWEST
SIDES = (0.05, 0.95)  # where a weight is compared with what was asked for
FAR = 1.5  # a weight so many times too large, or too small, is told
NEAR = 1.3  # an objective that a weight follows within this factor has a name
CLOSE = 1.2  # within this, a weight is what the draws leave of what was asked for
BINS = 20  # of the histogram of pass rates
BIASED = 0.02  # a pass rate that is off by more is told
LIFT = 1.0  # nats that each level of a hint adds to the log-odds of a pass rate
UNEQUAL = 0.005  # a weight that hints change by more is told
STRONG = 20.0  # no level is believed to add more


class Prompts(NamedTuple):
    """The prompts that a recipe is looked at with."""

    source: str  # where they come from
    rates: np.ndarray  # [K] pass rates, all equally likely
    draws: np.ndarray | None = None  # [K] completions that a memory holds of each
    tokens: np.ndarray | None = None  # [K] the sum of their lengths


def parser() -> Parser:
    """The command line."""
    result = Parser(
        prog="python -m curax.xray",
        allow_abbrev=False,
        description="Compute which objective a recipe really optimises.",
        epilog="The folder gets xray.json and xray.png.",
    )
    result.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="the recipe, a Python file or the name of one in configs/",
    )
    result.add_assignments()
    prompts = result.add_mutually_exclusive_group()
    prompts.add_argument(
        "--beta",
        nargs=2,
        type=float,
        default=(1.0, 1.0),
        metavar=("A", "B"),
        help="pass rates of the prompts: Beta(A, B) (default: 1 1, all equally likely)",
    )
    prompts.add_argument(
        "--memory",
        metavar="FILE",
        help="memory.jsonl of a run: pass rates, and lengths, as measured there",
    )
    result.add_argument(
        "--lift",
        type=float,
        metavar="NATS",
        help="what each level of a hint adds to the log-odds of a pass rate (default: "
        f"{LIFT:g}); for recipes with hints",
    )
    result.add_argument(
        "--workdir", metavar="DIR", help="where to write (default: runs/xray/NAME)"
    )
    return result


@survives_closed_output
def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # A run may be using the accelerator, and none is needed here.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        args = parser().parse_args(argv)
        path = Path(args.config)
        name = path.parent.name if path.stem == "config" else path.stem
        workdir = Path(args.workdir or Path("runs", "xray", name))
        config = override(load(path), args.assignments)
        prompts = measured(Path(args.memory)) if args.memory else believed(*args.beta)
        lift = lifting(config, args.lift)
        made(workdir)
        found = look(config, prompts, lift, number=number_of_prompts(config))
        page = {"recipe": name, "config": args.config, "set": args.assignments} | found
        data = json.dumps(page, indent=1, allow_nan=False) + "\n"
        files = {"xray.json": data.encode(), "xray.png": picture(name, found)}
        for file, content in files.items():
            written(workdir / file, content)
        print(table(name, found))
        print(f"Written: {workdir}/xray.json, {workdir}/xray.png")
    except ConfigError as error:
        print(f"curax.xray: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def made(workdir: Path) -> None:
    """Make the folder, so that one that cannot be is told before the work.

    Raises:
        ConfigError: it cannot.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not os.access(workdir, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ConfigError(
            f"--workdir {workdir} cannot be written to ({error.strerror}); name a "
            "folder that can."
        ) from error


def written(path: Path, content: bytes) -> None:
    """Write a file whole.

    Raises:
        ConfigError: it cannot be written; what was there is as it was.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); name another --workdir."
        ) from error


# ----- which prompts


def measured(path: Path) -> Prompts:
    """Prompts of a memory.jsonl; pass rates are smoothed by Beta(1, 1).

    Raises:
        ConfigError: in a sentence with file, line and fix, if it cannot be read.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise ConfigError(
            f"--memory {path} cannot be read ({why}); name the memory.jsonl of a run."
        ) from error
    rows: list[list[float]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        sums = _sums(line)
        if sums is None:
            raise ConfigError(
                f"--memory {path}:{number}: no JSON object with numbers solved <= "
                "draws, and tokens; mend or delete this line."
            )
        if sums[0] > 0:
            rows.append(sums)
    if not rows:
        raise ConfigError(
            f"--memory {path}: it has no prompt; name that of a real run."
        )
    draws, solved, tokens = np.array(rows, np.float64).T
    rates = (solved + 1) / (draws + 2)
    return Prompts(str(path), np.clip(rates, LOWEST, 1 - LOWEST), draws, tokens)


def _sums(line: str) -> list[float] | None:
    """Draws, solved and tokens of a line, None if it is not one of a memory."""
    try:
        row = json.loads(line)
        sums = [row[name] for name in ("draws", "solved", "tokens")]
    except (ValueError, KeyError, TypeError):
        return None
    whole = all(type(value) in (int, float) and 0 <= value < 1e30 for value in sums)
    return sums if whole and sums[1] <= sums[0] else None


def believed(a: float, b: float, count: int = 200) -> Prompts:
    """Prompts whose pass rates are evenly spaced quantiles of a Beta(a, b).

    Raises:
        ConfigError: if there is no such distribution.
    """
    if not (0 < a < 1e6 and 0 < b < 1e6):
        raise ConfigError(
            f"--beta {a:g} {b:g}: both must be above 0, and below a million; write 1 1."
        )
    # The density of log(p / (1 - p)) has tails like exp(a x) and exp(-b x).
    x = np.concatenate([-np.geomspace(50 / min(a, 1), 1e-6, 20_000), [0.0]])
    x = np.concatenate([x, np.geomspace(1e-6, 50 / min(b, 1), 20_000)])
    log_density = -a * np.logaddexp(0, -x) - b * np.logaddexp(0, x)
    density = np.exp(log_density - log_density.max())
    steps = (density[1:] + density[:-1]) / 2 * np.diff(x)
    total = np.concatenate([[0.0], np.cumsum(steps)])
    at = (np.arange(count) + 0.5) / count
    rates = 1 / (1 + np.exp(-np.interp(at, total / total[-1], x)))
    return Prompts(f"Beta({a:g}, {b:g})", np.clip(rates, LOWEST, 1 - LOWEST))


def number_of_prompts(config: Config) -> int | None:
    """Prompts of the task; None where its files, or those of the model, are not there.

    Task, model and optimizer are made as a run makes them, so that what a run refuses
    of them is refused here.

    Raises:
        ConfigError: they cannot be made.
    """
    from curax.step import build, stages
    from curax.theory import predict

    if absent(config):
        return predict.num_prompts(config)
    with stages.config_errors(config):
        return build.build(config).task.num_prompts


def absent(config: Config) -> list[str]:
    """Options of task and model that name a file, or a folder, that is not there."""
    named = {
        "model.path": option(config.model, "path"),
        "task.tokenizer": option(config.task, "tokenizer"),
        "task.train": option(config.task, "train"),
        "task.held_out": option(config.task, "held_out"),
    }
    return [
        name
        for name, path in named.items()
        if isinstance(path, str) and not (Path(path).exists() or glob.glob(path))
    ]


def lifting(config: Config, lift: float | None) -> float:
    """What a level of hints is believed to do.

    Raises:
        ConfigError: if nobody could, or the recipe has no hints.
    """
    if lift is not None and config.hint is None:
        raise ConfigError(
            f"--lift {lift:g} is what hints do, and this recipe has none; leave it out "
            "or set hint."
        )
    lift = LIFT if lift is None else lift
    if not abs(lift) <= STRONG:
        raise ConfigError(
            f"--lift {lift:g}: it must be within {STRONG:g} nats of 0; write {LIFT:g}."
        )
    return lift


def lengths(prompts: Prompts, p: np.ndarray) -> np.ndarray | None:
    """`[R]` tokens per completion near each pass rate, None if they are not known.

    Of a tenth of the prompts, 20 at least: those that stand nearest by pass rate.
    """
    if prompts.draws is None or prompts.tokens is None:
        return None
    size = len(prompts.rates)
    count = min(max(20, size // 10), size)
    order = np.argsort(prompts.rates, kind="stable")
    middle = np.searchsorted(prompts.rates[order], p)
    start = np.clip(middle - count // 2, 0, size - count)
    tokens, draws = (
        np.concatenate([[0.0], np.cumsum(sums[order])])
        for sums in (prompts.tokens, prompts.draws)
    )
    return (tokens[start + count] - tokens[start]) / (
        draws[start + count] - draws[start]
    )


# ----- what is said


def look(
    config: Config, prompts: Prompts, lift: float = LIFT, *, number: int | None = None
) -> dict[str, Any]:
    """Everything that is said of a recipe, ready for JSON.

    Args:
        config: the recipe.
        prompts: that it is looked at with.
        lift: nats that each level of a hint adds to the log-odds of a pass rate.
        number: prompts of the task, as of `predict.visits`.

    Raises:
        ConfigError: in a sentence, if its functions do not take what they are given, or
            if its rewards are no outcomes.
    """
    from curax.step import rehearsal, stages
    from curax.theory import predict, stated_objective

    if config.reflection:
        raise ConfigError(
            "reflection pays for the log-prob of reference answers, and the x-ray "
            "asks what becomes of right and wrong ones; set reflection to None."
        )
    ends = math.log(LOWEST / (1 - LOWEST))
    dense = 1 / (1 + np.exp(-np.linspace(ends, -ends, 30)))
    p = np.unique(np.concatenate([SHOWN, dense, np.arange(3, 18) / 20]).round(6))
    held = None if prompts.draws is None else float(prompts.draws.mean())
    with stages.config_errors(config):
        rehearsal.check(config)
        plain = predict.predict(
            config, p, prompts.rates, remembered=held, lift=lift, prompts=number
        )
        seen = predict.with_hints(config, plain)
        claim = stated_objective.claimed(config)
        asked = claim.slope(p) if claim.slope else np.full_like(p, np.nan)
        reach = stated_objective.reached(claim, seen)
        notes = remarks(config, seen, number)
        notes += remarks_on_hints(config, plain, number)

    def average(values: np.ndarray) -> float:
        return float(np.interp(prompts.rates, p, values).mean())

    draws = seen.draws * seen.attempts
    each = lengths(prompts, p)
    tokens = draws * (config.sampling.max_tokens if each is None else each)
    group = max(round(average(plain.draws * plain.attempts)), 2)
    _, grpo = stated_objective.grpo(group, p)
    known = stated_objective.family((config.sampling.group_size, group))
    over = stated_objective.distance(seen.weight, asked, p)
    off, limited = differences(p, over, claim.name), False
    if reach is not None:
        known[f"{claim.name} as far as its draws reach"] = lambda _: reach
        rest = stated_objective.distance(seen.weight, reach, p)
        rest = rest[(p >= SIDES[0]) & (p <= SIDES[1])]
        limited = bool(((rest < CLOSE) & (rest > 1 / CLOSE)).all())
    if limited:
        few = f"Its draws reach {claim.name} only so far: it"
        notes = [f"{few} {text}" for text in off] + notes
        off = []
    name, factor = stated_objective.nearest(seen.weight, p, known)
    columns = {
        "p": p,
        "weight": seen.weight,
        "half_interval": seen.half,
        "objective": stated_objective.integral(seen.weight, p),
        "claimed_weight": asked,
        "claimed_objective": stated_objective.integral(asked, p),
        "over_claimed": over,
        "signal": seen.signal,
        "draws": draws,
        "tokens": tokens,
        "pass_rate_bias": seen.rate - p,
        "noise_against_grpo": seen.noise / seen.placed / grpo,
        "spread": seen.spread,
        "right": seen.right,
        "wrong": seen.wrong,
    }
    result = {
        "population": prompts.source,
        "claim": claim.name,
        "nearest": name,
        "nearest_factor": _number(factor),
        "exact": not seen.how,
        "averaged": list(seen.how),
        "mean": {
            "draws": average(draws),
            "tokens": average(tokens),
            "signal": average(seen.signal),
            "pass_rate_bias": _number(average(columns["pass_rate_bias"])),
        },
        "tokens_are": "at most" if each is None else "as measured",
        "updates_per_step": updates_of(config),
        "grpo_group": group,
        "histogram": (
            np.histogram(prompts.rates, BINS, (0, 1))[0] / len(prompts.rates)
        ).tolist(),
        "by_pass_rate": {
            key: [_number(value) for value in column] for key, column in columns.items()
        },
        "warnings": off + warnings(claim, seen),
        "notes": notes,
    }
    if plain.hints:
        result["hints"] = of_hints(config, plain, lift, average)
    return result


def of_hints(
    config: Config,
    seen: "Prediction",
    lift: float,
    average: Callable[[np.ndarray], float],
) -> dict[str, Any]:
    """What is said of hints, ready for JSON; lists by level begin without a hint."""
    from curax.theory import hint_levels

    hints, how = seen.hints, config.hint
    assert hints
    assert how
    columns = {
        "pass_rate": hints.p,
        "drawn": hints.drawn,
        "trains": hints.trains,
        "weight": hints.weight,
        "signal": hints.signal,
        "draws": hints.draws,
    }
    if hints.end is not None and hints.end_weight is not None:
        columns |= {"end": hints.end, "end_weight": hints.end_weight}

    def numbers(values: np.ndarray) -> list[Any]:
        return [_number(x) if x.ndim == 0 else numbers(x) for x in values]

    return {
        "lift": lift,
        "levels": how.levels,
        "gradient": {1: "hint", 0: "prompt", None: None}[hint_levels.credited(how)],
        "controller": how.controller is not None,
        "signal_without": numbers(seen.signal),
        "mean": {
            "signal_without": average(seen.signal),
            "drawn": [average(row) for row in hints.drawn],
            "trains": [average(row) for row in hints.trains],
        },
        "by_level": {key: numbers(rows) for key, rows in columns.items()},
    }


def _number(value: float) -> float | None:
    """What JSON has of a number."""
    return float(value) if math.isfinite(value) else None


def differences(p: np.ndarray, over: np.ndarray, name: str) -> list[str]:
    """What an objective asks to be weighted otherwise, as ends of sentences."""
    told = []
    for side in SIDES:
        times = float(np.interp(side, p, over))
        if times > FAR:
            told.append(f"weights p={side:g} prompts {times:.1f}x more than {name}.")
        elif 0 < times < 1 / FAR:
            told.append(
                f"weights p={side:g} prompts {1 / times:.1f}x less than {name}."
            )
    return told


def warnings(claim: "Claim", seen: "Prediction") -> list[str]:
    """What else is not as it should be, as ends of sentences."""
    p, told = seen.p, []
    inside = (p >= SIDES[0]) & (p <= SIDES[1])
    backwards = p[inside & ~(seen.weight > 0)]
    if backwards.size:
        told.append(
            f"gives no weight to prompts of p={backwards[0]:.2g} to "
            f"{backwards[-1]:.2g}, or pushes them down."
        )
    if claim.slope is None:
        told.append("states no objective; set claim to a function f of the pass rate.")
    bias = np.nan_to_num(seen.rate - p)
    worst = np.abs(bias).argmax()
    if abs(bias[worst]) > BIASED:
        told.append(
            f"stops at pools whose pass rates are off by up to {bias[worst]:+.2f}, at "
            f"p={p[worst]:.2g}."
        )
    return told


def remarks(config: Config, seen: "Prediction", number: int | None = None) -> list[str]:
    """What all that is said takes for granted, in sentences.

    Args:
        config: the recipe.
        seen: of it.
        number: prompts of the task, as of `predict.visits`.
    """
    from curax.theory import predict

    def called(field: str) -> str:
        return describe(getattr(config, field))["function"].removeprefix("curax.")

    told = []
    if seen.known:
        source = "pilots" if config.pilot else "remembered draws"
        told.append(
            f"What is known of a prompt is taken to be {seen.known:.0f} {source} at "
            "its present pass rate; norms and lengths are taken to be all alike."
        )
    how = config.hint
    if predict.remembers(config) or (how and how.controller):
        known = predict.num_prompts(config) if number is None else number
        drawn = config.steps * config.sampling.prompts
        if known is None:
            told.append(
                "How many prompts the task has is not known, for its files are not "
                f"there: all are taken to come back in each of {config.steps} steps; "
                "set the options of task and model that name files."
            )
        elif predict.remembers(config) and not predict.visits(config, known):
            told.append(
                f"No prompt comes back within the run, which takes {drawn} of {known}, "
                "so that the memory it reads holds nothing; set steps to more than "
                f"{known // config.sampling.prompts}, or load a memory."
            )
    if config.sampling.rounds > 1:
        told.append(
            f"Closed groups are replaced: {seen.attempts:.2f} batches are drawn per "
            f"step, and {seen.placed:.0%} of the open groups in them find a place, "
            "whatever their pass rate."
        )
    if seen.lengths:
        told.append(
            "Completions are judged by how long they are or how they end: this is for "
            "short ones that end by themselves."
        )
    if not predict.sums_tokens(config):
        told.append(
            f"{called('aggregate')} divides by numbers of tokens or of completions in "
            "the batch: this is up to a common factor, for completions of one length."
        )
    if not predict.is_policy_gradient(config):
        told.append(f"{called('loss')} is not the policy gradient, even at ratio 1.")
    if called("modulate") != "modulate.none":
        told.append(f"{called('modulate')} weighs tokens, which is not counted here.")
    if truncates(config):
        told.append(
            "top_k or top_p cuts off what the policy may say, and nothing corrects "
            "that: all scores are biased, which is not counted here; sampler/cut_mass "
            "tells how much is cut off."
        )
    if config.kl or config.entropy_bonus:
        told.append("The KL penalty or the entropy bonus comes on top.")
    if (updates := updates_of(config)) > 1:
        told.append(
            f"w is that of one update, and a step makes {updates}: the first of "
            f"{updates} updates is this; the ratios of later ones have left 1. Where "
            f"the optimizer does not rescale gradients, a step moves by {updates} w."
        )
    least, called_least = least_group(config.advantage, "advantage")
    few = option(config.allocate, "least")
    if isinstance(few, int) and few < least:
        told.append(
            f"allocate.least={few} lets a prompt draw fewer than {least} completions, "
            f"of which {called_least} learns nothing; set allocate.least to {least}."
        )
    return told


def remarks_on_hints(
    config: Config, seen: "Prediction", number: int | None = None
) -> list[str]:
    """What is taken for granted of hints, in sentences.

    Args:
        config: the recipe.
        seen: as if there were no hints, but for `hints`.
        number: prompts of the task, as of `predict.visits`.
    """
    from curax.theory import hint_levels, predict

    how, hints = config.hint, seen.hints
    if not (how and hints):
        return []
    called = full_name(how.credit).removeprefix("curax.") if how.credit else ""
    told = [
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
        told.append(
            f"At most {how.most:.0%} of the prompts of a step are hinted, in the order "
            "of the batch; what this leaves out is counted."
        )
    if any("statistics" in text for text in seen.how):
        told.append("The rest of a batch is taken to be drawn without hints.")
    visits = predict.visits(config, number)
    if how.controller and visits > 1:
        told.append(f"Levels are those of {visits} visits of a run, at one pass rate.")
    elif how.controller:
        told.append(
            "No prompt comes back within the run, so that all are drawn without a "
            "hint; set more steps."
        )
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.nan_to_num(np.abs(hints.weight[0] / seen.weight - 1)).max()
        if off > UNEQUAL:
            told.append(
                "Groups that are drawn again had credit, which is lost: w of groups "
                f"without a hint is up to {off:.0%} off what it is without hints."
            )
    return told


def verdict(found: Mapping[str, Any]) -> str:
    """Which objective is followed, in words."""
    factor = found["nearest_factor"]
    if factor is None:
        return "follows no objective: some weights are not positive"
    if factor > NEAR:
        return f"follows none of the known, up to {factor:.1f}x off {found['nearest']}"
    if factor < 1.005:
        return f"follows {found['nearest']}"
    return f"follows {found['nearest']} within {factor:.2f}x"


def table(name: str, found: Mapping[str, Any]) -> str:
    """What is said of a recipe, for a terminal."""
    by = {key: np.array(v, float) for key, v in found["by_pass_rate"].items()}
    mean = {key: float(np.array(v, float)) for key, v in found["mean"].items()}
    most = "<" if found["tokens_are"] == "at most" else " "
    lines = [
        f"{name}: claims {found['claim']}, {verdict(found)}",
        f"Prompts: {found['population']}. Noise: per draw, against GRPO with groups of "
        f"{found['grpo_group']}.",
        "",
        "   p     w(p)     f(p)    asked  w/asked signal  draws  tokens   bias  noise",
    ]
    middle = int(np.flatnonzero(by["p"] == 0.5)[0])
    scale = by["weight"][middle] / by["claimed_weight"][middle]
    start = by["objective"][np.flatnonzero(by["p"] == SHOWN[0])[0]]
    for i in np.flatnonzero(np.isin(by["p"], SHOWN)):
        row = {key: column[i] for key, column in by.items()}
        half = row["half_interval"]
        lines.append(
            f"{row['p']:5.2f} {row['weight']:8.3f} {row['objective'] - start:8.3f} "
            f"{scale * row['claimed_weight']:8.3f} {row['over_claimed']:7.2f}x "
            f"{row['signal']:6.1%} {row['draws']:6.1f} {most}{row['tokens']:6.0f} "
            f"{row['pass_rate_bias']:+z7.3f} {row['noise_against_grpo']:5.2f}x"
            + (f"  w +- {half:.2g}" if half >= 0.0005 else "")
        )
    lines += [
        f" mean {'':36}{mean['signal']:6.1%} {mean['draws']:6.1f} "
        f"{most}{mean['tokens']:6.0f} {mean['pass_rate_bias']:+z7.3f}",
        "",
        "f(p) is from the first row on; asked is the claimed weight, scaled to w(0.5).",
    ]
    if found["averaged"]:
        what = "; ".join(found["averaged"])
        lines.append(f"Averaged over random draws: {what}. The rest is exact.")
    else:
        lines.append("Exact: every number of right completions is counted.")
    if "hints" in found:
        lines += ["", *_table_of_hints(found)]
    lines += [f"Note: {text}" for text in found["notes"]]
    lines += [f"Warning: {name} {text}" for text in found["warnings"]]
    return "\n".join(lines)


def _table_of_hints(found: Mapping[str, Any]) -> list[str]:
    """By level: how many are drawn, with which coefficients, and the signal."""
    hints = found["hints"]
    by = {key: np.array(x, float) for key, x in found["by_pass_rate"].items()}
    of = {key: np.array(x, float) for key, x in hints["by_level"].items()}
    plain = np.array(hints["signal_without"], float)
    places = np.flatnonzero(np.isin(by["p"], SHOWN))
    every = range(hints["levels"] + 1)
    above = every[1:]

    def cells(values: Iterable[Any], form: str) -> str:
        width = form.partition(".")[0]
        return "".join(
            f"{x:>{width}}" if isinstance(x, str)
            else f"{'-':>{width}}" if np.isnan(x)
            else f"{x:{form}}"
            for x in values
        )  # fmt: skip

    lines = [
        f"With hints, each level of which is believed to add {hints['lift']:g} to the "
        "log-odds of p (--lift).",
        "    p"
        + cells([f"p{i}" for i in above], "5.2f")
        + cells([f"at {i}" for i in above], "7.1%")
        + cells([f"w{i}" for i in every], "6.2f")
        + "  draws signal  plain",
    ]
    lines += [
        f"{by['p'][i]:5.2f}"
        + cells(of["pass_rate"][1:, i], "5.2f")
        + cells(of["drawn"][1:, i], "7.1%")
        + cells(of["weight"][:, i], "6.2f")
        + f"{by['draws'][i]:7.1f} {by['signal'][i]:6.1%} {plain[i]:6.1%}"
        for i in places
    ]
    what = "visits" if hints["controller"] else "prompts"
    lines.append(f"At: {what} drawn at a level. Plain: the signal without hints.")
    if hints["controller"]:
        lines += [
            "",
            "In the end, if all may be hinted; w: the mean over levels of visits.",
            "    p" + cells([f"at {i}" for i in every], "7.1%") + "      w",
        ]
        lines += [
            f"{by['p'][i]:5.2f}"
            + cells(of["end"][:, i], "7.1%")
            + f"{of['end_weight'][:, i].sum():7.3f}"
            for i in places
        ]
    return lines


def picture(name: str, found: Mapping[str, Any]) -> bytes:
    """Weight, objective, signal with draws, and noise, as PNG."""
    from matplotlib.figure import Figure

    from curax.runs.pictures import LIGHT, label, percent

    style = LIGHT
    by = {key: np.array(v, float) for key, v in found["by_pass_rate"].items()}
    inside = (by["p"] >= SHOWN[0]) & (by["p"] <= SHOWN[-1])
    by = {key: values[inside] for key, values in by.items()}
    p = by["p"]
    middle = int(np.flatnonzero(p == 0.5)[0])
    figure = Figure((9.6, 6.6), 120, facecolor=style.paper, layout="constrained")
    figure.suptitle(
        f"{name} {verdict(found)}; it claims {found['claim']}",
        x=0.015,
        ha="left",
        fontsize=11.5,
        fontweight="bold",
        color=style.ink,
    )
    panels = figure.subplots(2, 2)
    for axes in panels.flat:
        axes.set_facecolor(style.paper)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(style.muted)
        axes.tick_params(colors=style.muted, labelcolor=style.ink, labelsize=9.5)
        axes.grid(axis="y", color=style.grid, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(0, 1)
    (weight, objective), (signal, noise) = panels
    middle, rate = int(np.flatnonzero(p == 0.5)[0]), "pass rate p"
    for kind, color, dashes, text in (
        ("", style.blue, "-", "real"),
        ("claimed_", style.orange, "--", "claimed"),
    ):
        slope, values = by[f"{kind}weight"], by[f"{kind}objective"]
        if not (np.isfinite(slope).all() and slope[middle] > 0):
            continue
        how = {"color": color, "label": text, "linewidth": 2}
        weight.plot(p, slope / slope[middle], dashes, **how)
        if (rise := values[-1] - values[0]) > 0:
            objective.plot(p, (values - values[0]) / rise, dashes, **how)
    real, half = by["weight"], by["half_interval"]
    if half.any() and real[middle] > 0:
        low, high = (real - half) / real[middle], (real + half) / real[middle]
        weight.fill_between(p, low, high, color=style.blue, alpha=0.2, linewidth=0)
    if (real > 0).all():
        _logarithmic(weight)
    label(weight, style, rate, "weight w(p) / w(0.5)")
    label(objective, style, rate, "objective f(p), 0 to 1")

    share = np.array(found["histogram"])
    bars = (np.arange(BINS) + 0.5) / BINS
    signal.bar(bars, share, 1 / BINS, color=style.grid, label="prompts")
    signal.plot(p, by["signal"], color=style.green, linewidth=2, label="with signal")
    if "hints" in found:
        plain = np.array(found["hints"]["signal_without"], float)[inside]
        signal.plot(
            p, plain, ":", color=style.green, linewidth=2, label="without hints"
        )
    percent(signal)
    draws = signal.twinx()
    draws.plot(p, by["draws"], "--", color=style.purple, linewidth=2)
    signal.plot([], [], "--", color=style.purple, linewidth=2, label="draws, right")
    draws.set_ylim(0, 1.08 * max(by["draws"].max(), 1))
    draws.spines[["top", "left", "bottom"]].set_visible(False)
    draws.spines["right"].set_color(style.muted)
    draws.tick_params(colors=style.muted, labelcolor=style.ink, labelsize=9.5)
    draws.set_ylabel("draws per prompt", color=style.ink, fontsize=10)
    label(signal, style, rate, "share of groups; of prompts")

    noise.plot(p, by["noise_against_grpo"], color=style.red, linewidth=2)
    noise.axhline(1, color=style.muted, linewidth=1, linestyle=":")
    _logarithmic(noise)
    label(noise, style, rate, f"noise per draw, over GRPO of {found['grpo_group']}")
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _logarithmic(axes: "Axes") -> None:
    """A vertical axis over a factor of 4 at least, with simple numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2))
    every = (1, 2, 5) if high / low < 1000 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=every))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


if __name__ == "__main__":
    sys.exit(main())
