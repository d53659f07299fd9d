"""What turns cost: seconds per token of rows with turns beside rows of one turn.

    python -m benchmarks.turns

All arms draw rows of `--tokens` tokens, none less, by the same random policy on this
machine's device, a slot for each row. In one arm nothing ends a row. In the others
every 64th token of the vocabulary ends a turn, and the environment answers with 24
tokens, which are tokens of the row as well: about three turns in 256. It is called in
the loop, or asked from the host, turn by turn, by functions of Python in this process:
the same rows, so long as no two tokens are as likely to rounding. Arms take turns;
each number is the median of nine draws, after one that compiles. Seconds of processors
are those of all threads, which tell more where others use the machine.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curax import allocate, rollout
from curax.arrays.turns import Episodes
from curax.models import transformer
from curax.step import drivers
from curax.step.types import Request, Subject
from curax.types import (
    Answer,
    Contexts,
    Environment,
    HostEnvironment,
    Observation,
    Prompts,
    Task,
    Turn,
    Weights,
)
from curax.verify.serve import after_a_turn

VOCAB, PROMPT, WIDTH, EVERY, TIMES = 512, 16, 24, 64, 9


def reset(key: jax.Array, target: Any) -> jax.Array:
    """Number of turns so far: none."""
    del key, target
    return jnp.int32(0)


def observe(
    state: jax.Array, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, Observation]:
    """The same words after every turn, and no end."""
    del tokens, length
    seen = Observation(
        tokens=jnp.arange(1, WIDTH + 1, dtype=jnp.int32),
        length=jnp.int32(WIDTH),
        done=jnp.bool_(False),
        reward=jnp.float32(0),
    )
    return state + 1, seen


def here(
    environment: Environment, *, measures: tuple[str, ...] = ()
) -> HostEnvironment:
    """An environment of Python, answered in this process, turn after turn.

    Nothing stops one that hangs or crashes: for tests, and where it is one's own.
    """

    def answer(turns: list[Turn]) -> Sequence[Answer | str]:
        return [_answer(environment, turn) for turn in turns]

    return HostEnvironment(answer=answer, measures=measures)


def from_jax(environment: Environment, *, steps: int, pad: int) -> Environment:
    """The same environment as functions of Python.

    Args:
        environment: of JAX functions.
        steps: T, tokens of a completion.
        pad: token behind the end of a turn.
    """

    @jax.jit
    def begun(halves: jax.Array, target: Any) -> Any:
        return environment.reset(jax.random.wrap_key_data(halves), target)

    observed = jax.jit(environment.observe)

    def reset(key: int, target: Any) -> Any:
        halves = np.array([key >> 32, key & 0xFFFFFFFF], np.uint32)
        return jax.device_get(begun(halves, target))

    def observe(state: Any, turn: list[int]) -> tuple[Any, Observation]:
        tokens = np.full(steps, pad, np.int32)
        tokens[: len(turn)] = turn
        after, seen = jax.device_get(observed(state, tokens, np.int32(len(turn))))
        length = seen.tokens.size if seen.length is None else int(seen.length)
        words = seen.tokens[: max(length, 0)].tolist()
        return after, dataclasses.replace(seen, tokens=words)

    return Environment(reset=reset, observe=observe, measure=environment.measure)


def _answer(environment: Environment, turn: Turn) -> Answer:
    """What an environment of Python says to a turn."""
    before = turn.state
    if before is None:
        before = environment.reset(turn.key, turn.target)
    after, seen = after_a_turn(environment.observe(before, turn.tokens))
    found = environment.measure(after) if environment.measure else {}
    return Answer(
        state=after,
        tokens=list(map(int, seen.tokens)),
        done=bool(seen.done),
        reward=float(seen.reward),
        found={name: float(value) for name, value in found.items()},
    )


def arms(rows: int, tokens: int, width: int, layers: int) -> dict[str, Callable]:
    """Compiled draws by name, each `key -> Rollouts`."""
    model = transformer.model(
        vocab_size=VOCAB, width=width, layers=layers, heads=4, kv_heads=2
    )
    params = model.init(jax.random.key(0))
    prompts = max(rows // 8, 1)
    context = jax.random.randint(jax.random.key(1), (prompts, PROMPT), 0, VOCAB)
    contexts = Contexts(tokens=context, mask=jnp.ones(context.shape, bool))
    wanted = allocate.rows_to_draw(
        jnp.full(prompts, rows // prompts, jnp.int32), rows=rows
    )
    world = Environment(reset=reset, observe=observe)
    episodes = Episodes(environment=world, target=jnp.zeros(prompts), pad=0)
    plain = rollout.Settings(max_tokens=tokens, end=(VOCAB,), pad=0)
    turns = rollout.Settings(
        max_tokens=tokens, end=tuple(range(0, VOCAB, EVERY)), pad=0, episodes=episodes
    )

    def draw(how: rollout.Settings, key: jax.Array):
        return rollout.sample(model, params, contexts, wanted, key, how)

    hosted = here(from_jax(world, steps=tokens, pad=0))
    nothing: Any = None
    task = Task(
        vocab_size=VOCAB,
        pad=0,
        end=turns.end,
        num_prompts=prompts,
        num_held_out=prompts,
        prompts=nothing,
        held_out=nothing,
        on_device=False,
        decode=str,
        environment=hosted,
    )
    subject = Subject(task=task, model=model)
    asked = Request(
        prompts=Prompts(
            tokens=context,
            mask=contexts.mask,
            id=jnp.arange(prompts),
            target=jnp.zeros(prompts),
        ),
        contexts=contexts,
        rows=wanted,
        key=jax.random.key(0),
        group=rows // prompts,
        how=dataclasses.replace(turns, episodes=None),
    )
    drive = drivers.Hosted()

    def from_host(key: jax.Array):
        request = dataclasses.replace(asked, key=key)
        return drive.draw(subject, Weights(params=params), request)

    return {
        "one turn": jax.jit(partial(draw, plain)),
        "turns": jax.jit(partial(draw, turns)),
        "turns from the host": from_host,
    }


def main() -> None:
    """Time both arms and print what was measured."""
    parser = argparse.ArgumentParser(description="What turns cost.")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    made = arms(args.rows, args.tokens, args.width, args.layers)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    drawn: dict[str, Any] = {}
    for number in range(TIMES + 1):
        for name, draw in made.items():
            start = time.perf_counter(), time.process_time()
            drawn[name] = jax.block_until_ready(draw(jax.random.key(number)))
            now = time.perf_counter(), time.process_time()
            if number:
                took[name].append((now[0] - start[0], now[1] - start[1]))
    for name, seconds in took.items():
        rows = drawn[name]
        count = int(rows.written.sum())
        wall, busy = (
            1e6 * statistics.median(x) / count for x in zip(*seconds, strict=True)
        )
        said = (
            ""
            if rows.turns is None
            else f", {float(rows.turns.count.mean()):.2f} turns and "
            f"{float(rows.turns.observed.sum(-1).mean()):.0f} tokens observed a row"
        )
        print(
            f"{name}: {wall:.1f} us a token of {count}, {busy:.1f} of processors{said}"
        )
    for name in ("turns", "turns from the host"):
        pairs = list(zip(took[name], took["one turn"], strict=True))
        for i, what in enumerate(("wall clock", "processors")):
            ratio = statistics.median(turns[i] / one[i] for turns, one in pairs)
            print(f"{name} / one turn: {ratio:.3f} by {what}")
    same = np.mean(drawn["turns"].tokens == drawn["turns from the host"].tokens)
    print(f"tokens that are the same in both: {same:.4f}")


if __name__ == "__main__":
    main()
