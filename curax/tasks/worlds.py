"""Tasks of environments that pose their own problems: prompts are what they say first.

    curax train gsm8k_qwen3_0p6b --workdir runs/lake --set task=worlds.task
    task.environment=gymnasium.environment task.environment.name=FrozenLake-v1
    model.path=DIR

The target of a prompt is a seed, of which the environment makes the same episode each
time; seeds of held-out prompts are behind those of the others. Different seeds may have
equal openings: what differs is hidden.
"""

from collections.abc import Sequence

from curax.settings.config_types import (
    CheckpointPath,
    Count,
    Function,
    Positive,
    Seed,
    present,
)
from curax.settings.declared import declares
from curax.tasks import environments, file_task
from curax.tasks.layouts import Problem
from curax.tasks.prompt_format import PromptFormat
from curax.types import HostEnvironment, Task

LAST = 2**31 - 1  # the largest target


@declares(
    tokenizer="tokenizer", prompt_tokens="max_prompt_tokens", environment="environment"
)
def task(
    *,
    environment: Function,
    tokenizer: CheckpointPath | None = None,
    size: Count = 1000,
    num_held_out: Count = 128,
    seed: Seed = 0,
    chat: bool | None = None,
    system: str | None = None,
    template: str = "{question}",
    thinking: bool | None = None,
    max_prompt_tokens: Count = 1024,
    max_answer_tokens: Count = file_task.ANSWER_TOKENS,
    workers: Count = 2,
    deadline: Positive = 5.0,
    memory_mb: Count = 2048,
) -> Task:
    """The task of an environment of text that is asked from the host.

    Args:
        environment: `() -> types.Environment` of functions of Python with `opening`, at
            the top level of a file of one's own; `curax.tasks.gymnasium.environment`,
            `curax.tasks.openenv.environment`. Its target is an integer, the seed.
        tokenizer: folder of a checkpoint, or a name on the hub; None: the `path` of
            the model.
        size: episodes to train on.
        num_held_out: held-out episodes.
        seed: of the first of them; the others follow.
        chat: as `file_task.task`, and so are the options that follow.
        system: the system turn.
        template: the prompt, with what the environment says first in place of
            `{question}`.
        thinking: the template's `enable_thinking`.
        max_prompt_tokens: longer prompts are refused.
        max_answer_tokens: of what the environment says to a turn; more is cut off.
        workers: worker processes; an environment that is a server needs none.
        deadline: seconds per turn; beyond, the outcome is missing.
        memory_mb: MiB per worker; beyond, the outcome is missing.

    Raises:
        ValueError: in a sentence, for an option, or where the environment has no
            opening.
    """
    last = seed + size + num_held_out - 1
    if last > LAST:
        raise ValueError(
            f"task.seed={seed} and {size + num_held_out} episodes need seeds of up to "
            f"{last}, and targets are at most {LAST}; set task.seed to at most "
            f"{max(LAST - (last - seed), 0)}."
        )
    form = PromptFormat(
        tokenizer=file_task.load_tokenizer(tokenizer),
        chat=chat,
        system=system,
        template=template,
        thinking=thinking,
    )
    processes = {"count": workers, "deadline": deadline, "memory_mb": memory_mb}
    world = environments.of_text(environment, form, max_answer_tokens, **processes)
    seeds = range(seed, seed + size + num_held_out)
    texts = zip(seeds, opened(world, seeds), strict=True)
    asked = {n: form.prompt(Problem(question=t)) for n, t in texts}
    if empty := [n for n, tokens in asked.items() if not tokens]:
        raise ValueError(
            f"task.environment says nothing first for seed {empty[0]}, and a prompt "
            "must have a token; let its opening give text, or task.template have some."
        )
    longest = max(map(len, asked.values()))
    if longest > max_prompt_tokens:
        raise ValueError(
            f"task.environment begins with prompts of up to {longest} tokens; set "
            f"task.max_prompt_tokens={longest}, or let it say less."
        )
    return environments.posed(
        form.tokenizer,
        {n: asked[n] for n in seeds[:size]},
        {n: asked[n] for n in seeds[size:]},
        world,
        prompt_form=form.description,
        summary=f"{size} episodes to train on, {num_held_out} held out.",
    )


def opened(world: HostEnvironment, seeds: Sequence[int]) -> list[str]:
    """What an environment says first, of each seed.

    Raises:
        ValueError: it does not say it.
    """
    try:
        said = present(world.openings)([*seeds])
    except RuntimeError as error:  # its workers do not start
        raise ValueError(str(error)) from error
    texts = []
    for place, one in zip(seeds, said, strict=True):
        if isinstance(one, str):
            raise ValueError(
                f"task.environment says nothing first for seed {place} ({one}); let it "
                "have an opening, a function of a state that gives text."
            )
        texts.append(one.tokens)
    return texts
