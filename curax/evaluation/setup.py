"""What the command line of an evaluation asks of whom, read and made ready."""

import contextlib
import dataclasses
import pkgutil
import sys
import zlib
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from curax.config import Config, ConfigError, describe, option, options
from curax.config import Mesh as Sizes
from curax.evaluation import questions
from curax.evaluation.questions import OfFile, OfTask, Questions
from curax.evaluation.samples import How
from curax.models import prompt_form
from curax.runs import checkpoint, policies
from curax.runs.policies import Policy, in_a_sentence
from curax.settings.packages import missing
from curax.step import mesh as meshes
from curax.tasks import file_task, layouts, text
from curax.tasks.prompt_format import PromptFormat
from curax.verify import graders
from curax.verify.workers import Workers

# Options that ask for something of a file of problems, and of nothing else.
OF_FILES = (
    *("system", "template", "chat", "thinking", "layout", "grader"),
    "max_prompt_tokens",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exam:
    """What is asked of whom.

    Attributes:
        policy: who.
        questions: by the name of their samples file.
        limit: how many of each are asked, the first; None: all.
        how: completions are drawn.
        ks: of pass@k.
        settings: all that decides what is drawn and how it is graded.
        about: whence policy and questions are.
    """

    policy: Policy
    questions: Mapping[str, Questions]
    limit: int | None
    how: How
    ks: Sequence[int]
    settings: dict[str, Any]
    about: dict[str, Any]


def prepared(args: Namespace, opened: contextlib.ExitStack) -> Exam:
    """Read all that is needed, the policy last; graders are ready.

    Args:
        args: of the command line.
        opened: closes the graders.

    Raises:
        ConfigError: in a sentence, for whatever cannot be.
    """
    path = Path(args.model)
    if not path.is_dir():
        raise ConfigError(
            f"--model {path} is no folder; name that of a checkpoint or of a run."
        )
    config = _config(path, args)
    with in_a_sentence():
        if config and not args.data and _function(config.task) is not file_task.task:
            _refuse_form(path, args)
            policy = policies.of_run(path, config, step=args.step or "latest")
            assert policy.task
            asked = {"held_out.jsonl": OfTask(policy.task, f"held out by {path}")}
            graded = {}
        else:
            form = _form(path, config, args)
            asked, graded = _of_files(config, form, args, opened)
            if config:
                policy = policies.of_run(path, config, step=args.step or "latest")
            else:
                axes = zip(meshes.AXES, args.mesh or (1, 1, 1), strict=True)
                policy = policies.of_checkpoint(
                    path,
                    vocab_size=form.tokenizer.size,
                    sizes=Sizes(**dict(axes)),
                    dtype=args.dtype,
                )
    how = _how(config, args)
    return Exam(
        policy=policy,
        questions=asked,
        limit=args.limit,
        how=how,
        ks=args.k,
        settings=_settings(policy, asked, how, args.limit) | graded,
        about={
            "model": args.model,
            "step": policy.step,
            "data": {name: one.name for name, one in asked.items()},
        },
    )


def _config(path: Path, args: Namespace) -> Config | None:
    """The config of a run, changed as was asked for; None: it is a checkpoint."""
    if policies.is_run(path):
        new: dict[str, Any] = {}
        if args.mesh:
            axes = zip(meshes.AXES, args.mesh, strict=True)
            new |= {f"mesh.{axis}": size for axis, size in axes}
        if args.dtype:
            new["model.dtype"] = getattr(jnp, args.dtype)
        return policies.config_of(path, file=args.config, changes=new)
    for name in ("step", "config"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name} is for runs, and {path} is none; leave it out or name the "
                "folder of a run."
            )
    if not args.data:
        raise ConfigError(
            f"--data names no file, and {path} is no run with problems of its own; add "
            "--data FILE."
        )
    return None


def _refuse_form(path: Path, args: Namespace) -> None:
    for name in OF_FILES:
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for files of problems, and {path} "
                "trains on none; leave it out, or name --data."
            )


def _form(path: Path, config: Config | None, args: Namespace) -> PromptFormat:
    """How to ask: as the run does, and as was asked for."""
    known = options(config.task) if config else {"tokenizer": str(path)}
    model = option(config.model, "path") if config else None
    where = known.get("tokenizer") or model
    if where is None:
        raise ConfigError(
            f"--data cannot be read by the task of {path}, which has no tokenizer; "
            "leave it out."
        )
    tokenizer = text.load(where)
    if not tokenizer.end:
        raise ConfigError(
            f"{where} names no token that ends a completion; give its config.json an "
            "eos_token_id."
        )
    if args.chat and tokenizer.template is None:
        raise ConfigError(
            f"--chat: {where} has no chat template; write --no-chat, or add a "
            "chat_template.jinja."
        )
    names = ("chat", "system", "template", "thinking")
    told = {name: _first(getattr(args, name), known.get(name)) for name in names}
    form = PromptFormat(
        tokenizer=tokenizer,
        **{name: value for name, value in told.items() if value is not None},
    )
    departs = prompt_form.mismatch(None if config else path, form.description)
    if departs:
        print(f"Warning: {departs}", file=sys.stderr, flush=True)
    return form


def _of_files(
    config: Config | None,
    form: PromptFormat,
    args: Namespace,
    opened: contextlib.ExitStack,
) -> tuple[dict[str, Questions], dict[str, Any]]:
    """Problems of files, graded by processes; and what decides how they are."""
    known = options(config.task) if config else {}
    layout = _named("layout", args.layout) or layouts.detect
    grader = _named("grader", args.grader) or known.get("grader", graders.mathematics)
    longest = _first(args.max_prompt_tokens, known.get("max_prompt_tokens"), 1024)
    sides: dict[str, tuple[str, file_task.ProblemSet]] = {}
    for path in args.data:
        name = stem = Path(path).stem or "data"
        count = 1
        while f"{name}.jsonl" in sides:
            name, count = f"{stem}-{count + 1}", count + 1
        try:
            side = questions.opened(
                path, form, layout=layout, longest=longest, on_error=args.on_error
            )
        except ValueError as error:
            said = str(error).replace("--set task.on_error=", "--on-error ")
            raise ConfigError(said) from error
        sides[f"{name}.jsonl"] = path, side
    if not sides:
        sides["held_out.jsonl"] = "held out", questions.held_out(known, form)
    try:
        workers = opened.enter_context(
            Workers(
                grader,
                count=args.workers,
                deadline=args.deadline,
                memory_mb=args.memory_mb,
            )
        )
        workers.start()
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    asked = {
        name: OfFile(side, form, path, workers.grade)
        for name, (path, side) in sides.items()
    }
    told = ("chat", "system", "template", "thinking")
    return dict(asked), {
        "form": {name: getattr(form, name) for name in told},
        "max_prompt_tokens": longest,
        "layout": describe(layout),
        "grader": describe(grader),
        "deadline": args.deadline,
        "memory_mb": args.memory_mb,
    }


def _named(option: str, name: str | None) -> Callable[..., Any] | None:
    """The function at MODULE:FUNCTION."""
    if name is None:
        return None
    try:
        if ":" not in name:
            raise ValueError("there is no colon in it")
        found = pkgutil.resolve_name(name)
        if not callable(found):
            raise ValueError("it is no function")
    except Exception as error:  # of anybody's module
        fix = f"({error}); write MODULE:FUNCTION, of a module that Python finds."
        if needed := missing(error):
            fix = f"because {needed}"
        raise ConfigError(f"--{option} {name} cannot be imported {fix}") from error
    return found


def _how(config: Config | None, args: Namespace) -> How:
    """How completions are drawn: as the run does, and as was asked for."""
    sizes = config.sampling if config else None
    return How(
        n=args.n,
        greedy=args.greedy,
        temperature=_first(args.temperature, sizes and sizes.temperature, 1.0),
        top_k=_first(args.top_k, sizes and sizes.top_k, 0),
        top_p=_first(args.top_p, sizes and sizes.top_p, 1.0),
        max_tokens=_first(args.max_tokens, sizes and sizes.max_tokens, 1024),
        seed=args.seed,
        batch=args.batch,
        slots=args.slots,
        confidence=_first(args.confidence, 0),
        window=_first(args.window, 2048),
    )


def _settings(
    policy: Policy, asked: Mapping[str, Questions], how: How, limit: int | None
) -> dict[str, Any]:
    """All that decides what is drawn."""
    drawn = dataclasses.asdict(how)
    del drawn["batch"], drawn["slots"]  # they change nothing
    if not how.confidence:
        del drawn["confidence"], drawn["window"]
    with meshes.use(policy.mesh):
        weights = int(checkpoint.fingerprint(policy.params))
        head = jax.eval_shape(policy.model.head, policy.params)
    return {
        "parameters": weights,
        "dtype": head.dtype.name,
        "questions": {name: _mark(one) for name, one in asked.items()},
        "limit": limit,
        "sampling": drawn,
    }


def _mark(asked: Questions) -> int:
    """Changes with the questions, and with how their first is put into tokens."""
    tokens, mask = asked.prompts([0])
    return zlib.crc32(b"".join([*asked.digests, tokens[mask].astype("<i4").tobytes()]))


def _function(bound: Callable[..., Any]) -> Callable[..., Any]:
    """A function without its options."""
    return getattr(bound, "func", bound)


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
