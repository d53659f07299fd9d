"""Functions of a user's own that break what their stage promises: none passes."""

import linecache
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from outputs import message

from curax import advantage, downsample, gate, loss, modulate, objective, reward
from curax.config import KL, ConfigError, Stop, load
from curax.runs import checkpoint, run
from curax.runs.rows import NotWrittenError
from curax.settings import errors
from curax.settings.declared import declares
from curax.step import draw, drivers, rehearsal, stages
from curax.step.types import StepRequest
from curax.theory import population, summary
from curax.types import Difficulty

HERE = __name__
ROOT = Path(__file__).parents[1]
CONFIG = replace(small.get_config(), warm_start=None)  # 4 prompts, groups of 4
EVEN = population.of_beta(1, 1, count=8)


def counts(number: Any, dtype: Any = jnp.int32) -> Callable[..., jax.Array]:
    def allocate(difficulty, *, budget, most):
        return jnp.full(difficulty.draws.shape, number, dtype)

    return allocate


def more_of_the_unknown(difficulty, *, budget, most):
    """Sums to the budget only where all prompts are known alike."""
    return jnp.where(difficulty.solved > 0, most, 2).astype(jnp.int32)


def everything(outcome, exists, finished):
    return jnp.ones_like(exists)


def unsure(outcome, exists, finished):
    return jnp.where(exists, 1.0, 0.0)


def reopened(key, reward, pool):
    return jnp.ones_like(pool)


@declares(keeps="m")
def all_of_them(key, reward, pool, *, m: int):
    return pool


def by_rate(reward, pool, keep):
    right = jnp.sum(reward, -1, where=keep, keepdims=True)
    return jnp.where(keep, 1.0 / right, 0.0)


def of_groups(reward, exists):
    return jnp.mean(reward, -1)


def forgotten(reward, exists):
    advantage.group_mean(reward, exists)


def misspelt(reward, exists):
    return reward - reward.average()


def of_lists(outcome, exists, history):
    return [1.0] * 4


def inverse(outcome, exists, history):
    return jnp.where(exists, 1.0 / history[..., None], 0.0) * jnp.inf


def of_no_rate(p):
    return jnp.log(p, out=None, where=p.nothing)


def lengths(outcome, length):
    return outcome / (1 - outcome)


def of_rows(logp, logp_old, advantage, mask):
    return -advantage[:, 0] * logp.sum(-1)


def exploding(logp, logp_old, advantage, mask):
    return -advantage / (logp - logp_old)


def by_row(mask):
    return mask.sum(-1) / mask.sum()


def a_mask(tokens):
    return tokens.entropy > 0.1


def one_by_one(outcome, exists):
    return outcome > 0.5


def nats(logp, logp_ref):
    return jnp.sum(logp - logp_ref)


def of(field: str, function: Any) -> str:
    return f"{field}={stages.full_name(function).removeprefix('curax.')}"


HUNDRED, MINUS, HALVES, WIDE = (
    counts(100),
    counts(-1),
    counts(2, jnp.float32),
    counts(4),
)
MEND = "; mend the function, or name another."


def gives(field: str, function: Any, what: str, wanted: str = "") -> tuple:
    """A stage that gives what it must not, and what is said of it."""
    rule = f", and {field} must give {wanted}" if wanted else ", which is not finite"
    return {field: function}, f"{of(field, function)} gives {what}{rule}{MEND}"


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "too many": (
        {"allocate": HUNDRED},
        f"{of('allocate', HUNDRED)} gives a prompt 100 completions, and must give from "
        f"0 to sampling.group_size=4{MEND}",
    ),
    "fewer than none": (
        {"allocate": MINUS},
        f"{of('allocate', MINUS)} gives a prompt -1 completions, and must give from 0 "
        f"to sampling.group_size=4{MEND}",
    ),
    "no integers": gives("allocate", HALVES, "float32 [4]", "integer [4]"),
    "over budget": (
        {"allocate": WIDE, "sampling": replace(CONFIG.sampling, budget=10)},
        f"{of('allocate', WIDE)} gives 16 completions to 4 prompts, and a step has 10, "
        f"so that 6 would be dropped{MEND}",
    ),
    "over budget at times": (
        {
            "allocate": more_of_the_unknown,
            "sampling": replace(CONFIG.sampling, budget=8),
        },
        f"allocate={HERE}.more_of_the_unknown gives 16 completions to 4 prompts, and a "
        f"step has 8, so that 8 would be dropped{MEND}",
    ),
    "what was not drawn": (
        {"gate": everything},
        f"gate={HERE}.everything lets completions train that do not exist{MEND}",
    ),
    "a gate ajar": gives("gate", unsure, "float32 [4, 4]", "bool [4, 4]"),
    "what was closed": (
        {"gate": gate.zero_variance, "downsample": reopened},
        f"downsample={HERE}.reopened keeps what the gate has closed{MEND}",
    ),
    "more than m": (
        {"downsample": partial(all_of_them, m=2)},
        f"downsample={HERE}.all_of_them keeps 4 completions of a prompt, and its m is "
        f"2{MEND}",
    ),
    "a division by none right": gives("correct", by_rate, "inf"),
    "an infinite weight": gives("objective", inverse, "inf"),
    "a list": gives("objective", of_lists, "a list that is no array", "float [4, 4]"),
    "no advantage of each": gives(
        "advantage", of_groups, "float32 [4]", "float [4, 4]"
    ),
    "no return": gives("advantage", forgotten, "nothing", "float [4, 4]"),
    "no such attribute": (
        {"advantage": misspelt},
        f"advantage={HERE}.misspelt fails at {__file__}:LINE (AttributeError: ",
    ),
    "an objective among the options": (
        {"objective": partial(objective.prompt_weight, f=of_no_rate)},
        f"objective.f={HERE}.of_no_rate fails at {__file__}:LINE (AttributeError: ",
    ),
    "a reward without end": gives("shape_reward", lengths, "inf"),
    "a loss of rows": gives("loss", of_rows, "float32 [4]", "float [4, 6]"),
    "a loss of nothing by nothing": gives("loss", exploding, "-inf"),
    "weights of rows": gives("aggregate", by_row, "float32 [4]", "float [4, 6]"),
    "multipliers that are none": gives(
        "modulate", a_mask, "bool [4, 6]", "float [4, 6]"
    ),
    "a rule of completions": (
        {"stop": Stop(rule=one_by_one, round_size=2)},
        f"stop.rule={HERE}.one_by_one gives bool [4, 4], and stop.rule must give bool "
        f"[4]{MEND}",
    ),
    "a distance of all": (
        {"kl": KL(estimator=nats, coefficient=0.1)},
        f"kl.estimator={HERE}.nats gives float32 [], and kl.estimator must give float "
        f"[4, 6]{MEND}",
    ),
}


@pytest.mark.first(10)
@pytest.mark.parametrize("case", BROKEN)
def test_neither_training_nor_the_xray_accepts_what_breaks_a_promise(case):
    changed, says = BROKEN[case]
    config = replace(CONFIG, **changed)
    for looks in (run.make_loop, partial(summary.summarise, population=EVEN)):
        line, _, rest = message(ConfigError, looks, config).partition(f"{__file__}:")
        if rest:  # which line it is does not matter here
            line += f"{__file__}:LINE {rest.partition(' ')[2]}"
        assert line.startswith(says)
        assert (line == says) == ("LINE" not in says)
        assert "\n" not in line


def test_shipped_stages_keep_their_promises_with_all_their_options():
    rehearsal.check(CONFIG)
    rehearsal.check(
        replace(
            CONFIG,
            downsample=partial(downsample.max_variance, m=2),
            gate=gate.zero_variance,
            modulate=modulate.dynamo,
            kl=KL(estimator=loss.k3, coefficient=0.1),
            shape_reward=partial(reward.soft_overlong, max_tokens=2, margin=1),
        )
    )


def test_credit_is_checked_where_references_reward_too():
    dro = load(ROOT / "configs" / "dro.py")
    rehearsal.check(dro)
    with pytest.raises(ConfigError, match=r"gate=.*everything lets completions train"):
        rehearsal.check(replace(dro, gate=everything))


def test_what_an_allocator_asks_for_in_vain_is_counted():
    each = jnp.zeros(4, jnp.float32)
    known = Difficulty(draws=each, solved=each, pass_rate=each, norm=each, tokens=each)
    unread: Any = None
    asked = StepRequest(
        prompts=unread,
        contexts=unread,
        rows=None,
        key=unread,
        group=unread,
        how=unread,
        level=unread,
        known=known,
        memory=unread,
    )

    def dropped(numbers: list[int], rows: int) -> float:
        def allocate(difficulty, *, budget, most):
            return jnp.asarray(numbers, jnp.int32)

        config = replace(CONFIG, allocate=allocate)
        parts: Any = SimpleNamespace(config=config, rows=rows)
        return float(draw.dropped_rows(parts, draw.allocated(parts, asked)))

    assert dropped([4, 0, 1, 4], 16) == dropped([4, 4, 4, 4], 16) == 0
    assert dropped([100, 100, 100, 100], 16) == 4 * 96
    assert dropped([4, 4, 2, 0], 8) == 2
    assert dropped([-3, 4, 0, 0], 8) == 3


@pytest.mark.parametrize(
    ("outcome", "given"),
    [
        (np.zeros(3, np.int32), "int32 [3]"),
        (np.zeros((3, 1), np.float32), "float32 [3, 1]"),
        (np.zeros(3, bool), "bool [3]"),
        (None, "NoneType"),
    ],
)
def test_a_verifier_gives_a_number_for_each_completion(outcome, given):
    task: Any = SimpleNamespace(verify=lambda *_: outcome)
    prompts: Any = SimpleNamespace(target=np.zeros(2))
    rows = np.zeros(3, np.int32)
    rollouts: Any = SimpleNamespace(prompt=rows, tokens=rows, mask=rows, turns=None)
    said = message(ValueError, reward.on_device, task, prompts, rollouts)
    assert f"task.verify gives {given}, and must give float [3], an" in said


def shared(spread, mask):
    return jnp.ones(mask.shape[-1])


def strict(reward, exists, fit):
    return reward


def best(hard, spread, null, level):
    return hard > level, level[None]


def unending(spread, mask):
    raise RuntimeError("no end")


def test_functions_of_rewards_by_references_are_held_to_their_promises():
    grid, given = jnp.zeros((2, 3)), jnp.ones((2, 4), bool)
    looks = [jnp.zeros(6)] * 3

    def how(**functions: Any) -> Any:
        return SimpleNamespace(reflection=SimpleNamespace(**functions))

    queries = SimpleNamespace(keep=best)
    norm = SimpleNamespace(norm=lambda *_: jnp.zeros(3))
    for call, says in (
        (
            lambda: stages.called(
                how(weights=shared), "reflection.weights", None, given
            ),
            f"reflection.weights={HERE}.shared gives float32 [4], and "
            f"reflection.weights must give float [2, 4]{MEND}",
        ),
        (
            lambda: stages.called(
                how(weights=unending), "reflection.weights", None, given
            ),
            f"reflection.weights={HERE}.unending fails at {__file__}:",
        ),
        (
            lambda: stages.several(
                how(rubric=strict), "reflection.rubric", grid, grid > 0, grid > 0
            ),
            f"reflection.rubric={HERE}.strict gives 1 output, and reflection.rubric "
            f"must give 2{MEND}",
        ),
        (
            lambda: stages.several(
                *(how(queries=queries), "reflection.queries.keep"),
                *(*looks, jnp.float32(0)),
            ),
            f"reflection.queries.keep={HERE}.best gives float32 [1], and "
            f"reflection.queries.keep must give float []{MEND}",
        ),
        (
            lambda: stages.called(
                how(length=lambda a, b: b),
                "reflection.length",
                jnp.zeros((2, 3), int),
                jnp.zeros((2, 1)),
            ),
            "reflection.length=",
        ),
        (
            lambda: stages.called(
                SimpleNamespace(pilot=norm),  # pyright: ignore[reportArgumentType]
                "pilot.norm",
                *(None, None, None, SimpleNamespace(mask=jnp.ones((4, 2), bool)), 1.0),
            ),
            "pilot.norm=",
        ),
    ):
        assert message(ConfigError, call).startswith(says)


def test_an_installed_curax_names_its_own_line(monkeypatch):
    monkeypatch.setattr(errors, "PACKAGE", "/lib/site-packages/curax")
    code = compile("{}['width']", "/lib/site-packages/curax/model.py", "exec")
    with pytest.raises(ConfigError) as caught, errors.config_errors(CONFIG):
        exec(code)
    assert str(caught.value) == (
        "/lib/site-packages/curax/model.py:1: KeyError: 'width'; change the option "
        "that this line reads, or mend the line."
    )


def test_without_a_config_only_sentences_of_curax_itself_are_told(monkeypatch):
    own = "/lib/site-packages/curax/tasks.py"
    monkeypatch.setattr(errors, "PACKAGE", "/lib/site-packages/curax")
    for file, line, told in (
        (own, "raise ValueError('no such file')", ConfigError),
        (own, "int('five')", ValueError),
        ("/home/mine.py", "raise ValueError('no such file')", ValueError),
        (own, "import json; json.loads('{')", ValueError),
    ):
        monkeypatch.setitem(linecache.cache, file, (1, None, [line + "\n"], file))
        with pytest.raises(ValueError) as caught, errors.config_errors():  # noqa: PT011
            exec(compile(line, file, "exec"))
        assert (caught.type is ConfigError) == (told is ConfigError), line


def test_a_path_that_is_closed_is_named_where_curax_reads_it(monkeypatch):
    monkeypatch.setattr(errors, "PACKAGE", "/lib/site-packages/curax")
    said = "a/b cannot be used: Permission denied; name another path."
    for config in (CONFIG, None):
        with (
            pytest.raises(ConfigError, match=f"^{said}$"),
            errors.config_errors(config),
        ):
            exec(compile(CLOSED, "/lib/site-packages/curax/hub.py", "exec"))
    with pytest.raises(PermissionError), errors.config_errors():
        exec(compile(CLOSED, "/home/mine.py", "exec"))


CLOSED = "raise PermissionError(13, 'Permission denied', 'a/b')"


def test_of_errors_of_the_work_the_first_is_told():
    def first():
        raise NotWrittenError("rows cannot be written (No space left)")

    try:
        try:
            first()
        finally:
            raise checkpoint.NotSavedError("nor checkpoints.")
    except OSError as error:
        found = errors.work_error(error)
    assert found is not None
    assert found[1] == "rows cannot be written (No space left)"
    assert errors.work_error(ValueError("of the program")) is None


def test_too_little_memory_is_no_fault_of_the_config():
    with pytest.raises(MemoryError), errors.config_errors(CONFIG):
        raise MemoryError


def test_a_function_that_would_compile_at_every_call_is_refused():
    """Programs are kept by their function, so one made anew is another each time."""
    drive = drivers.Hosted()
    for made_anew in (lambda parts: parts, partial(everything), counts(1)):
        with pytest.raises(ValueError, match="is made at each call"):
            drive.call(made_anew, None)
    with pytest.raises(ValueError, match="is made at each call"):
        drivers.Abstract(drive).call(partial(everything), None)
