"""python -m curax.evaluate: accuracy of a policy on problems, with intervals.

Samples completions of problems without hints, grades them, and reports mean@n, pass@k,
maj@k and greedy accuracy with bootstrap intervals over problems.
"""

import math
import shlex
import sys
from argparse import BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

from curax.config import ConfigError
from curax.evaluation.benchmarks import BENCHMARKS, PROTOCOL
from curax.settings.cli import DTYPES, Parser, command_line
from curax.settings.config_types import (
    Count,
    Devices,
    Natural,
    Positive,
    Seed,
    Share,
    out_of_range,
)

# Type and range of each option; None is allowed where the default is elsewhere.
OPTION_TYPES: dict[str, Any] = {
    "n": Natural,
    "temperature": Positive,
    "top_p": Share,
    "top_k": Natural,
    "max_tokens": Count,
    "max_prompt_tokens": Count,
    "batch": Count,
    "slots": Natural,
    "confidence": Count,
    "window": Count,
    "seed": Seed,
    "limit": Count,
    "workers": Count,
    "deadline": Positive,
    "memory_mb": Count,
}


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
        help="devices along each axis, -1: all that are left (default: as the run; "
        "1 1 1)",
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
    group.add_argument("--limit", type=int, metavar="N", help="the first N of each")
    group.add_argument(
        "--layout",
        metavar="MODULE:FUNCTION",
        help="record to problem (default: curax.tasks.layouts:detect)",
    )
    group.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="what to do about a broken record",
    )
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="1024")
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
    group.add_argument(
        "--n",
        type=int,
        help="sampled completions per problem; mean@n is avg@n (default: 8, or as the "
        "benchmark)",
    )
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
    group.add_argument("--temperature", type=float, metavar="T", help="1.0")
    group.add_argument("--top-p", type=float, metavar="P", help="1.0, all")
    group.add_argument("--top-k", type=int, metavar="K", help="0, all")
    group.add_argument("--max-tokens", type=int, metavar="N", help="1024")
    group.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    group.add_argument(
        "--batch", type=int, default=16, help="problems at a time (default: 16)"
    )
    group.add_argument(
        "--slots",
        type=int,
        default=64,
        help="completions decoded at a time (default: 64; 0: all of a batch)",
    )
    group.add_argument(
        "--confidence",
        type=int,
        metavar="K",
        help="score each completion by how sure its tokens are, from the K likeliest "
        "of each, and weigh votes by that (20, as DeepConf; default: not done)",
    )
    group.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="tokens over which confidence is averaged, and those of the tail (2048)",
    )


def _add_grading_options(parser: Parser) -> None:
    """Add the options of the grader and its processes."""
    group = parser.add_argument_group("how they are graded")
    group.add_argument(
        "--grader",
        metavar="MODULE:FUNCTION",
        help="(question, completion, answer) to an outcome in [0, 1], or None "
        "(default: as the run; curax.verify.graders:mathematics)",
    )
    group.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    group.add_argument(
        "--deadline",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds for one completion; then its outcome is missing (default: 5)",
    )
    group.add_argument(
        "--memory-mb",
        type=int,
        default=2048,
        metavar="MB",
        help="memory of a process (default: 2048)",
    )


@command_line("curax.evaluate")
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 1 stopped by a failure, 2 bad input, 128 + n by a signal."""
    args = parser().parse_args(argv)
    apply_benchmark(args)
    check(args)
    name = Path(args.model).resolve().name
    name += f"-{args.benchmark}" if args.benchmark else ""
    out = Path(args.out or Path("runs", "evaluate", name))
    command = shlex.join([sys.orig_argv[0], "-m", "curax.evaluate", *argv])
    # This imports jax, which takes seconds: not before the input is read.
    from curax.evaluation import runner

    return runner.evaluate(args, out, command=command)


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
        if args.template is not None:
            args.changed["template"] = repr(args.template)
    args.n = 8 if args.n is None else args.n


def check(args: Namespace) -> None:
    """Check the range and combination of options, and set the default of `k`.

    Raises:
        ConfigError: an option is wrong.
    """
    for name, kind in OPTION_TYPES.items():
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
    for path in args.data:
        if args.data.count(path) > 1:
            raise ConfigError(f"--data {path} is named twice; name it once.")


if __name__ == "__main__":
    sys.exit(main())
