"""python -m curax.train: train a policy from a config, or resume a run."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from curax.config import ConfigError, load, override
from curax.settings.cli import Parser, survives_closed_output

DEFAULT = "quickstart"


def parser() -> Parser:
    """Argument parser of `python -m curax.train`."""
    result = Parser(
        prog="python -m curax.train",
        allow_abbrev=False,
        description="Train a policy by reinforcement learning from verifiable rewards.",
        epilog="The run folder gets config.json, metrics.jsonl, rollouts.jsonl, "
        "memory.jsonl, "
        "TensorBoard events, checkpoints, pictures and report.html.",
    )
    result.add_argument(
        "--config",
        default=DEFAULT,
        metavar="FILE",
        help="Python file with get_config(), or the name of one in configs/, such as "
        f"grpo (default: {DEFAULT})",
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
    return result


@survives_closed_output
def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 stopped by a failure, 2 bad input, 128 + n by a signal."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = parser().parse_args(argv)
        workdir = Path(args.workdir or Path("runs") / Path(args.config).stem)
        config = override(load(args.config), args.assignments)
        # These import jax, which takes seconds; wrong input is reported before.
        from curax.runs import folder, lock, run

        folder.check_writable(workdir)
        with lock.hold(workdir, "--workdir"):
            folder.check(workdir, config, resume=args.resume)
            command = resuming(argv)
            return run.train(config, workdir, resume=args.resume, command=command)
    except ConfigError as error:
        print(f"curax.train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first step or after the last
        return 130


def resuming(argv: Sequence[str]) -> str:
    """The command line that resumes the run started with `argv`."""
    rest = [word for word in argv if word != "--resume"]
    return shlex.join([sys.orig_argv[0], "-m", "curax.train", *rest, "--resume"])


if __name__ == "__main__":
    sys.exit(main())
