"""What is wrong in a config whose fields are valid one by one: a table a subject.

A row says what may not be, and the sentence that is said where it is. What is said of
functions, wherever they stand in the config, is no row but a search. Only the standard
library is imported.
"""

import difflib
import itertools
import math
from collections.abc import Iterator
from typing import Any

from curax.settings.config_paths import Place, full_name, option, unbound
from curax.settings.config_types import Magnitude, out_of_range
from curax.settings.declared import RIGHT, declared
from curax.settings.groups import AXES, DASHBOARDS, Fields, Logging, Reflection
from curax.settings.sizes import (
    declared_option,
    declaring,
    is_cut_off,
    kept_of,
    largest_group,
    least_group,
    rows_of,
    truncates,
    updates_of,
)

Table = list[tuple[Any, str]]  # rows of (what may not be, the sentence about it)


def conflicts(config: Fields) -> Iterator[str]:
    """Sentences about fields that are valid one by one and impossible together."""
    for table in _tables(config):
        yield from said(table)
    if _is_counted(config):
        yield from _said_elsewhere(config)
        yield from _too_small_groups(config)
    yield from _right_twice(config)
    if config.shape_reward is not None:
        yield from right_by_rewards(config, "shape_reward changes; set it to None")
    yield from _without_method(config)


def said(table: Table) -> Iterator[str]:
    """Sentences of a table about what is so and may not be."""
    return (sentence for is_wrong, sentence in table if is_wrong)


def _is_counted(config: Fields) -> bool:
    """Whether the numbers of completions and of updates are no arrays."""
    sizes, update = config.sampling, config.update
    numbers = (sizes.group_size, sizes.prompts, sizes.budget, kept_of(config))
    numbers += (update.minibatches, update.micro_batches)
    numbers += (update.tokens_per_micro_batch,)
    return all(isinstance(count, int) for count in numbers)


def _tables(config: Fields) -> Iterator[Table]:
    """Tables of what a config has; the later ones count on the earlier ones."""
    yield _run(config)
    yield _dashboards(config.logging)
    yield _ahead(config)
    yield _engine(config)
    yield _biases(config)
    if _is_counted(config):
        yield _completions(config)
        if config.stop:
            yield _stop(config)
        if config.hint:
            yield _hint(config)
        if config.reflection:
            yield _reflection(config, config.reflection)
        yield _updates(config)


def _run(config: Fields) -> Table:
    """Of the run as a whole: its seeds, devices and evaluation."""
    mesh, held_out = config.mesh, config.evaluation
    warm = config.warm_start and config.warm_start.optimizer
    rates = {"optimizer": config.optimizer, "warm_start.optimizer": warm}
    rates = {name: option(tx, "learning_rate") for name, tx in rates.items() if tx}
    return [
        *(
            (
                out_of_range(rate, Magnitude),
                f"{name}.learning_rate={rate} must be at least 0; set it to 0.001, for "
                "example.",
            )
            for name, rate in rates.items()
        ),
        (
            config.staged and config.seeds > 1,
            f"seeds={config.seeds} cannot run side by side with staged=True; set seeds "
            "to 1 or staged to False.",
        ),
        (
            config.seeds > 1 and config.sampling.chunks > 1,
            f"sampling.chunks={config.sampling.chunks} lets the host verify beside the "
            f"device, and seeds={config.seeds} are verified within one program; set "
            "sampling.chunks to 1.",
        ),
        (
            held_out.k > held_out.samples,
            f"evaluation.k={held_out.k} completions cannot be drawn from "
            f"evaluation.samples={held_out.samples}; set evaluation.k to at most "
            f"{held_out.samples}.",
        ),
        *(
            (
                getattr(mesh, one) < 0 and getattr(mesh, other) < 0,
                f"mesh.{one}=-1 and mesh.{other}=-1 cannot both be what the others "
                f"leave; set mesh.{one} to 1.",
            )
            for one, other in itertools.combinations(AXES, 2)
        ),
    ]


def _dashboards(how: Logging) -> Table:
    """Of dashboards that are unknown, or named twice."""
    named = [
        one if isinstance(one, str) else full_name(one).rpartition(".")[2]
        for one in how.dashboards
    ]
    return [
        row
        for one in named
        for row in (
            (
                one in how.dashboards and one not in DASHBOARDS,
                f"logging.dashboards names {one!r}; there are "
                f"{', '.join(DASHBOARDS)}, so name for example "
                f"{difflib.get_close_matches(one, DASHBOARDS, 1, cutoff=0)[0]}.",
            ),
            (
                named.count(one) > 1,
                f"logging.dashboards names {one} twice; name it once.",
            ),
        )
    ]


def _ahead(config: Fields) -> Table:
    """Of what a draw ahead of the update cannot know."""
    ahead, attempts = config.sampling.ahead, config.sampling.attempts
    share, seeds = config.mesh.draw_share, config.seeds
    apart = share is not None
    return [
        (
            apart and not ahead,
            f"mesh.draw_share={share} lets devices draw while the others train, and "
            "without a draw ahead of the update these would wait; set sampling.ahead "
            "to 1 or mesh.draw_share to None.",
        ),
        (
            apart and config.sampling.engine is not None,
            f"mesh.draw_share={share} keeps devices for drawing, and sampling.engine "
            "draws elsewhere; set mesh.draw_share to None.",
        ),
        (
            apart and seeds > 1,
            f"mesh.draw_share={share} cuts the mesh of one run, and seeds={seeds} are "
            "as many side by side; set seeds to 1.",
        ),
        (
            ahead > 1,
            f"sampling.ahead={ahead} is more than the one step that a draw can be "
            "ahead; set sampling.ahead to 1.",
        ),
        (
            ahead and attempts > 1,
            f"sampling.attempts={attempts} takes as many prompts as outcomes ask for, "
            "and sampling.ahead=1 draws the next ones before these are known; set "
            "sampling.attempts to 1 or sampling.ahead to 0.",
        ),
    ]


def _engine(config: Fields) -> Table:
    """Of what an engine cannot draw, or draws differently."""
    name, whole = ("top_k", 0) if config.sampling.top_k else ("top_p", 1.0)
    given = config.sampling.engine is not None
    return [
        (
            given and config.seeds > 1,
            f"sampling.engine draws by one policy, and seeds={config.seeds} are as "
            "many side by side; set seeds to 1.",
        ),
        (
            given and is_cut_off(config),
            f"sampling.{name}={getattr(config.sampling, name)} cuts the distribution, "
            "and engines differ in whether their log-probs are those before the cut; "
            "set sampling.replay_support=True, for a server that gives what it kept, "
            f"or sampling.{name}={whole}.",
        ),
        (
            given and config.reflection is not None,
            "sampling.engine may leave completions missing, and reflection gives each "
            "an outcome; set sampling.engine to None or reflection to None.",
        ),
    ]


def _biases(config: Fields) -> Table:
    """Of biases of the policy gradient that no stage corrects."""
    sizes, update = config.sampling, config.update
    keeps_all = type(sizes.top_k) is int and not sizes.top_k
    name, whole = ("top_p", 1.0) if keeps_all else ("top_k", 0)
    several = update.epochs != 1 or update.minibatches != 1
    has_ratio = declared(config.loss, "has_ratio", True)
    biased = config.steps and sizes.off_policy is None and not update.behaviour_as_old
    uncorrected = (
        "nothing corrects that bias; set "
        "sampling.off_policy=off_policy.truncated_ratio (TIS) or another function of "
        "curax.off_policy, off_policy.none to leave the bias, or"
    )
    return [
        (
            biased and is_cut_off(config),
            f"sampling.{name}={getattr(sizes, name)} draws from another distribution "
            "than the policy that trains, and nothing corrects that bias; set "
            "sampling.replay_support=True to train what is drawn, "
            "sampling.off_policy=off_policy.truncated_ratio (TIS), "
            "off_policy.masked_ratio (MIS) or off_policy.icepop, off_policy.none to "
            "leave the bias, or "
            f"sampling.{name}={whole}.",
        ),
        (
            sizes.replay_support and not truncates(config),
            "sampling.replay_support=True trains within what sampling.top_k and "
            "sampling.top_p keep, and they keep all; set sampling.replay_support to "
            "False, or sampling.top_p=0.95.",
        ),
        (
            biased and sizes.ahead,
            f"sampling.ahead={sizes.ahead} draws from the policy of a step before, and "
            f"{uncorrected} sampling.ahead=0.",
        ),
        (
            biased and sizes.engine is not None,
            "sampling.engine draws from the policy as another program rounds it, and "
            f"{uncorrected} sampling.engine=none.",
        ),
        (
            update.behaviour_as_old and sizes.off_policy is not None,
            "update.behaviour_as_old=True puts the ratio of the loss over what was "
            "drawn from, and sampling.off_policy would weigh by the same once more; "
            "set sampling.off_policy to None, or update.behaviour_as_old to False.",
        ),
        (
            update.behaviour_as_old and not has_ratio,
            "update.behaviour_as_old=True says what the ratio of the loss is over, and "
            f"{Place(config.loss).owner('loss')} has none; set update.behaviour_as_old "
            "to False, or loss to loss.clipped_ratio.",
        ),
        (
            several and not has_ratio,
            f"update.epochs={update.epochs} times update.minibatches="
            f"{update.minibatches} are {updates_of(config)} updates per batch, and "
            f"{Place(config.loss).owner('loss')} has no ratio that corrects those "
            "behind the first; set both to 1, or loss to loss.clipped_ratio.",
        ),
    ]


def _completions(config: Fields) -> Table:
    """Of what needs more completions than a step has."""
    sizes, kept, rows = config.sampling, kept_of(config), rows_of(config)
    group, prompts, chunks = sizes.group_size, sizes.prompts, sizes.chunks
    draws = config.pilot.draws if config.pilot else 0
    least = declared_option(config.allocate, "floor", 0)
    fits = not isinstance(chunks, int) or rows < 1 or rows % chunks == 0
    return [
        (
            kept < 1,
            f"downsample.m={kept} must be at least 1; set downsample.m to 1.",
        ),
        (
            kept > group,
            f"sampling.group_size={group} cannot keep downsample.m={kept} completions; "
            f"set downsample.m to at most {group}.",
        ),
        (
            rows > group * prompts,
            f"sampling.budget={sizes.budget} is more than sampling.group_size={group} "
            f"completions of sampling.prompts={prompts}, pilots apart; set it to at "
            f"most {(group + draws) * prompts}.",
        ),
        (
            isinstance(least, int) and least > rows // prompts > 0,
            f"allocate.least={least} for each of {prompts} prompts is more than the "
            f"{rows} completions of a step; set allocate.least to at most "
            f"{rows // prompts}.",
        ),
        (
            not fits,
            f"sampling.chunks={chunks} must divide the {rows} completions of a step; "
            "set sampling.chunks to "
            f"{fits or max(n for n in range(1, chunks) if rows % n == 0)}.",
        ),
        (
            rows < 1,
            f"pilot.draws={draws} for sampling.prompts={prompts} leave nothing of the "
            f"budget to train on; set pilot.draws to at most "
            f"{(rows - 1) // prompts + draws}.",
        ),
    ]


def _stop(config: Fields) -> Table:
    """Of what also decides how much a prompt draws."""
    sizes = config.sampling
    others = {
        "sampling.attempts": sizes.attempts > 1,
        "sampling.budget": sizes.budget > 0,
        "pilot": config.pilot is not None,
    }
    return [
        *(
            (
                is_set,
                f"stop decides how much each prompt draws, and so does {name}; set "
                "one of them to its default.",
            )
            for name, is_set in others.items()
        ),
        (
            sizes.chunks > 1,
            f"sampling.chunks={sizes.chunks} takes a prompt's completions apart, and "
            "stop counts them together; set sampling.chunks to 1.",
        ),
    ]


def _hint(config: Fields) -> Table:
    """Of what also replaces groups."""
    attempts = config.sampling.attempts
    return [
        (
            attempts > 1,
            f"sampling.attempts={attempts} gives the place of a dead group to another "
            "prompt, and hint asks the same one again; set sampling.attempts to 1 or "
            "hint to None.",
        ),
    ]


def _reflection(config: Fields, how: Reflection) -> Table:
    """Of what needs a verifier, which R3 replaces."""
    sizes, carried = config.sampling, how.queries.carried if how.queries else 0
    return [
        *(
            (
                getattr(config, name),
                f"reflection gives rewards by itself and knows nothing of {name}; set "
                f"{name} to None.",
            )
            for name in ("hint", "stop", "pilot", "shape_reward")
        ),
        *(
            (
                value > 1,
                f"sampling.{name}={value} follows what a verifier says, and reflection "
                f"asks none; set sampling.{name} to 1.",
            )
            for name, value in (("attempts", sizes.attempts), ("chunks", sizes.chunks))
        ),
        (
            how.keep and declared(how.keep, "remembers", False),
            "reflection.keep judges each step by itself, and this rule remembers steps "
            "before; set reflection.keep to reflect.null_test or reflect.percentile.",
        ),
        (
            how.keep and declared_option(how.keep, "ranks") is not None,
            "reflection.keep does not rank the tokens of references; set "
            "reflection.keep.hardest to None, or use reflection.queries.",
        ),
        (
            carried > 1,
            f"reflection.queries.carried={carried} is more than there is; set "
            "reflection.queries.carried to 1.0.",
        ),
    ]


def _updates(config: Fields) -> Table:
    """Of mini-batches and micro-batches that do not divide the rows."""
    update, warm = config.update, config.warm_start
    tokens = update.tokens_per_micro_batch
    wanted = (update.minibatches, update.micro_batches)
    rows = min(rows_of(config), config.sampling.prompts * kept_of(config))
    fits = rows % math.prod(wanted) == 0
    a, b = wanted if fits else _nearest_divisors(rows, wanted)
    counts: dict[str, Any] = {"update": update.micro_batches}
    warm_rows = warm_batches = 1
    if warm:
        counts["warm_start"] = warm.micro_batches
        if isinstance(warm.rows, int) and isinstance(warm.micro_batches, int):
            warm_rows, warm_batches = warm.rows, warm.micro_batches
    return [
        (
            warm_rows % warm_batches,
            f"warm_start.micro_batches={warm_batches} must divide warm_start.rows="
            f"{warm_rows}; set warm_start.micro_batches to "
            f"{math.gcd(warm_rows, warm_batches)}.",
        ),
        *(
            (
                tokens and isinstance(count, int) and count > 1,
                f"{group}.micro_batches={count} and update.tokens_per_micro_batch="
                f"{tokens} both say how large a micro-batch is; set "
                f"{group}.micro_batches to 1, or update.tokens_per_micro_batch to 0.",
            )
            for group, count in counts.items()
        ),
        (
            not fits,
            f"update.minibatches={wanted[0]} times update.micro_batches={wanted[1]} "
            f"must divide the {rows} rows trained per step; set them to {a} and {b}.",
        ),
    ]


def _nearest_divisors(rows: int, wanted: tuple[int, int]) -> tuple[int, int]:
    """Two numbers next to those `wanted` whose product divides the rows."""
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    pairs = [(a, b) for a in divisors for b in divisors if rows % (a * b) == 0]
    return min(pairs, key=lambda p: abs(p[0] - wanted[0]) + abs(p[1] - wanted[1]))


def _said_elsewhere(config: Fields) -> Iterator[str]:
    """Sentences about options of corrections that contradict sizes of the config."""
    prompts = config.sampling.prompts
    must = {
        "rows_per_prompt": (
            min(rows_of(config) / prompts, kept_of(config)),
            "the rows trained per prompt",
        ),
        "most_draws": (config.sampling.group_size, "the most that a prompt draws"),
    }
    for argument, (right, what) in must.items():
        for name, place, own in declaring(config.correct, argument, "correct"):
            value = option(place.value, own)
            if isinstance(value, int | float) and value != right:
                full = f"{name}.{own}"
                fix = f"set {full} to {right:g}"
                yield f"{full}={value} must be {what}, {right:g}; {fix}."


def _right_twice(config: Fields) -> Iterator[str]:
    """A sentence if two functions would call different completions right."""
    found = {"curax.settings.declared.RIGHT": RIGHT} if config.hint else {}
    for name, place, own in declaring(config, "right_above"):
        found[f"{name}.{own}"] = option(place.value, own)
    known = {n: x for n, x in found.items() if isinstance(x, int | float)}
    for (one, mine), (other, its) in itertools.pairwise(known.items()):
        if mine != its:
            yield (
                f"{other}={its} and {one}={mine} call different completions right; set "
                f"{other} to {mine}."
            )


def right_by_rewards(config: Fields, why: str) -> Iterator[str]:
    """Sentences about estimators that would take other rewards for outcomes.

    Args:
        config: of the run.
        why: rewards are no outcomes, and what to do about it.
    """
    for name, place, own in declaring(config.advantage, "counts_right", "advantage"):
        if least := option(place.value, own):
            yield (
                f"{name}.{own}={least} counts right completions by rewards, which "
                f"{why}, or {name}.{own} to 0, for gate.minimum_right counts outcomes."
            )


def _without_method(config: Fields) -> Iterator[str]:
    """Sentences about functions that read what a method keeps, without that method."""
    for name, place, method in declaring(config, "method"):
        if method not in map(unbound, config.methods):
            keeper = full_name(method)
            yield (
                f"{name}={place.owner(name)} reads what {keeper} keeps; set methods to "
                f"({keeper},)."
            )


def _too_small_groups(config: Fields) -> Iterator[str]:
    """Sentences about stages that need larger groups than the config has."""
    kept, drawn, fix = kept_of(config), largest_group(config), "sampling.group_size"
    if drawn < config.sampling.group_size:
        fix = "sampling.budget"
    sees = {"gate": (drawn, fix), "advantage": (drawn, fix)}
    if not config.pool_statistics and kept < drawn:
        sees["advantage"] = kept, "downsample.m"
    for stage, (group, field) in sees.items():
        least, called = least_group(getattr(config, stage), stage)
        if group >= least:
            continue
        now, to = kept, least
        if field != "downsample.m":
            now = getattr(config.sampling, field.partition(".")[2])
        if field == "sampling.budget":
            pilots = config.pilot.draws if config.pilot else 0
            to = (least + pilots) * config.sampling.prompts
        yield (
            f"{field}={now} gives {called} groups of {group}, and it learns nothing "
            f"from fewer than {least}; set {field} to at least {to}."
        )
