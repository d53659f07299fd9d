"""python -m curax.compare: recipes at equal tokens, equal updates and equal cost."""

import sys
from pathlib import Path

from curax.compare import experiment as experiments
from curax.config import ConfigError
from curax.runs import reading
from curax.settings.cli import Parser, command_line
from curax.settings.errors import out_of_reach


def parser() -> Parser:
    """Argument parser of `python -m curax.compare`."""
    result = Parser(
        "compare",
        description="Run recipes with the same seeds, and say what sets them apart at "
        "equal tokens drawn, at equal updates and at equal cost.",
        epilog="The folder gets results.json, report.html and its pictures. Given "
        "again, the same command goes on where it was stopped or killed.",
    )
    result.add_argument(
        "experiment",
        type=Path,
        metavar="EXPERIMENT",
        help="a Python file with get_experiment(), or a folder with experiment.py",
    )
    result.add_argument(
        "--cost",
        metavar="A:B",
        help="cost of a token drawn and of a token trained, as 1:3 (default: that of "
        "the experiment; without one it is measured)",
    )
    result.add_argument(
        "--workdir", metavar="DIR", help="where to write (default: runs/compare/NAME)"
    )
    return result


def prices(text: str) -> tuple[float, float]:
    """The value of --cost: two numbers from 0 on, not both 0, within reach.

    Raises:
        ConfigError: it is something else.
    """
    try:
        drawn, trained = (float(part) for part in text.split(":"))
        if drawn + trained > 0 and experiments.within_reach((drawn, trained)):
            return drawn, trained
    except ValueError:
        pass
    raise ConfigError(
        f"--cost {text} is not what a drawn and a trained token cost; write two numbers"
        " from 0 on, as --cost 1:3."
    )


@command_line("curax.compare", goes_on=True)
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 1 a file could not be written, 2 bad input, 130 stopped."""
    args = parser().parse_args(argv)
    cost = None if args.cost is None else prices(args.cost)
    experiment = experiments.load_experiment(args.experiment)
    arms = experiments.arms(experiment)
    path = args.experiment.resolve()
    path = path.parent if path.name == experiments.FILE else path
    name = path.stem if path.is_file() else path.name
    workdir = Path(args.workdir or Path("runs", "compare", name))
    try:
        # This imports jax, which takes seconds; wrong input is reported before.
        from curax.compare import comparison

        print(comparison.compare(experiment, arms, workdir, cost=cost, name=name))
    except reading.DamagedError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        why = out_of_reach(error) or f"{error}; mend that and go on."
        print(f"curax.compare: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
