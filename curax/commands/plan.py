"""curax plan: whether a run fits a slice of chips that is not here.

Compiles the run's own sampler, its update and what its methods compute with parameters
for the slice, with shapes in place of parameters, and writes what they take as a table
and as JSON.
"""

import os
import sys
from pathlib import Path

from curax.config import Config, Mesh, load, override
from curax.planning import chips
from curax.settings import cli
from curax.settings.files import json_bytes
from curax.settings.groups import AXES


def parser() -> cli.Parser:
    """Argument parser of `curax plan`."""
    result = cli.Parser(
        "plan",
        description="Say whether a run fits a slice of chips, before there is one.",
        epilog="Of a checkpoint its config.json is read alone, of a task in files "
        "nothing.",
    )
    result.add_recipe()
    result.add_argument(
        "--topology",
        required=True,
        metavar="CHIP:SHAPE",
        help="the slice, as v5p:4x4x4 or v5e:2x2; cpu:8 stands for devices of a CPU",
    )
    result.add_assignments()
    result.add_argument(
        "--mesh",
        choices=["auto"],
        help="try all meshes that divide, although the config has one; without any "
        "mesh they are tried anyway",
    )
    effort = result.add_mutually_exclusive_group()
    effort.add_argument(
        "--cheap",
        action="store_true",
        help="estimate from shapes, about a second; nothing is compiled",
    )
    effort.add_argument(
        "--quick",
        action="store_true",
        help="compile with the least effort: less time, other temporaries",
    )
    result.add_out("plan.json", "plan.txt")
    return result


@cli.command_line("curax.plan")
def main(argv: list[str]) -> int:
    """Exit status: 0 it fits, 1 it does not, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    path, place = Path(recipe := cli.recipe_of(args)), chips.topology(args.topology)
    prepare(place, compiles=not args.cheap)
    name = cli.recipe_name(path)
    config = override(load(path), args.assignments)
    with cli.made_folder(args.out):
        from curax.planning import planner, table

        compiler = chips.has_compiler(place)
        found = planner.plan(
            planner.traced(config),
            place,
            auto=args.mesh == "auto" or no_mesh(config),
            compiles=compiler and not args.cheap,
            quick=args.quick,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
        text = table.table(name, found, compiler=compiler)
        given = {"config": recipe, "set": args.assignments, "quick": args.quick}
        data = json_bytes(given | table.page(found))
        files = {"plan.json": data, "plan.txt": f"{text}\n".encode()}
        print(f"{text}\n{cli.keep(args.out, files)}")
    return 1 if found.best is None else 0


def no_mesh(config: Config) -> bool:
    """Whether a config is of one device, as without any mesh."""
    return all(getattr(config.mesh, axis) == getattr(Mesh(), axis) for axis in AXES)


def prepare(place, *, compiles: bool = True) -> None:
    """Set what JAX reads when it starts: no accelerator, CPU devices to compile for."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # The compiler may be loaded beside another one, and looks for no TPU here.
    for name, value in (
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5p-8"),  # any: the topology is named to it
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_WORKER_ID", "0"),
        ("TF_CPP_MIN_LOG_LEVEL", "3"),
        ("TPU_MIN_LOG_LEVEL", "3"),
        ("TPU_STDERR_LOG_LEVEL", "3"),
    ):
        os.environ.setdefault(name, value)
    flag = "--xla_force_host_platform_device_count"
    if compiles and place.kind == "cpu" and flag not in os.environ.get("XLA_FLAGS", ""):
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}={place.chips}"
        os.environ["XLA_FLAGS"] = flags.strip()


if __name__ == "__main__":
    sys.exit(main())
