"""python -m curax.xray: the objective a recipe really optimises, before any training.

Prints the numbers of `theory.summary` as a table. With --advise it says
instead which recipes are predicted to end above or below a baseline, with --gradients
it measures the gradients of a policy. With --out all of it is written as JSON, and the
table as a picture too.
"""

import importlib.metadata
import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

from curax.config import Config, ConfigError, load, override
from curax.settings import cli
from curax.settings.files import json_bytes
from curax.settings.packages import is_installed
from curax.theory import advice_options, population
from curax.theory.population import LIFT, Population

STRONG = 20.0  # nats; a larger lift is refused
PROBE = (256, 64)  # prompts, and completions of each, of which gradients are measured


def parser() -> cli.Parser:
    """Argument parser of `python -m curax.xray`."""
    result = cli.Parser(
        "xray",
        description="Compute which objective a recipe really optimises.",
    )
    result.add_recipe()
    result.add_assignments()
    result.add_argument(
        "--trl",
        metavar="FILE",
        help="YAML or JSON with options of a GRPOConfig of TRL, in place of RECIPE",
    )
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
    prompts.add_argument(
        "--evaluation",
        metavar="FILE",
        help="samples of curax.evaluate, such as held_out.jsonl: pass rates without "
        "the noise of few samples",
    )
    result.add_argument(
        "--lift",
        type=float,
        metavar="NATS",
        help="what each level of a hint adds to the log-odds of a pass rate (default: "
        f"{LIFT:g}); for recipes with hints",
    )
    result.add_out("xray.json and xray.png", "gradients.json or advice.json")
    group = result.add_argument_group(
        "gradients", "--gradients draws completions and measures what theory assumes"
    )
    group.add_argument(
        "--gradients",
        metavar="RUN_OR_RECIPE",
        help="a run folder, or a recipe, whose policy after the warm start is taken; "
        "in place of RECIPE",
    )
    group.add_argument(
        "--step",
        help="checkpoint of the run: latest, best or a number (default: latest)",
    )
    group.add_argument(
        "--probe",
        nargs=2,
        type=int,
        metavar=("K", "N"),
        help="training prompts, and completions of each (default: 256 64)",
    )
    group.add_argument(
        "--law",
        type=int,
        metavar="R",
        help="besides, the expected update of R draws of the next step beside the law "
        "of the effective weight, and what takes it away from that",
    )
    advice_options.add_options(result)
    return result


@cli.command_line("curax.xray")
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    advice_options.check(args)
    if check_probe(args):
        gradients(args)
        return 0
    # A run may be using the accelerator, and none is needed here.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.advise:
        advise(args)
        return 0
    name, config, converted = examined(args)
    prompts = population_of(args)
    lift = checked_lift(config, args.lift)
    with cli.made_folder(args.out):
        from curax.runs.templates import NO_PICTURES
        from curax.runs.xray_picture import picture
        from curax.theory.summary import summarise
        from curax.theory.table import table

        size = population.task_size(config)
        found = summarise(config, prompts, lift, num_prompts=size)
        source = args.trl or cli.recipe_of(args)
        page = {"recipe": name, "config": source, "set": args.assignments} | found
        files = {"xray.json": json_bytes(page)}
        lines = [table(name, found), *converted]
        if args.out and is_installed("matplotlib"):
            files["xray.png"] = picture(name, found)
        elif args.out:
            lines.append(NO_PICTURES)
        print("\n".join([*lines, cli.keep(args.out, files)]))
    return 0


def population_of(args: Namespace) -> Population:
    """The pass rates that the options name."""
    if args.memory:
        return population.of_memory(Path(args.memory))
    if args.evaluation:
        return population.of_evaluation(Path(args.evaluation))
    return population.of_beta(*args.beta)


def check_probe(args: Namespace) -> bool:
    """Whether gradients are to be measured.

    Raises:
        ConfigError: an option is for another command, or out of range.
    """
    if not args.gradients:
        wants = "--gradients; add that, or leave it out"
        cli.check_absent(args, ("step", "probe", "law"), wants)
        return False
    others = ("recipe", "config", "trl", "memory", "evaluation", "lift")
    named = [name for name in others if getattr(args, name) is not None]
    named += ["advise"] * bool(args.advise) + ["beta"] * isinstance(args.beta, list)
    if named:
        what = args.recipe if named[0] == "recipe" else f"--{named[0]}"
        raise ConfigError(
            f"--gradients {args.gradients} names what is measured, and {what} is not "
            "for it; leave one out."
        )
    prompts, samples = args.probe or PROBE
    if not (prompts >= 2 and samples >= 8 and samples % 2 == 0):
        raise ConfigError(
            f"--probe {prompts} {samples}: at least 2 prompts, and 8 completions of "
            "each, in two equal halves; write 256 64."
        )
    if args.law is not None and args.law < 2:
        raise ConfigError(
            f"--law {args.law}: noise is told apart by 2 draws at least; write 32."
        )
    return True


def gradients(args: Namespace) -> None:
    """Measure gradients of a policy; print them and write gradients.json.

    Raises:
        ConfigError: the policy cannot be read, or has no gradients of a pass rate.
    """
    from curax.runs import folder, libraries, policies, run
    from curax.step import build
    from curax.theory import gradients as measured
    from curax.theory import law_residual, probe
    from curax.theory.gradient_table import table

    path, check = Path(args.gradients), probe.check
    if args.law:
        check = law_residual.check
    libraries.set_up()
    if policies.is_run(path):
        config = policies.run_config(path, changes=args.assignments)
        name = path.resolve().name
        check(config)
        loop, state = policies.load_state(path, config, step=args.step or "latest")
        task, other = loop.parts.task, "another run"
        folder.check_questions(path, task, of=str(path), other=other)
    else:
        if args.step:
            raise ConfigError(
                f"--step {args.step}: {path} is no run folder; leave it out."
            )
        name = cli.recipe_name(path)
        config = override(load(path), args.assignments)
        check(config)
        build.check_weights(config)
        loop = run.make_loop(config, rehearse=False)
        state = policies.warm_state(loop)
    with cli.made_folder(args.out):
        prompts, samples = args.probe or PROBE
        with loop.context():
            on_progress = partial(cli.count, "prompts measured")
            found = measured.summarise(loop.parts, state, prompts, samples, on_progress)
            if args.law:
                on_progress = partial(cli.count, "draws of the step")
                more = law_residual.residual(
                    loop.parts, state, samples, args.law, on_progress
                )
                found["law"] = {"repeats": args.law, "rows": more}
        head = {"of": args.gradients, "set": args.assignments}
        kept = cli.keep(args.out, {"gradients.json": json_bytes(head | found)})
        print(f"{table(name, found)}\n{kept}")


def advise(args: Namespace) -> None:
    """Compare recipes of configs/ with a baseline: RLOO, or one that is named."""
    # Nearly all the time goes into compiling many programs that run once.
    flags = "--xla_backend_optimization_level=0"
    if importlib.metadata.version("jaxlib") < "0.11":
        flags += " --xla_cpu_use_fusion_emitters=false"  # not known to later versions
    os.environ.setdefault("XLA_FLAGS", flags)
    own = None
    if args.recipe or args.config or args.trl:
        name, config, _ = examined(args)
        own = name, config
    elif args.assignments:
        raise ConfigError(f"--set {args.assignments[0]} changes a recipe; name one.")
    advice_options.advise(args, population_of(args), own)


def examined(args: Namespace) -> tuple[str, Config, list[str]]:
    """Name and config of what is examined, and sentences about its conversion.

    Raises:
        ConfigError: it cannot be read, or two are named.
    """
    if args.trl is None:
        path = Path(cli.recipe_of(args))
        return cli.recipe_name(path), override(load(path), args.assignments), []
    if args.recipe or args.config:
        raise ConfigError(
            f"--trl {args.trl} and {args.recipe or args.config} are two recipes; leave "
            "one out."
        )
    from curax.commands import foreign

    path = Path(args.trl)
    found = foreign.read_trl(path)
    config = override(found.config(), args.assignments)
    remarks = [f"From TRL: {remark}." for remark in found.remarks]
    if found.unread:
        remarks.append(f"Not read, without a counterpart: {', '.join(found.unread)}.")
    return path.stem, config, remarks


def checked_lift(config: Config, lift: float | None) -> float:
    """The lift in nats per hint level, checked; LIFT if it is None.

    Raises:
        ConfigError: if it is beyond STRONG, or the recipe has no hints.
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


if __name__ == "__main__":
    sys.exit(main())
