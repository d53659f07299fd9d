"""An environment of nothing but arithmetic, in JAX and in Python, for the tiny policy.

It says something after every turn but the last, of 0 to 3 tokens, and what it says
depends on the whole episode. Tokens behind an observation are junk.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from curax import rollout
from curax.arrays.turns import Episodes
from curax.settings.declared import declares
from curax.types import Environment, Observation

STEPS, WIDTH, JUNK = 12, 3, 7
END = (8, 9, 10)  # the first of which observations have too, where it ends nothing
TARGET = np.array([4, 0, 7], np.int32)  # of the tiny prompts


def reset(key, target):
    luck = jax.random.randint(key, (), 0, 5)
    return {"turns": jnp.int32(0), "total": (target + luck).astype(jnp.int32)}


def observe(state, tokens, length):
    own = jnp.arange(tokens.shape[0]) < length
    total = state["total"] + jnp.sum(tokens, where=own) + length
    turns = state["turns"] + 1
    says = (total + jnp.arange(WIDTH, dtype=jnp.int32)) % 9
    size = (total % (WIDTH + 1)).astype(jnp.int32)
    seen = Observation(
        tokens=jnp.where(jnp.arange(WIDTH) < size, says, JUNK),
        length=size,
        done=(total % 3 == 0) | (turns == 4),
        reward=(total % 5).astype(jnp.float32) / 20,
    )
    return {"turns": turns, "total": total.astype(jnp.int32)}, seen


def measure(state):
    return {"parity": (state["total"] % 2).astype(jnp.float32)}


ENVIRONMENT = Environment(reset=reset, observe=observe, measure=measure)
EPISODES = Episodes(environment=ENVIRONMENT, target=TARGET, pad=tiny.PAD)
settings = partial(tiny.settings, max_tokens=STEPS, end=END, episodes=EPISODES)


def sampler(slots=0, model=tiny.MODEL, **options):
    """A compiled `(params, contexts, rows, key) -> rollouts`."""
    how = settings(slots=slots, **options)
    return jax.jit(partial(rollout.sample, model, how=how))


class InPython:
    """The same environment as a Python object, of one episode."""

    def __init__(self, key, target):
        self.total = int(target) + int(jax.random.randint(key, (), 0, 5))
        self.turns = 0

    def answer(self, turn):
        """(tokens, done, reward) for a list of tokens."""
        self.total += sum(turn) + len(turn)
        self.turns += 1
        says = [(self.total + i) % 9 for i in range(self.total % (WIDTH + 1))]
        done = self.total % 3 == 0 or self.turns == 4
        return says, done, (self.total % 5) / 20


def begun(key, target):
    """The object, from the integer by which the host knows the row's key."""
    data = jnp.array([key >> 32, key & 0xFFFFFFFF], jnp.uint32)
    return InPython(jax.random.wrap_key_data(data), target)


def says(state, turn):
    tokens, done, reward = state.answer(turn)
    return state, Observation(tokens=tokens, done=done, reward=reward)


@declares(measures=("parity",))
def in_python():
    """The same environment as functions of Python."""
    return Environment(
        reset=begun, observe=says, measure=lambda state: {"parity": state.total % 2}
    )
