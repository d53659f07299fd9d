"""curax export: write the policy of a run as a Hugging Face checkpoint.

A policy that started from a checkpoint is written in its format, with LoRA merged, or
as its adapter alone. A model of curax's own becomes a checkpoint of its architecture.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from curax.config import Config, ConfigError
from curax.settings import errors
from curax.settings.cli import DTYPES, Parser, command_line
from curax.settings.config_paths import option, unbound
from curax.settings.config_types import present
from curax.settings.sizes import checkpoint_of

if TYPE_CHECKING:
    from curax.runs.policies import Policy


def parser() -> Parser:
    """Argument parser of `curax export`."""
    result = Parser(
        "export",
        description="Write the policy of a run as a Hugging Face checkpoint.",
        epilog="The folder appears under its name when it is whole.",
    )
    result.add_argument("run", metavar="RUN", help="folder of the run")
    result.add_argument("out", metavar="DIR", help="folder that does not exist yet")
    result.add_argument(
        "--step",
        default="latest",
        metavar="N",
        help="a step, best or latest (default: latest)",
    )
    result.add_argument(
        "--adapter", action="store_true", help="its LoRA alone, as peft has it"
    )
    result.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of a model that came from no checkpoint (default: as it was trained)",
    )
    result.add_argument(
        "--config",
        metavar="FILE",
        help="the run's config file, if that defines functions of its own",
    )
    return result


@command_line("curax.export")
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 1 it could not be written, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    run, out = Path(args.run), Path(args.out)
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists already; name a new folder.")
    # This imports jax, which takes seconds; wrong input is reported before.
    from curax.runs import policies

    config = policies.run_config(run, file=args.config)
    check(args, config)
    policy = policies.load_run(run, config, step=args.step)
    with errors.config_errors():
        try:
            write(args, policy)
        except OSError as error:
            print(
                f"curax.export: {out} cannot be written ({error.strerror or error}); "
                "mend that and try again, nothing is left there.",
                file=sys.stderr,
            )
            return 1
    print(f"Written: {out}, of step {policy.step}")
    return 0


def check(args: Namespace, config: Config) -> None:
    """Check that the run's model can be exported with these options.

    Raises:
        ConfigError: it cannot.
    """
    from curax.models import pretrained, written

    model = unbound(config.model)
    if not written.is_possible(config):
        raise ConfigError(
            f"{args.run} has a model of {model.__module__}, which has no form of "
            "Hugging Face; export one of curax.models."
        )
    if args.adapter and not option(config.model, "lora_rank"):
        raise ConfigError(
            f"--adapter: {args.run} trained all parameters, model.lora_rank=0; leave "
            "--adapter out."
        )
    if args.adapter and model is not pretrained.model:
        raise ConfigError(
            f"--adapter: {args.run} began from no checkpoint that adapters could "
            "belong to; leave --adapter out."
        )
    if args.dtype and model is pretrained.model:
        raise ConfigError(
            f"--dtype {args.dtype}: {args.run} is written as "
            f"{checkpoint_of(config)} is, which it began from; leave it out."
        )


def write(args: Namespace, policy: "Policy") -> None:
    """Write the checkpoint or adapter of a policy.

    Raises:
        ConfigError: Hugging Face has no format for it.
        ValueError: likewise; the message is a sentence.
        OSError: the folder cannot be written.
    """
    import jax

    from curax.models import written
    from curax.runs import card

    config, task = present(policy.config), present(policy.task)
    page = card.text(
        config,
        Path(args.run),
        name=Path(args.out).name,
        step=present(policy.step),
        prompts=task.num_prompts,
        adapter=args.adapter,
    )
    written.write(
        args.out,
        config,
        task,
        jax.device_get(policy.params),
        adapter=args.adapter,
        dtype=args.dtype,
        card=page,
    )


if __name__ == "__main__":
    sys.exit(main())
