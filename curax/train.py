"""python -m curax.train: train a policy from a config, or resume a run."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from curax.config import ConfigError, load, override
from curax.settings import field_help
from curax.settings.cli import Parser, program, recipe_of, survives_closed_output

DEFAULT = "quickstart"


def parser() -> Parser:
    """Argument parser of `python -m curax.train`."""
    result = Parser(
        prog=program("train"),
        allow_abbrev=False,
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
        type=steps_of,
        default=0,
        metavar="N",
        help="trace N steps behind the first, for TensorBoard and Perfetto",
    )
    result.add_argument(
        "--print-config",
        action="store_true",
        help="print every field with its value and where that came from, and stop",
    )
    return result


@survives_closed_output
def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 stopped by a failure, 2 bad input, 128 + n by a signal."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = parser().parse_args(argv)
        if args.help and not (args.recipe or args.config):
            parser().print_help()
            return 0
        recipe = recipe_of(args, DEFAULT)
        config = override(load(recipe), args.assignments)
        if args.help:
            print(f"{parser().format_help()}\nfields of {recipe}:")
            print(field_help.explained(config))
            return 0
        if args.print_config:
            print(field_help.resolved(config, names_of(args.assignments)))
            return 0
        workdir = Path(args.workdir or Path("runs") / Path(recipe).stem)
        # These import jax, which takes seconds; wrong input is reported before.
        from curax.runs import folder, lock, run

        folder.check_writable(workdir)
        with lock.hold(workdir, "--workdir"):
            folder.check(workdir, config, resume=args.resume)
            command = resuming(argv)
            return run.train(
                config,
                workdir,
                resume=args.resume,
                command=command,
                profile=args.profile,
            )
    except ConfigError as error:
        print(f"curax.train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first step or after the last
        return 130


def steps_of(text: str) -> int:
    """The value of --profile, an integer of at least 1."""
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is no number of steps from 1 on")


def names_of(assignments: Sequence[str]) -> list[str]:
    """The dotted names that `NAME=VALUE` words set."""
    return [word.partition("=")[0].strip() for word in assignments]


def resuming(argv: Sequence[str]) -> str:
    """The command line that resumes the run started with `argv`."""
    rest = [word for word in argv if word != "--resume"]
    begin = [sys.orig_argv[0], "-m", "curax.train"]
    if Path(sys.argv[0]).stem == "curax":  # the command that pip installed
        begin = [sys.argv[0], "train"]
    return shlex.join([*begin, *rest, "--resume"])


if __name__ == "__main__":
    sys.exit(main())
