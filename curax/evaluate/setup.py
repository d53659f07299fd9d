"""Setup of an evaluation from its command line: policy, questions, sampling."""

import contextlib
import dataclasses
import re
import sys
import zlib
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from curax import hub, rollout
from curax.config import Config, ConfigError
from curax.config import Mesh as Sizes
from curax.evaluate import questions
from curax.evaluate.questions import Questions
from curax.evaluate.samples import SamplingSpec
from curax.models import prompt_form
from curax.runs import checkpoint, folder, marks, policies
from curax.runs.policies import Policy
from curax.settings import errors, functions, machine
from curax.settings.cli import check_absent
from curax.settings.config_paths import describe, options, unbound
from curax.settings.sizes import checkpoint_of, declared_option
from curax.step import mesh as meshes
from curax.tasks import environments, file_task, layouts, sources, text, worlds
from curax.tasks.prompt_format import PromptFormat
from curax.types import Task
from curax.verify import graders, serve
from curax.verify.workers import pool

FORM = ("system", "template", "chat", "thinking")  # options of the prompt form
# Options that apply only to files of problems.
FILE_OPTIONS = (*FORM, "layout", "on_error", "grader", "max_prompt_tokens")
READING = ("layout", "on_error")  # those that apply only to files of --data
OF_FILES = "files of problems, and --data names none; leave it out, or name --data"

TOKEN = 8  # bytes of a token drawn, with its log-prob
# Options of sampling that the command line or a run gives, with their defaults.
DRAWN: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "max_tokens": 1024,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSetup:
    """Policy, questions, sampling options and settings of an evaluation.

    Attributes:
        policy: policy that is evaluated.
        questions: question sets by the name of their samples file.
        limit: number of questions of each set, the first ones; None: all.
        sampling: how completions are sampled.
        ks: values of k of pass@k.
        settings: JSON of all that determines completions and outcomes.
        source: JSON that names the model, step and data.
    """

    policy: Policy
    questions: Mapping[str, Questions]
    limit: int | None
    sampling: SamplingSpec
    ks: Sequence[int]
    settings: dict[str, Any]
    source: dict[str, Any]


def prepare(args: Namespace, opened: contextlib.ExitStack) -> EvaluationSetup:
    """Read config, questions and policy, and start the graders.

    Args:
        args: command line.
        opened: exit stack that will stop the graders.

    Raises:
        ConfigError: an option is wrong, or a file cannot be read.
    """
    name_of_model, path = _model(args)
    config, step = _run_config(path, args), args.step or "latest"
    with policies.only_read(), errors.config_errors():
        if config and not args.data and unbound(config.task) is not file_task.task:
            check_absent(args, FILE_OPTIONS, OF_FILES)
            policy = policies.load_run(path, config, step=step)
            assert policy.task
            name = f"held out by {path}"
            sets: dict[str, Questions] = {
                "held_out.jsonl": questions.of_task(policy.task, name)
            }
            grading = _code_of_environment(config.task)
        else:
            form = _prompt_form(path, config, args)
            sets, grading = _file_questions(config, form, args, opened)
            if config:
                policy = policies.load_run(path, config, step=step)
            else:
                axes = zip(meshes.AXES, args.mesh or (1, 1, 1), strict=True)
                policy = policies.load_checkpoint(
                    path,
                    vocab_size=form.tokenizer.size,
                    sizes=Sizes(**dict(axes)),
                    dtype=args.dtype,
                )
    if policy.task and not args.data:
        other = "files with --data"
        folder.check_questions(path, policy.task, of=str(path), other=other)
    with policy.context():
        wrong = policies.nonfinite(policy.params)
    if wrong:
        more = f" and {len(wrong) - 1} others" if wrong[1:] else ""
        raise ConfigError(
            f"--model {name_of_model}: the parameter {wrong[0]}{more} has values that "
            "are not finite; name another checkpoint, or another --step of the run."
        )
    sampling = _sampling_spec(config, next(iter(sets.values())).task, args)
    return EvaluationSetup(
        policy=policy,
        questions=sets,
        limit=args.limit,
        sampling=sampling,
        ks=args.k,
        settings=_settings(policy, sets, sampling, args.limit) | grading,
        source={
            "model": name_of_model,
            "step": policy.step,
            "data": {name: one.name for name, one in sets.items()},
            **({"benchmark": args.benchmark} if args.benchmark else {}),
        },
    )


def _model(args: Namespace) -> tuple[str, Path]:
    """Name of the model, on the hub with its commit, and its folder.

    Raises:
        ConfigError: there is no such folder.
    """
    with errors.refusals(hub.HubError, of="--model"):
        name = hub.pinned(args.model, "model")
        path = hub.checkpoint(name)
    if not path.is_dir():
        raise ConfigError(
            f"--model {path} is no folder; name that of a checkpoint or of a run."
        )
    return name, path


def _run_config(path: Path, args: Namespace) -> Config | None:
    """Config of a run with --mesh and --dtype applied; None: a checkpoint, no run."""
    if policies.is_run(path):
        new: dict[str, Any] = {}
        if args.mesh:
            axes = zip(meshes.AXES, args.mesh, strict=True)
            new |= {f"mesh.{axis}": size for axis, size in axes}
            new["mesh.draw_share"] = None
        if args.dtype:
            new["model.dtype"] = getattr(jnp, args.dtype)
        return policies.run_config(path, file=args.config, changes=new)
    what = f"runs, and {path} is none; leave it out or name the folder of a run"
    check_absent(args, ("step", "config"), what)
    if not args.data:
        raise ConfigError(
            f"--data names no file, and {path} is no run with problems of its own; add "
            "--data FILE."
        )
    return None


def _prompt_form(path: Path, config: Config | None, args: Namespace) -> PromptFormat:
    """Prompt form of the run or checkpoint, changed by the command line."""
    known = options(config.task) if config else {"tokenizer": str(path)}
    model = checkpoint_of(config) if config else None
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
    values = {n: _first_given(getattr(args, n), known.get(n)) for n in FORM}
    if args.benchmark and values["template"] is None:
        values["template"] = layouts.STEP_BY_STEP
    form = PromptFormat(
        tokenizer=tokenizer,
        **{name: value for name, value in values.items() if value is not None},
    )
    warning = prompt_form.mismatch(None if config else path, form.description)
    if warning:
        print(f"Warning: {warning}", file=sys.stderr, flush=True)
    return form


def _file_questions(
    config: Config | None,
    form: PromptFormat,
    args: Namespace,
    opened: contextlib.ExitStack,
) -> tuple[dict[str, Questions], dict[str, Any]]:
    """Question sets of files by samples file, and the settings of their grading."""
    known = options(config.task) if config else {}
    layout = _import_function("layout", args.layout) or layouts.detect
    if not args.data:
        check_absent(args, READING, OF_FILES)
        layout = known["held_out_layout"] or known["layout"]
    grader = _import_function("grader", args.grader) or known.get(
        "grader", graders.mathematics
    )
    longest = _first_given(args.max_prompt_tokens, known.get("max_prompt_tokens"), 1024)
    on_error = _first_given(args.on_error, "raise")
    sides: dict[str, tuple[str, sources.ProblemSet]] = {}
    for path in args.data:
        path = hub.pinned(path, "dataset")
        of_hub = hub.parsed(path, "dataset")
        stem = re.sub(r"\W+", "-", f"{of_hub.repo}-{of_hub.inside}") if of_hub else path
        name = stem = Path(stem).stem.strip("-") or "data"
        count = 1
        while f"{name}.jsonl" in sides:
            name, count = f"{stem}-{count + 1}", count + 1
        try:
            records = sources.open_records(path, split="test")
            side = file_task.usable(
                records, layout, form, longest=longest, on_error=on_error
            )
        except ValueError as error:
            message = str(error).replace("--set task.on_error=", "--on-error ")
            raise ConfigError(message) from error
        sides[f"{name}.jsonl"] = path, side
    if not sides:
        own = dataclasses.replace(form, **{name: known[name] for name in FORM})
        held_out = questions.held_out_problems(known, own, form, longest)
        sides["held_out.jsonl"] = "held out", held_out
    processes = {"count": args.workers, "deadline": args.deadline}
    processes["memory_mb"] = args.memory_mb
    judge: dict[str, Any] = {"grader": describe(grader)}
    # One that poses its own prompts knows seeds, and no answers of files.
    poses = config is not None and unbound(config.task) is worlds.task
    make = None if args.grader or poses else known.get("environment")
    with errors.refusals((ValueError, RuntimeError)):
        if make is not None:
            most = known.get("max_answer_tokens", file_task.ANSWER_TOKENS)
            judge = {"environment": describe(make), "max_answer_tokens": most}
            world = environments.of_text(make, form, most, **processes)
            if world.start:
                world.start()
            judge |= _code(make, serve.ENVIRONMENT)
            how: tuple[Any, ...] = None, None, world
        else:
            made = pool(graders.outcome_of(grader), **processes)
            workers = opened.enter_context(made)
            workers.start()
            how = workers, graders.statement(grader)
            judge |= _code(graders.outcome_of(grader), serve.GRADER)
    sets: dict[str, Questions] = {
        name: questions.of_file(side, form, path, *how)
        for name, (path, side) in sides.items()
    }
    return sets, {
        "form": {name: getattr(form, name) for name in FORM},
        "max_prompt_tokens": longest,
        "layout": describe(layout),
        **judge,
        "deadline": args.deadline,
        "memory_mb": args.memory_mb,
    }


def _code(served: Callable[..., Any], service: serve.Service) -> dict[str, Any]:
    """Hash of the file of a grader or an environment that is not of curax."""
    mark = marks.code(served, service)
    return {"code": mark} if mark else {}


def _code_of_environment(task: Callable[..., Task]) -> dict[str, Any]:
    """As `_code`, of the environment that a task names; empty where no function is."""
    make = declared_option(task, "environment")
    return _code(make, serve.ENVIRONMENT) if callable(make) else {}


def _import_function(option: str, name: str | None) -> Callable[..., Any] | None:
    """The function MODULE:FUNCTION, imported; None without a name."""
    if name is None:
        return None
    try:
        return functions.named(name)
    except functions.NotFoundError as error:
        raise ConfigError(f"--{option} {name} {error}") from error


def _sampling_spec(config: Config | None, task: Task, args: Namespace) -> SamplingSpec:
    """Sampling options: command line, else the run's, else the defaults."""
    if args.confidence and task.environment is not None:
        raise ConfigError(
            f"--confidence {args.confidence} is averaged over tokens in a row, between "
            "which task.environment writes; leave it out."
        )
    sizes, given = config.sampling if config else None, {}
    for name, default in DRAWN.items():
        own = sizes and getattr(sizes, name)
        given[name] = _first_given(getattr(args, name), own, default)
    tokens = max(args.n, 1) * args.batch * given["max_tokens"]
    if tokens * TOKEN > machine.ram() / 2:
        raise ConfigError(
            f"--n {args.n} completions of --batch {args.batch} problems, of up to "
            f"--max-tokens {given['max_tokens']}, take half the memory of this machine "
            "at least; lower one of them."
        )
    return SamplingSpec(
        n=args.n,
        greedy=args.greedy,
        how=rollout.Settings(end=task.end, pad=task.pad, slots=args.slots, **given),
        seed=args.seed,
        batch=args.batch,
        confidence=_first_given(args.confidence, 0),
        window=_first_given(args.window, 2048),
    )


def _settings(
    policy: Policy,
    sets: Mapping[str, Questions],
    sampling: SamplingSpec,
    limit: int | None,
) -> dict[str, Any]:
    """JSON of all that determines the completions: weights, questions, sampling."""
    # Of these alone completions depend.
    options = {"n": sampling.n, "greedy": sampling.greedy}
    options |= {name: getattr(sampling.how, name) for name in DRAWN}
    options |= {"seed": sampling.seed}
    if sampling.confidence:
        options |= {"confidence": sampling.confidence, "window": sampling.window}
    with policy.context():
        weights = checkpoint.fingerprint(policy.params)
        head = jax.eval_shape(policy.model.head, policy.params)
    return {
        "parameters": weights,
        "dtype": head.dtype.name,
        "questions": {name: _questions_hash(one) for name, one in sets.items()},
        "answers": {name: zlib.crc32(one.contents) for name, one in sets.items()},
        "limit": limit,
        "sampling": options,
    }


def _questions_hash(questions: Questions) -> int:
    """Hash of the questions and of the first prompt's tokens."""
    tokens, mask = questions.prompts([0])
    first = tokens[mask].astype("<i4").tobytes()
    return zlib.crc32(b"".join([*questions.digests, first]))


def _first_given(*values: Any) -> Any:
    """First of some values that is not None; None if all are."""
    return next((value for value in values if value is not None), None)
