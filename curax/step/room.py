"""What a draw holds in a device's memory, from shapes: its cache and kept sets."""

import dataclasses
from functools import partial

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from curax import rollout
from curax.arrays import cache_sizes, supports
from curax.settings.sizes import cache_bytes
from curax.step import draw
from curax.step import mesh as meshes
from curax.step.types import Components
from curax.types import HostEnvironment, Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Size of a draw's KV cache; slots and contexts are those of all devices."""

    bytes: float  # of one device
    slots: int  # K
    pages: int  # of all devices; 0: slots have rings
    page: int  # its columns
    wanted: int  # K without a bound
    contexts: int  # C
    prompt: int  # P, with the widest hint


def cache_size(parts: Components, mesh: Mesh | AbstractMesh | None) -> CacheSize:
    """Size of a draw's KV cache, from shapes; prefixes are held once.

    Args:
        parts: components of the run.
        mesh: of the run; None: one device.

    Raises:
        ConfigError: `sampling.cache_gib` has no room for a completion.
    """
    sizes, model = parts.config.sampling, parts.model

    def of(ids):
        return draw.contexts_of(parts, parts.task.prompts(ids))

    ids = np.zeros(sizes.prompts, np.int32)
    asked = of(ids) if parts.task.in_files else jax.eval_shape(of, ids)
    params = jax.eval_shape(model.init, jax.random.key(0))
    prefix = jax.eval_shape(partial(rollout.prefill, model), params, asked)
    with meshes.use(mesh):
        token = rollout.token_bytes(model, prefix.cache, asked)
        page = model.paged(sizes.max_tokens) if model.paged else 0
    cut = dict(mesh.shape) if mesh else {}
    contexts, prompt = drawn_contexts(parts, sizes.prompts, asked.tokens.shape[1])
    where = cache_sizes.Places(
        contexts=contexts,
        prompt=prompt,
        steps=sizes.max_tokens,
        shards=cut.get("data", 1) * cut.get("fsdp", 1),
    )
    most = wanted_slots(parts)
    bound = cache_bytes(parts.config)
    found = where.room(most, bound=bound, token=token, page=page)
    own, shared = where.tokens(found.slots)
    if found.pages:
        own = (found.pages + -(-found.slots // where.shards)) * page
    return CacheSize(
        bytes=token * (own + shared),
        slots=found.slots,
        pages=found.pages * where.shards,
        page=page,
        wanted=most,
        contexts=contexts,
        prompt=prompt,
    )


def wanted_slots(parts: Components) -> int:
    """K of a draw without a bound: a chunk, or a round, has no more rows open."""
    sizes = parts.config.sampling
    rows = parts.rows // sizes.chunks
    if stop := parts.config.stop:
        rows = min(rows, sizes.prompts * stop.round_size)
    return min(sizes.slots or rows, rows)


def drawn_contexts(parts: Components, contexts: int, prompt: int) -> tuple[int, int]:
    """(C, P), contexts and their tokens as a draw reads them.

    From the host each turn is drawn behind all of its row.
    """
    if not isinstance(parts.task.environment, HostEnvironment):
        return contexts, prompt
    sizes = parts.config.sampling
    return parts.rows // sizes.chunks, prompt + sizes.max_tokens


def kept_set(model: Model, how: rollout.Settings) -> jax.ShapeDtypeStruct | None:
    """What is noted of a token, as `supports.packed`; None: nothing."""
    if not how.support:
        return None
    params = jax.eval_shape(model.init, jax.random.key(0))
    return supports.shape(jax.eval_shape(model.head, params).shape[0], how.top_k)


def kept_to_train(parts: Components) -> jax.ShapeDtypeStruct | None:
    """`kept_set` of what trains.

    An engine may keep all tokens that are as likely as the last of its top k: there is
    room for as many again.
    """
    how = draw.to_train(parts)
    if parts.config.sampling.engine is not None:
        how = dataclasses.replace(how, top_k=2 * how.top_k)
    return kept_set(parts.model, how)
