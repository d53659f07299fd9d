"""python -m curax.xray: the objective a recipe really optimises, before any training.

Writes the numbers of `theory.summary` as a table, a picture and JSON.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from curax.config import Config, ConfigError, load, override
from curax.settings.cli import (
    Parser,
    make_folder,
    program,
    recipe_of,
    survives_closed_output,
    write_file,
)
from curax.theory import population
from curax.theory.population import LIFT

STRONG = 20.0  # nats; a larger lift is refused


def parser() -> Parser:
    """Argument parser of `python -m curax.xray`."""
    result = Parser(
        prog=program("xray"),
        allow_abbrev=False,
        description="Compute which objective a recipe really optimises.",
        epilog="The folder gets xray.json and xray.png.",
    )
    result.add_recipe()
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
        path = Path(recipe := recipe_of(args))
        name = path.parent.name if path.stem == "config" else path.stem
        workdir = Path(args.workdir or Path("runs", "xray", name))
        config = override(load(path), args.assignments)
        if args.memory:
            prompts = population.of_memory(Path(args.memory))
        else:
            prompts = population.of_beta(*args.beta)
        lift = checked_lift(config, args.lift)
        make_folder(workdir)
        from curax.runs.xray_picture import picture
        from curax.theory.summary import summarise
        from curax.theory.table import table

        size = population.task_size(config)
        found = summarise(config, prompts, lift, num_prompts=size)
        page = {"recipe": name, "config": recipe, "set": args.assignments} | found
        data = json.dumps(page, indent=1, allow_nan=False) + "\n"
        files = {"xray.json": data.encode(), "xray.png": picture(name, found)}
        for file, content in files.items():
            write_file(workdir / file, content)
        print(table(name, found))
        print(f"Written: {workdir}/xray.json, {workdir}/xray.png")
    except ConfigError as error:
        print(f"curax.xray: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


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
