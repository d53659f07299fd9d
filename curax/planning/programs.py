"""The programs of a run, compiled for devices that are not here.

They are those of the hosted driver, on the shapes that a step hands to it; parameters
are shapes too. Of all functions that a step and its methods call, those that read
parameters are planned: samplers, scorers, and the update. Evaluations are not.
"""

import dataclasses
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curax.arrays.sharding import bytes_on_device, platform
from curax.planning import hbm, hlo
from curax.planning.estimate import Need
from curax.settings.config_types import present
from curax.step import ahead, drivers, states
from curax.step import mesh as meshes
from curax.step.step import step
from curax.step.types import Components, Method
from curax.types import Rollouts, TrainState

HOOKS = ("choose", "before_draw", "grade", "after_draw")  # that call through a driver
QUICK = "O0"  # effort at which the compiler neither overlaps nor unrolls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A function called in a step, with shapes and dtypes of its arguments."""

    name: str  # of the function, behind that of the method; no two are equal
    method: str | None  # that calls it; None: the step itself
    function: Any
    args: tuple[Any, ...]
    out: Any
    last: bool  # the update, to which the state is donated

    @property
    def shapes(self) -> Any:
        """What tells programs of one function apart."""
        leaves, structure = jax.tree.flatten(self.args)
        return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


class Collector(drivers.Abstract):
    """Driver for shapes alone that keeps the calls whose programs are planned."""

    def __init__(self):
        """Start with an empty list of calls."""
        super().__init__(drivers.Hosted())
        self.calls: list[Call] = []
        self._method: str | None = None  # whose hook is being called

    def of(self, method: Method) -> Method:
        """The method, whose calls are collected under its name."""

        def named(hook):
            def call(*args):
                before, self._method = self._method, method.name
                try:
                    return hook(*args)
                finally:
                    self._method = before

            return call

        hooks = {name: getattr(method, name) for name in HOOKS}
        named_hooks: dict[str, Any] = {
            name: named(hook) for name, hook in hooks.items() if hook
        }
        return dataclasses.replace(method, **named_hooks)

    def call(self, function, parts, *args):
        """As `Abstract.call`."""
        out = super().call(function, parts, *args)
        if reads_parameters(self.jitted(function, parts), args):
            self._keep(function, args, out, last=False)
        return out

    def finish(self, function, parts, *args):
        """As `Abstract.finish`."""
        out = super().finish(function, parts, *args)
        self._keep(function, args, out, last=True)
        return out

    def _keep(self, function, args, out, *, last):
        name = function.__name__.strip("_")
        name = f"{self._method}/{name}" if self._method else name
        call = Call(
            name=name,
            method=self._method,
            function=function,
            args=args,
            out=out,
            last=last,
        )
        alike = [one for one in self.calls if one.function is function]
        if all(one.shapes != call.shapes for one in alike):
            number = 1 + sum(one.method == call.method for one in alike)
            unique = name if number == 1 else f"{name} {number}"
            self.calls.append(dataclasses.replace(call, name=unique))


def reads_parameters(program: Any, args: tuple[Any, ...]) -> bool:
    """Whether a jitted function computes with parameters of a train state."""
    jaxpr = program.trace(*args).jaxpr.jaxpr
    read = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    which = jax.tree.leaves(jax.tree.map(_parameters, args, is_leaf=_is_state))
    return any(
        is_one and id(x) in read for is_one, x in zip(which, jaxpr.invars, strict=True)
    )


def _is_state(tree: Any) -> bool:
    return isinstance(tree, TrainState)


def _parameters(tree: Any) -> Any:
    """True at the parameters of a train state: the policy's, and copies of them."""
    nothing = jax.tree.map(lambda _: False, tree)
    if not isinstance(tree, TrainState):
        return nothing
    every, like = jax.tree.map(lambda _: True, tree), jax.tree.structure(tree.params)
    own = {
        name: (every if jax.tree.structure(held) == like else nothing).methods[name]
        for name, held in tree.methods.items()
    }
    return dataclasses.replace(
        nothing,
        params=every.params,
        reference=every.reference,
        frozen=every.frozen,
        methods=own,
    )


def abstract_state(parts: Components) -> TrainState:
    """Shapes and dtypes of the state before the first RL step."""
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    warm = jax.eval_shape(partial(states.initial, parts), seed)
    return jax.eval_shape(partial(states.begin, parts), warm)


def calls(parts: Components, state: TrainState) -> list[Call]:
    """Calls of a step whose programs are planned, in order; nothing is compiled."""
    collector = Collector()
    methods = tuple(collector.of(method) for method in parts.methods)
    step(collector, dataclasses.replace(parts, methods=methods), state)
    return collector.calls


def with_copies(call: Call) -> Call:
    """The last call of a step, where other devices draw and have copied parameters."""
    used_up, kept, drawn = call.args
    state = ahead.whole(used_up, kept)
    own = ahead.without_params(present(state.behaviour))
    state = dataclasses.replace(state, behaviour=own)
    args = *ahead.apart(state, copied=True), drawn
    return dataclasses.replace(call, args=args)


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
            parts = ((f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree))
            lacks = {name: x for name, x in parts if not jax.tree.leaves(x)}
            own = dataclasses.replace(where, **lacks)
            return jax.tree.map(lambda x, s: put(x, s.spec), tree, own)
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
    temporaries: float = 0.0  # with holes between them, where the compiler tells
    code: float = 0.0
    traffic: hlo.Traffic = dataclasses.field(default_factory=hlo.Traffic)
    # In the device's memory: outside, and in each turn of the loop that ends by data.
    call: hbm.Moved = dataclasses.field(default_factory=hbm.Moved)
    turn: hbm.Moved = dataclasses.field(default_factory=hbm.Moved)

    def did(self, when: str) -> Need:
        """What it does, as compiled; operations are those outside kernels."""
        own: hbm.Moved = getattr(self, when)
        received = getattr(self.traffic, when).total
        return Need(own.flops, 0.0, own.read, own.written, received)

    @property
    def made(self) -> float:
        """Bytes of the outputs that are not in the place of arguments."""
        return self.outputs - self.aliased

    @property
    def in_use(self) -> float:
        """Bytes on a device while it runs, without its code."""
        return self.arguments + self.made + self.temporaries


def compiled(
    name: str,
    program: Any,
    args: tuple[Any, ...],
    *,
    quick: bool = False,
    kept: bool = True,
) -> tuple[Compiled, Any]:
    """Compile a jitted function, on arrays or their shapes.

    Args:
        name: of the program.
        program: the function.
        args: its arguments; their shardings say for which devices.
        quick: with the least effort of the compiler, which takes a third of the time.
        kept: whether a run may find the program compiled. Else the compiler of TPUs
            writes what it reserves; of programs that are kept, temporaries on TPUs
            are those that exist at once, without holes, and with what lies in VMEM.

    Returns:
        The report without traffic, and the executable; None where it is refused for
        lack of memory.
    """
    before = jax.config.values["jax_optimization_level"]
    start = time.perf_counter()
    lowered = program.lower(*args)
    lower_s, start = time.perf_counter() - start, time.perf_counter()
    report = partial(Compiled, name=name, lower_s=lower_s)
    of_tpu = platform() == "tpu"
    with tempfile.TemporaryDirectory() as folder:
        dumps = {"xla_dump_to": folder} if of_tpu and not kept else None
        try:
            if quick:
                jax.config.update("jax_optimization_level", QUICK)
            done = lowered.compile(compiler_options=dumps)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            took = time.perf_counter() - start
            return report(refusal=refusal(str(error)), compile_s=took), None
        finally:
            jax.config.update("jax_optimization_level", before)
        took, sizes = time.perf_counter() - start, done.memory_analysis()
        whole = hbm.reserved(Path(folder)) or sizes.peak_memory_in_bytes
    found = report(
        refusal=None,
        compile_s=took,
        arguments=sizes.argument_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
    )
    # A TPU's own size of temporaries is up to 1.65 times what it reserves.
    own = max(whole - found.in_use, 0.0) if of_tpu else sizes.temp_size_in_bytes
    return dataclasses.replace(found, temporaries=own), done


def planned(
    parts: Components, mesh: Mesh, where: Any, call: Call, *, quick: bool
) -> tuple[Compiled, float]:
    """A call compiled for the devices of a mesh.

    Args:
        parts: components of the run.
        mesh: of devices that need not be here.
        where: sharding of the train state.
        call: of `calls`.
        quick: as of `compiled`.

    Returns:
        The report, and the bytes of one device that arguments beside the state take.
    """
    driver = drivers.Hosted(ahead.changed(where))
    jitted = driver.finishing if call.last else driver.jitted
    args = laid_out(mesh, where, call.args)
    with meshes.use(mesh, cut_sampler=parts.config.mesh.cut_sampler):
        report, done = compiled(
            call.name, jitted(call.function, parts), args, quick=quick, kept=False
        )
    if done is not None:
        text = done.as_text() or ""
        moved = hbm.of(text)
        report = dataclasses.replace(
            report,
            traffic=hlo.traffic(text),
            call=hbm.moved(moved.call),
            turn=hbm.moved(moved.turn),
        )
    others = [arg for arg in args if not isinstance(arg, TrainState)]
    return report, bytes_on_device(others)


def refusal(text: str) -> str:
    """The first sentence in which a compiler says why it refuses."""
    line = " ".join(text.split())
    return line.partition("RESOURCE_EXHAUSTED: ")[2].partition(" Total ")[0][:300]
