"""A plan: whether a run fits a slice of chips, and what each of its programs takes."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from curax.config import Config, ConfigError
from curax.config import Mesh as Sizes
from curax.planning import chips, estimate, programs, stand_in
from curax.planning.chips import Topology
from curax.planning.estimate import Work
from curax.planning.programs import Compiled
from curax.settings import errors
from curax.settings.config_types import present
from curax.settings.groups import AXES
from curax.step import ahead, build, states
from curax.step import mesh as meshes
from curax.step.types import Components
from curax.types import Contexts, Rollouts, TrainState

COMPILED = 3  # meshes that are compiled at most, until one fits
MARGIN = 1.5  # of memory over an estimate that surely fits; temporaries: .85 to 1.41


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Estimate of a run on one mesh, from shapes alone."""

    mesh: dict[str, int]
    state: dict[str, float]  # bytes of one chip
    drawing: dict[str, float] | None  # of one that draws, where these do not train
    work: dict[str, Work]  # by role: draw, learn, and draws of methods
    fits: bool | None = None  # None: it may, or no limit is known
    seconds: float | None = None  # of a step, at least; draws of methods are left out

    def total(self, role: str) -> float:
        """Bytes of one chip while a program runs."""
        return sum(self.held(role).values()) + sum(self.work[role].memory.values())

    def held(self, role: str) -> dict[str, float]:
        """Bytes of the state on a chip that runs a program."""
        if self.drawing is None or role == "learn":
            return self.state
        return self.drawing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program of a run, with its memory and fit on a chip."""

    role: str
    compiled: Compiled
    others: float  # bytes of its arguments beside the state
    total: float  # bytes in use while it runs, the state included
    fits: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Result of planning: layouts on meshes, compiled programs, and which fits best."""

    topology: Topology
    sizes: estimate.Shapes
    layouts: list[Layout]  # the best first; one where the mesh was given
    programs: list[list[Program]]  # of the first layouts, as far as compiled
    best: int | None  # number of the layout that fits, the best; None: none does

    @property
    def chosen(self) -> Layout:
        """The best layout that fits; the first where none does."""
        return self.layouts[self.best or 0]


def role(call: programs.Call) -> str:
    """Role of a call: `learn`, `draw`, or the name of a method's own program."""
    if call.last:
        return "learn"
    return call.name if call.method else "draw"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """Abstract run, from which it is planned for any slice."""

    parts: Components
    state: TrainState
    calls: list[programs.Call]
    sizes: estimate.Shapes


def traced(config: Config) -> Traced:
    """Abstract run of a config; nothing is compiled.

    Raises:
        ConfigError: in a sentence, for a config that cannot be.
    """
    if config.seeds > 1:
        raise ConfigError(
            f"seeds={config.seeds} are as many runs on one device; set seeds=1."
        )
    with errors.config_errors(config):
        parts = build.build(stand_in.without_files(config))
        state = programs.abstract_state(parts)
        calls = programs.calls(parts, state)
    drawn = calls[-1].args[-1]
    return Traced(
        parts=parts,
        state=state,
        calls=calls,
        sizes=estimate.shapes(parts, state, drawn.contexts),
    )


def plan(
    run: Traced,
    place: Topology,
    *,
    auto: bool,
    compiles: bool,
    quick: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan of a run on a slice.

    Args:
        run: of `traced`.
        place: the slice.
        auto: try all meshes that divide; else the one of the config.
        compiles: compile the programs, of several meshes until one fits.
        quick: compile with the least effort.
        say: called with text on what is being done.

    Raises:
        ConfigError: in a sentence, for a mesh or a slice that cannot be.
    """
    own = run.parts.config.mesh
    wanted = [own]
    if auto:
        share = own.draw_share
        wanted = [
            dataclasses.replace(one, draw_share=share) for one in divisions(place)
        ]
    layouts = ranked(run, place, wanted, strict=not auto)
    found: list[list[Program]] = []
    best = next((i for i, one in enumerate(layouts) if one.fits is not False), None)
    if compiles:
        devices, best = chips.devices(place), None
        for number, one in enumerate(layouts[:COMPILED]):
            say(f"compiling for {words(one.mesh)} ...")
            found.append(_programs(run, place, devices, one, quick))
            if all(program.fits is not False for program in found[-1]):
                best = number
                break
    return Plan(
        topology=place, sizes=run.sizes, layouts=layouts, programs=found, best=best
    )


def words(mesh: dict[str, int]) -> str:
    """A mesh as text, such as `mesh.data=4 mesh.fsdp=2`."""
    return " ".join(f"mesh.{axis}={size}" for axis, size in mesh.items())


def divisions(place: Topology) -> Iterator[Sizes]:
    """Yield all meshes over the chips of a slice that map onto it."""
    chips_of = place.chips
    parts = [n for n in range(1, chips_of + 1) if chips_of % n == 0]
    for data, fsdp in itertools.product(parts, repeat=2):
        shape = (data, fsdp, chips_of // (data * fsdp))
        if math.prod(shape) == chips_of and chips.lies_on(shape, place):
            yield Sizes(**dict(zip(AXES, shape, strict=True)))


def ranked(
    run: Traced, place: Topology, wanted: list[Sizes], *, strict: bool
) -> list[Layout]:
    """Layouts on the given meshes: those that fit first, then by time of a step.

    Raises:
        ConfigError: if a mesh does not divide the parameters and `strict` is set, or
            none does.
    """
    found, refused = [], None
    for one in wanted:
        try:
            found.append(layout(run, place, one))
        except ConfigError as error:
            if strict:
                raise
            refused = error
    if not found:
        assert refused is not None
        raise refused

    def order(one: Layout) -> tuple[Any, ...]:
        most = max(one.total(role) for role in one.work)
        return [True, None, False].index(one.fits), one.seconds or most, most

    return sorted(found, key=order)


def layout(run: Traced, place: Topology, wanted: Sizes) -> Layout:
    """Layout of a run on a mesh, estimated from shapes.

    Raises:
        ConfigError: if the mesh does not divide chips or parameters, or does not lie on
            the slice.
    """
    parts, sizes = run.parts, run.sizes
    shape = meshes.shape_on(wanted, place.chips)
    mesh: dict[str, int] = dict(zip(AXES, shape, strict=True))
    if not chips.lies_on(shape, place):
        raise ConfigError(
            f"{words(mesh)} does not lie on {place.name}: each size must be the "
            "product of some of its axes; --mesh auto tries those that do."
        )
    kinds = (AxisType.Auto,) * len(AXES)
    (data, *rest), shares, state = shape, (None, None), run.state
    if split := wanted.draw_share is not None:
        shares = meshes.divided(wanted, shape)
        assert state.behaviour is not None
        state = dataclasses.replace(state, behaviour=None)
    train, draw = (
        AbstractMesh((share or data, *rest), AXES, axis_types=kinds) for share in shares
    )
    held = estimate.state_bytes(state, states.sharding_of(parts, train, state))
    cut, drawing = estimate.Cut.of(draw, sizes), None
    sampler = parts.config.mesh.cut_sampler
    draws = {"draw": estimate.drawn(parts, sizes), **_draws_of_methods(run)}
    work = {
        role: estimate.draw(own, cut, cut_sampler=sampler)
        for role, own in draws.items()
    }
    cut, pieces = estimate.Cut.of(train, sizes), place.chip is not None  # of a TPU
    work["learn"] = estimate.learn(parts, sizes, cut, held, in_pieces=pieces)
    if split:
        where = states.sharding_of(parts, draw, run.state)
        drawing = estimate.drawing_bytes(run.state, where)
        copied = estimate.Need(received=drawing["what draws ahead"])
        call = work["draw"].call.plus(copied)
        work["draw"] = dataclasses.replace(work["draw"], call=call)
    elif parts.config.sampling.ahead:
        beside = max(sum(work[role].memory.values()) for role in draws)
        work["learn"].memory["the next draw"] = beside
    one = Layout(mesh=mesh, state=held, drawing=drawing, work=work)
    if (chip := place.chip) is None:
        return one
    most = max(one.total(role) for role in work)
    surely = True if most * MARGIN <= chip.memory_bytes else None
    # The slowest resource alone: all others overlap with it.
    took = [max(work[role].seconds(chip).values()) for role in ("draw", "learn")]
    return dataclasses.replace(
        one,
        fits=surely if most <= chip.memory_bytes else False,
        seconds=max(took) if split else sum(took),
    )


def _draws_of_methods(run: Traced) -> dict[str, estimate.Shapes]:
    """Sizes of the calls of methods that return completions, by role."""
    found = {}
    for call in run.calls:
        if call.method and isinstance(call.out, Rollouts):
            leaves = jax.tree.leaves(call.args, is_leaf=_is_contexts)
            contexts = next(filter(_is_contexts, leaves))
            given = run.parts, run.sizes, contexts, call.out
            found[role(call)] = estimate.of_draw(*given)
    return found


def _is_contexts(tree: Any) -> bool:
    return isinstance(tree, Contexts)


def _programs(
    run: Traced, place: Topology, devices: Any, one: Layout, quick: bool
) -> list[Program]:
    """Compiled programs of a layout."""
    sizes = dataclasses.replace(run.parts.config.mesh, **one.mesh)
    train = draw = meshes.make(sizes, devices)
    if one.drawing is not None:
        train, draw = meshes.split(sizes, devices)
    found, beside = [], 0.0
    for call in run.calls:
        mesh = present(train if call.last else draw)
        where = states.sharding_of(run.parts, mesh, run.state)
        if call.last and one.drawing is not None:
            call = programs.with_copies(call)
            own = ahead.without_params(where.behaviour)
            where = dataclasses.replace(where, behaviour=own)
        done, others = programs.planned(run.parts, mesh, where, call, quick=quick)
        if not call.last:
            beside = max(beside, done.temporaries + done.made)
        elif run.parts.config.sampling.ahead and one.drawing is None:
            others += beside
        found.append(_verdict(place, one, role(call), done, others))
    return found


def _verdict(
    place: Topology, one: Layout, role: str, done: Compiled, others: float
) -> Program:
    """Memory and fit of a compiled program, with the train state resident."""
    held = sum(one.held(role).values())
    total = held + others + done.temporaries + done.code + done.made
    chip = place.chip
    fits: bool | None = None if chip is None else total <= chip.memory_bytes
    if done.refusal is not None:
        total, fits = math.nan, False
    return Program(role=role, compiled=done, others=others, total=total, fits=fits)
