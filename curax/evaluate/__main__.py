"""python -m curax.evaluate: accuracy of a policy on problems, with intervals.

Samples completions of problems without hints, grades them, and reports mean@n, pass@k,
maj@k and greedy accuracy with bootstrap intervals over problems.
"""

import math
import os
import sys
from argparse import BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from curax.config import ConfigError
from curax.evaluate.benchmarks import BENCHMARKS, PROTOCOL
from curax.settings.cli import DTYPES, Parser, again, command_line
from curax.settings.config_types import (
    Count,
    Devices,
    Natural,
    Positive,
    Seed,
    Share,
    out_of_range,
)


class Number(NamedTuple):
    """An option that is a number."""

    kind: Any  # type and range
    help: str
    metavar: str | None = None
    default: float | None = None  # None: of the run, the benchmark or the prompt form


NUMBERS = {
    "n": Number(
        Natural,
        "sampled completions per problem; mean@n is avg@n (default: 8, or as the "
        "benchmark)",
    ),
    "temperature": Number(Positive, "1.0", "T"),
    "top_p": Number(Share, "1.0, all", "P"),
    "top_k": Number(Natural, "0, all", "K"),
    "max_tokens": Number(Count, "1024", "N"),
    "max_prompt_tokens": Number(Count, "1024", "N"),
    "batch": Number(Count, "problems at a time (default: 16)", default=16),
    "slots": Number(
        Natural,
        "completions decoded at a time (default: 64; 0: all of a batch)",
        default=64,
    ),
    "confidence": Number(
        Count,
        "score each completion by how sure its tokens are, from the K likeliest of "
        "each, and weigh votes by that (20, as DeepConf; default: not done)",
        "K",
    ),
    "window": Number(
        Count,
        "tokens over which confidence is averaged, and those of the tail (2048)",
        "N",
    ),
    "seed": Number(Seed, "of all draws (default: 0)", default=0),
    "limit": Number(Count, "the first N of each", "N"),
    "workers": Number(Count, "processes (default: 2)", default=2),
    "deadline": Number(
        Positive,
        "seconds for one completion; then its outcome is missing (default: 5)",
        *("S", 5.0),
    ),
    "memory_mb": Number(Count, "memory of a process (default: 2048)", "MB", 2048),
}
# Options that no benchmark sets, but that change what is asked or how it is graded.
ASKED = ("system", "template", "chat", "thinking", "max_prompt_tokens", "grader")


def _add_numbers(group: Any, *names: str) -> None:
    """Add some of `NUMBERS`."""
    for name in names:
        one = NUMBERS[name]
        kind, option = get_args(one.kind)[0], f"--{name.replace('_', '-')}"
        shown = {"metavar": one.metavar, "help": one.help}
        group.add_argument(option, type=kind, default=one.default, **shown)


def parser() -> Parser:
    """Argument parser of `python -m curax.evaluate`."""
    result = Parser(
        "evaluate",
        description="Measure a policy on problems with answers.",
        epilog="The folder gets settings.json, results.json, and the completions of "
        "each file as JSON lines. What is drawn follows from the seed alone, so the "
        "same command goes on with an evaluation that was stopped.",
    )
    _add_policy_options(result)
    _add_question_options(result)
    _add_sampling_options(result)
    _add_grading_options(result)
    result.add_argument(
        "--out", metavar="DIR", help="where to write (default: runs/evaluate/NAME)"
    )
    return result


def _add_policy_options(parser: Parser) -> None:
    """Add the options that name the policy."""
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="folder of a Hugging Face checkpoint, its name on the hub, or the folder "
        "of a run",
    )
    group.add_argument(
        "--step", metavar="N", help="of a run: a step, best or latest (default)"
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        help="of a run: its config file, if that defines functions of its own",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of activations, and of a checkpoint's parameters (default: as the run; "
        "float32 on a CPU, else bfloat16)",
    )
    group.add_argument(
        "--mesh",
        nargs=3,
        type=int,
        metavar=("DATA", "FSDP", "TENSOR"),
        help="devices along each axis, -1: all that are left (default: as the run, or "
        "where that cannot be, along FSDP; of a checkpoint 1 1 1)",
    )


def _add_question_options(parser: Parser) -> None:
    """Add the options of the questions and their prompt form."""
    group = parser.add_argument_group(
        "what is asked",
        "Defaults are those of the run's task, if it has files of problems.",
    )
    group.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="JSON lines, parquet, a folder of array_record, or a name on the hub, as "
        "openai/gsm8k:main (default: what the run holds out)",
    )
    group.add_argument(
        "--benchmark",
        choices=sorted(BENCHMARKS),
        metavar="NAME",
        help="what the file of --data is: sets layout, prompt and sampling to those of "
        f"a published protocol, where no option says else ({', '.join(BENCHMARKS)})",
    )
    _add_numbers(group, "limit")
    group.add_argument(
        "--layout",
        metavar="MODULE:FUNCTION",
        help="record to problem (default: curax.tasks.layouts:detect)",
    )
    group.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        help="what to do about a broken record (default: raise)",
    )
    _add_numbers(group, "max_prompt_tokens")
    group.add_argument("--system", metavar="TEXT", help="the system turn")
    group.add_argument(
        "--template", metavar="TEXT", help="what is asked, with {question} in it"
    )
    group.add_argument(
        "--chat",
        action=BooleanOptionalAction,
        help="ask in the chat template (default: where there is one)",
    )
    group.add_argument(
        "--thinking",
        action=BooleanOptionalAction,
        help="what the template is told as enable_thinking",
    )


def _add_sampling_options(parser: Parser) -> None:
    """Add the options of sampling, and of the estimators of its completions."""
    group = parser.add_argument_group(
        "how completions are drawn", "Defaults are those of the run's sampling."
    )
    _add_numbers(group, "n")
    group.add_argument(
        "--k",
        type=int,
        nargs="+",
        metavar="K",
        help="of pass@k, and from 3 on of maj@k (default: 1 and n)",
    )
    group.add_argument(
        "--greedy", action="store_true", help="a greedy completion as well"
    )
    _add_numbers(group, "temperature", "top_p", "top_k", "max_tokens", "seed")
    _add_numbers(group, "batch", "slots", "confidence", "window")


def _add_grading_options(parser: Parser) -> None:
    """Add the options of the grader and its processes."""
    group = parser.add_argument_group("how they are graded")
    group.add_argument(
        "--grader",
        metavar="MODULE:FUNCTION",
        help="(question, completion, answer) to an outcome in [0, 1], or None "
        "(default: as the run; curax.verify.graders:mathematics)",
    )
    _add_numbers(group, "workers", "deadline", "memory_mb")


@command_line("curax.evaluate")
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 1 stopped by a failure, 2 bad input, 128 + n by a signal."""
    args = parser().parse_args(argv)
    apply_benchmark(args)
    check(args)
    name = Path(os.path.realpath(args.model)).name
    name += f"-{args.benchmark}" if args.benchmark else ""
    out = Path(args.out or Path("runs", "evaluate", name))
    # This imports jax, which takes seconds: not before the input is read.
    from curax.evaluate import runner

    return runner.evaluate(args, out, command=again("evaluate", argv))


def apply_benchmark(args: Namespace) -> None:
    """Set options that are not given to those of the benchmark, if there is one.

    Raises:
        ConfigError: not exactly one file is named with it.
    """
    args.changed = {}
    if args.benchmark:
        if len(args.data) != 1:
            raise ConfigError(
                f"--benchmark {args.benchmark} is of one file, and --data names "
                f"{len(args.data)}; add --data FILE with its problems."
            )
        for name in PROTOCOL:
            default = getattr(BENCHMARKS[args.benchmark], name)
            given = getattr(args, name)
            if given is None:
                setattr(args, name, default)
            elif given != default:
                args.changed[name] = given
        for name in ASKED:
            if (given := getattr(args, name)) is not None:
                args.changed[name] = repr(given)
    args.n = 8 if args.n is None else args.n


def check(args: Namespace) -> None:
    """Check the range and combination of options, and set the default of `k`.

    Raises:
        ConfigError: an option is wrong.
    """
    for name, (kind, *_) in NUMBERS.items():
        value, typed = getattr(args, name), f"--{name.replace('_', '-')}"
        if type(value) is float and not math.isfinite(value):
            raise ConfigError(f"{typed} {value} is not finite; write {typed} 1.")
        if value is not None and (bounds := out_of_range(value, kind)):
            raise ConfigError(
                f"{typed} {value} must be {bounds}; write {typed} "
                f"{bounds.nearest(value)}."
            )
    if args.n == 0 and not args.greedy:
        raise ConfigError("--n 0 draws nothing; add --greedy, or write --n 1.")
    if args.n == 0 and args.k:
        raise ConfigError("--k is of sampled completions; leave it out at --n 0.")
    args.k = sorted({*(args.k or (1, args.n))}) if args.n else []
    for k in args.k:
        if not 1 <= k <= args.n:
            raise ConfigError(
                f"--k {k} completions cannot be drawn from --n {args.n}; write --k "
                f"{min(max(k, 1), args.n)}, or a higher --n."
            )
    if args.window is not None and args.confidence is None:
        raise ConfigError(
            "--window is of confidence; add --confidence 20, or leave it out."
        )
    if args.template is not None and "{question}" not in args.template:
        raise ConfigError(
            f"--template {args.template!r} does not say where the question stands; put "
            "{question} into it."
        )
    for size in args.mesh or ():
        if bounds := out_of_range(size, Devices):
            raise ConfigError(f"--mesh {size} must be {bounds}; write --mesh 1 1 1.")
    if sum(size == -1 for size in args.mesh or ()) > 1:
        raise ConfigError("--mesh: one size at most may be -1; write --mesh 1 -1 1.")
    named = [os.path.realpath(path) for path in args.data]
    for path, real in zip(args.data, named, strict=True):
        if named.count(real) > 1:
            raise ConfigError(f"--data {path} is named twice; name it once.")


if __name__ == "__main__":
    sys.exit(main())
