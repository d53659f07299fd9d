"""python -m curax.train: train a policy from a config, or resume a run."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from curax.config import ConfigError, load, override
from curax.processes import clusters
from curax.settings import field_help, lock
from curax.settings.cli import Parser, again, command_line, recipe_of

DEFAULT = "quickstart"


def parser() -> Parser:
    """Argument parser of `python -m curax.train`."""
    result = Parser(
        "train",
        add_help=False,
        description="Train a policy by reinforcement learning from verifiable rewards.",
        epilog="The run folder gets config.json, metrics.jsonl, rollouts.jsonl, "
        "memory.jsonl, "
        "TensorBoard events, checkpoints, pictures and report.html.",
    )
    result.add_recipe(DEFAULT)
    result.add_argument(
        "-h",
        "--help",
        action="store_true",
        help="show this, and all fields of the recipe if one is named",
    )
    result.add_argument(
        "--workdir",
        metavar="DIR",
        help="run folder, made by the run (default: runs/NAME for configs/NAME.py)",
    )
    result.add_assignments()
    result.add_argument(
        "--resume", action="store_true", help="go on with the run in the run folder"
    )
    result.add_argument(
        "--profile",
        type=count_of,
        default=0,
        metavar="N",
        help="trace N steps behind the first, for TensorBoard and Perfetto",
    )
    result.add_argument(
        "--dry-run",
        action="store_true",
        help="read data and weights, compile all programs, print what they take, and "
        "stop before the first step; nothing is written",
    )
    result.add_argument(
        "--print-config",
        action="store_true",
        help="print every field with its value and where that came from, to be "
        "read, and stop; curax new writes a file to edit",
    )
    group = result.add_argument_group(
        "many processes", "one for each machine or GPU; a cluster is detected"
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 can be reached"
    )
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument(
        "--process", type=int, metavar="I", help="number of this one, from 0 to N - 1"
    )
    group.add_argument(
        "--start-timeout",
        type=count_of,
        metavar="SECONDS",
        help="for all to find each other, as where machines come one by one "
        "(default: 40)",
    )
    return result


@command_line("curax.train")
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 1 stopped by a failure, 2 bad input, 128 + n by a signal."""
    args = parser().parse_args(argv)
    if args.help or args.print_config:
        print(described(args))
        return 0
    run = train_with_others if is_one_of_many(args) else train
    return run(args, argv)


def described(args: argparse.Namespace) -> str:
    """The text of --help, with the fields of a recipe that is named, or the config.

    Raises:
        ConfigError: the recipe cannot be loaded.
    """
    text = parser().format_help()
    if args.help and not (args.recipe or args.config):
        return text
    recipe = recipe_of(args, DEFAULT)
    config = override(load(recipe), args.assignments)
    if args.help:
        return f"{text}\nfields of {recipe}:\n{field_help.explained(config)}"
    values = field_help.resolved(config, names_of(args.assignments))
    like = shlex.join(
        [recipe, *(["--set", *args.assignments] * bool(args.assignments))]
    )
    return (
        "# These are values to read, and no file to load; a file to edit is made by\n"
        f"# curax new NAME --from {like}\n{values}"
    )


def train(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Exit status of the run that the arguments describe.

    Raises:
        ConfigError: wrong input.
    """
    recipe, workdir = recipe_of(args, DEFAULT), workdir_of(args)
    config = override(load(recipe), args.assignments)
    # These import jax, which takes seconds; wrong input is reported before.
    from curax.processes import peers
    from curax.runs import dry_run, folder, run

    if not (args.recipe or args.config):
        run.say(f"No recipe is named, so this is {DEFAULT}; curax recipes lists all.")
    folder.check_writable(workdir)
    check = partial(folder.check, workdir, resume=args.resume, recipe=recipe)
    if args.dry_run:
        config = folder.pinned(workdir, config, resume=args.resume)
        if args.resume:
            peers.on_first(check, config)
        return dry_run.dry_run(config, workdir, resume=args.resume)
    with contextlib.ExitStack() as held:
        peers.on_first(lambda: held.enter_context(lock.hold(workdir, "--workdir")))
        config = folder.pinned(workdir, config, resume=args.resume)
        peers.on_first(check, config)
        folder.check_shared(workdir)
        rest = [word for word in argv if word != "--resume"]
        command = again("train", [*rest, "--resume"])
        return run.train(
            config,
            workdir,
            resume=args.resume,
            command=command,
            recipe=recipe,
            profile=args.profile,
        )


def workdir_of(args: argparse.Namespace) -> Path:
    """The run folder.

    Raises:
        ConfigError: the recipe cannot be found.
    """
    return Path(args.workdir or Path("runs") / Path(recipe_of(args, DEFAULT)).stem)


def train_with_others(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Exit status of one of several processes; after an error it ends here."""
    from curax.processes import peers
    from curax.runs import folder

    status, seconds = 130, args.start_timeout or peers.START
    try:
        saved = partial(folder.last_checkpoint, workdir_of(args))
        named = args.coordinator, args.processes, args.process
        peers.start(*named, saved=saved, seconds=seconds)
        for name in ("resume", "dry_run", "profile"):  # they decide what is exchanged
            peers.same(f"--{name.replace('_', '-')}", getattr(args, name))
        status = train(args, argv)
        peers.finish(status)
    except ConfigError as error:
        print(f"curax.train: {error}", file=sys.stderr)
        status = 2
        peers.leave(status)
    except KeyboardInterrupt:
        peers.leave(status)
    except Exception as error:
        peers.fail(error)
    return status


def is_one_of_many(args: argparse.Namespace) -> bool:
    """Whether several processes make this run, as the arguments or a cluster say.

    Raises:
        ConfigError: the arguments are incomplete or contradict each other.
    """
    given = {
        "--coordinator": args.coordinator,
        "--processes": args.processes,
        "--process": args.process,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return clusters.detected()
    if missing:
        raise ConfigError(
            f"{missing[0]} is missing; name the processes of a run by --coordinator "
            "HOST:PORT --processes N --process I, or leave all three to the cluster."
        )
    if args.processes < 1:
        raise ConfigError(
            f"--processes {args.processes} is no number of processes; name how many "
            "the run has, from 1 on."
        )
    host, _, port = args.coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"--coordinator {args.coordinator} is no HOST:PORT; name the machine of "
            "process 0 and a free port of it, such as 10.0.0.2:8476."
        )
    if not 0 <= args.process < args.processes:
        raise ConfigError(
            f"--process {args.process} is not from 0 to {args.processes - 1}; number "
            f"the --processes {args.processes} of the run from 0 on."
        )
    return args.processes > 1


def count_of(text: str) -> int:
    """The value of --profile or --start-timeout, an integer of at least 1."""
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")


def names_of(assignments: Sequence[str]) -> list[str]:
    """The dotted names that `NAME=VALUE` words set."""
    return [word.partition("=")[0].strip() for word in assignments]


if __name__ == "__main__":
    sys.exit(main())
