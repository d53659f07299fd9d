"""The programs of a run, compiled for devices that are not here.

They are those of the hosted driver, on the shapes that a step hands to it; parameters
are shapes too. Of all functions that a step calls, those that run the model are
planned: the samplers, and the update.
"""

import dataclasses
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curax.planning import hlo
from curax.step import draw, drivers, loops
from curax.step import mesh as meshes
from curax.step.records import Components
from curax.step.step import step
from curax.types import Rollouts, TrainState

SAMPLERS = (draw.prefill, draw.draw, draw.draw_chunk, draw.draw_round)
QUICK = "O0"  # effort at which the compiler neither overlaps nor unrolls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A function called in a step, with shapes and dtypes of its arguments."""

    name: str
    function: Any
    args: tuple[Any, ...]
    last: bool  # the update, to which the state is donated


class Recorder(drivers.Abstract):
    """Driver for shapes alone that keeps the calls whose programs are planned."""

    def __init__(self):
        """Start with an empty list of calls."""
        super().__init__(drivers.Hosted())
        self.calls: list[Call] = []

    def call(self, function, parts, *args):
        """As `Abstract.call`."""
        self._record(function, args, last=False)
        return super().call(function, parts, *args)

    def finish(self, function, parts, *args):
        """As `Abstract.finish`."""
        self._record(function, args, last=True)
        return super().finish(function, parts, *args)

    def _record(self, function, args, *, last):
        if last or function in SAMPLERS:
            name = function.__name__
            if all(call.name != name for call in self.calls):
                call = Call(name=name, function=function, args=args, last=last)
                self.calls.append(call)


def abstract_state(parts: Components) -> TrainState:
    """Shapes and dtypes of the state before the first RL step."""
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    warm = jax.eval_shape(partial(loops.initial, parts), seed)
    return jax.eval_shape(partial(loops.begin, parts), warm)


def calls(parts: Components, state: TrainState) -> list[Call]:
    """Calls of a step whose programs are planned, in order; nothing is compiled."""
    recorder = Recorder()
    step(recorder, parts, state)
    return recorder.calls


def laid_out(mesh: Mesh, where: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as shapes, with the shardings that they have in a run.

    The state lies as `where` says, completions by rows, the rest is on all devices.
    """
    rows = PartitionSpec(("data", "fsdp"))
    shards = mesh.shape["data"] * mesh.shape["fsdp"]

    def put(leaf: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def node(tree: Any) -> Any:
        if isinstance(tree, TrainState):
            return jax.tree.map(lambda x, s: put(x, s.spec), tree, where)
        if isinstance(tree, Rollouts):
            whole = PartitionSpec()
            return jax.tree.map(
                lambda x: put(x, whole if x.shape[0] % shards else rows), tree
            )
        return put(tree, PartitionSpec())

    def is_node(tree: Any) -> bool:
        return isinstance(tree, TrainState | Rollouts)

    return jax.tree.map(node, args, is_leaf=is_node)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Compiler's report on a program; bytes are those of one device."""

    name: str
    refusal: str | None  # its sentence, where it refuses; the rest is then 0
    lower_s: float
    compile_s: float
    arguments: float = 0.0
    outputs: float = 0.0
    aliased: float = 0.0  # outputs in the place of arguments
    temporaries: float = 0.0
    code: float = 0.0
    traffic: hlo.Traffic = dataclasses.field(default_factory=hlo.Traffic)


def compiled(
    parts: Components, mesh: Mesh, where: Any, call: Call, *, quick: bool
) -> Compiled:
    """A call compiled for the devices of a mesh.

    Args:
        parts: components of the run.
        mesh: of devices that need not be here.
        where: sharding of the train state.
        call: of `calls`.
        quick: with the least effort of the compiler, which takes a third of the time.
    """
    driver = drivers.Hosted(where)
    program = (
        driver.finishing(call.function, parts)
        if call.last
        else driver.jitted(call.function, parts)
    )
    args = laid_out(mesh, where, call.args)
    before = jax.config.values["jax_optimization_level"]
    start = time.perf_counter()
    with meshes.use(mesh, cut_sampler=parts.config.mesh.cut_sampler):
        lowered = program.lower(*args)
        lower_s, start = time.perf_counter() - start, time.perf_counter()
        try:
            if quick:
                jax.config.update("jax_optimization_level", QUICK)
            done = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return Compiled(
                name=call.name,
                refusal=refusal(str(error)),
                lower_s=lower_s,
                compile_s=time.perf_counter() - start,
            )
        finally:
            jax.config.update("jax_optimization_level", before)
    took, sizes = time.perf_counter() - start, done.memory_analysis()
    return Compiled(
        name=call.name,
        refusal=None,
        lower_s=lower_s,
        compile_s=took,
        arguments=sizes.argument_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
        traffic=hlo.traffic(done.as_text() or ""),
    )


def refusal(text: str) -> str:
    """The first sentence in which a compiler says why it refuses."""
    line = " ".join(text.split())
    return line.partition("RESOURCE_EXHAUSTED: ")[2].partition(" Total ")[0][:300]
