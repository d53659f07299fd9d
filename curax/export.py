"""python -m curax.export: the policy of a run as a Hugging Face checkpoint.

One that began from such a checkpoint is written like it, with adapters merged, or its
adapters alone. One of curax's own becomes a new checkpoint of its architecture.
"""

import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curax.config import Config, ConfigError, option
from curax.models import prompt_form
from curax.settings.cli import Parser, survives_closed_output

if TYPE_CHECKING:
    from curax.runs.policies import Policy

DTYPES = ("float32", "bfloat16", "float16")
# The files of a tokenizer, among those of a checkpoint.
TOKENIZER = (
    *("tokenizer.json", "*.model", "vocab.json", "merges.txt", "added_tokens.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)


def parser() -> Parser:
    """The command line."""
    result = Parser(
        prog="python -m curax.export",
        allow_abbrev=False,
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


@survives_closed_output
def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 it could not be written, 2 bad input, 130 interrupted."""
    out = Path()
    try:
        args = parser().parse_args(argv)
        run, out = Path(args.run), Path(args.out)
        if out.exists():
            raise ConfigError(f"{out} exists already; name a new folder.")
        # These import jax, which takes seconds: not before the input is read.
        from curax.runs import policies

        config = policies.run_config(run, file=args.config)
        check(args, config)
        policy = policies.load_run(run, config, step=args.step)
        with policies.errors_as_sentences():
            written(args, policy)
        print(f"Written: {out}, of step {policy.step}")
    except ConfigError as error:
        print(f"curax.export: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"curax.export: {out} cannot be written ({error.strerror or error}); "
            "mend that and try again, nothing is left there.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def check(args: Namespace, config: Config) -> None:
    """Refuse what a run cannot give.

    Raises:
        ConfigError: in a sentence.
    """
    from curax.models import pretrained, transformer

    made = _function(config.model)
    if made not in (pretrained.model, transformer.model):
        raise ConfigError(
            f"{args.run} has a model of {made.__module__}, which has no form of "
            "Hugging Face; export one of curax.models."
        )
    if args.adapter and not option(config.model, "lora_rank"):
        raise ConfigError(
            f"--adapter: {args.run} trained all parameters, model.lora_rank=0; leave "
            "--adapter out."
        )
    if args.adapter and made is not pretrained.model:
        raise ConfigError(
            f"--adapter: {args.run} began from no checkpoint that adapters could "
            "belong to; leave --adapter out."
        )
    if args.dtype and made is pretrained.model:
        raise ConfigError(
            f"--dtype {args.dtype}: {args.run} is written as "
            f"{option(config.model, 'path')} is, which it began from; leave it out."
        )


def written(args: Namespace, policy: "Policy") -> None:
    """Write the checkpoint.

    Raises:
        ConfigError: it has no form there.
        ValueError: likewise, in a sentence.
        OSError: it cannot be written.
    """
    import jax

    from curax.models import export, pretrained

    config, params = policy.config, jax.device_get(policy.params)
    assert config
    alpha = option(config.model, "lora_alpha")
    form = policy.task.prompt_form if policy.task else None
    if args.adapter:
        base = option(config.model, "path")
        export.export_adapter(args.out, params, base=base, lora_alpha=alpha, form=form)
    elif _function(config.model) is pretrained.model:
        source = option(config.model, "path")
        export.export(source, params, args.out, lora_alpha=alpha, form=form)
    else:
        new(args, policy, params, alpha)


def new(args: Namespace, policy: "Policy", params: Any, alpha: Any) -> None:
    """Write a model that came from no checkpoint, with its tokenizer if it has one."""
    import jax.numpy as jnp

    from curax.models import export

    config, task, out = policy.config, policy.task, Path(args.out).absolute()
    assert config
    assert task
    names = ("head_dim", "rope_theta", "norm_eps", "rope_scaling")
    dtype = args.dtype or params["embed"].dtype.name
    tokenizer = option(config.task, "tokenizer")
    copies = export.others(Path(tokenizer), TOKENIZER) if tokenizer else []
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
        folder = Path(place, out.name)
        export.write_new(
            folder,
            params,
            lora_alpha=alpha,
            dtype=getattr(jnp, dtype),
            extra={"eos_token_id": list(task.end), "pad_token_id": task.pad},
            **{name: option(config.model, name) for name in names},
        )
        for file in copies:
            if len(file.parts) == 1:
                shutil.copy(Path(tokenizer, file), folder)
        if task.prompt_form is not None:
            prompt_form.write(folder, task.prompt_form)
        folder.rename(out)


def _function(bound: Any) -> Any:
    """A function without its options."""
    return getattr(bound, "func", bound)


if __name__ == "__main__":
    sys.exit(main())
