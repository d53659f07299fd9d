"""Drivers: traced into one program, from the host, or for shapes alone.

A step defines what is computed from what; a driver defines how. Whatever differs
between verifiers in JAX and in Python, and between generated prompts and prompts read
from files, is in this module, the traces of a warm start and `room.cache_size` apart.
All completions are drawn and graded here, whoever asks: `draw_and_grade` gives both,
and from the host `begin` draws and lets them be graded in the background.

Drivers name no method. They ask one thing of all of them: whether one grades in place
of the verifier.
"""

import contextlib
import copy
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from curax import reward
from curax.arrays.sharding import SEEDS
from curax.handover import Drawn
from curax.processes import peers
from curax.settings.config_types import present
from curax.step import ahead, draw, grading, outside, play
from curax.step import mesh as meshes
from curax.step.compiling import Program
from curax.step.types import Components, Graded, Request, Subject, Ungraded
from curax.types import Behaviour, Prompts, Rollouts, TrainState, Weights

Stage = Literal["rollout", "verify", "update"]  # of a step, timed apart
KINDS = ("none", "error", "timeout", "crash")  # reasons for missing outcomes


def grader(parts: Subject) -> Callable[..., Graded] | None:
    """The hook that grades in place of the task's verifier; None without one."""
    return next((method.grade for method in parts.methods if method.grade), None)


def grade(parts: Subject, prompts: Prompts, rollouts: Rollouts) -> jax.Array:
    """`[N]` outcomes by the task's verifier as a JAX function."""
    return reward.on_device(parts.task, prompts, rollouts)


class Traced:
    """Driver of a traced step: one pure function, to be jitted, scanned or vmapped.

    Prompts and outcomes are computed by JAX functions.
    """

    def call(self, function: Callable, parts: Subject, *args: Any) -> Any:
        """Call the function itself."""
        return function(parts, *args)

    call_task = finish = call

    def call_timed(
        self, stage: Stage, function: Callable, parts: Subject, *args: Any
    ) -> Any:
        """Call the function itself: nothing can be timed inside a program."""
        return function(parts, *args)

    def repeat(self, wants: Callable, body: Callable, start: Any) -> Any:
        """Run `jax.lax.while_loop`."""
        return jax.lax.while_loop(wants, body, start)

    def draw(self, parts: Subject, state: Weights, request: Request) -> Rollouts:
        """Draw all completions, testing the stopping rule meanwhile."""
        return draw.draw(parts, state, request)

    def beside(self, own: Behaviour) -> Behaviour:
        """The same: one program has one set of devices."""
        return own

    def ahead(
        self, function: Callable, parts: Components, state: TrainState, then: Behaviour
    ) -> Any:
        """The state, and what the function itself makes of what it is drawn by."""
        return state, function(self, parts, ahead.of_step(state))[1]

    def draw_and_grade(
        self, parts: Subject, state: Weights, request: Request
    ) -> Graded:
        """Draw all completions, and grade them."""
        rollouts = self.draw(parts, state, request)
        if own := grader(parts):
            drawn = Ungraded(request=request, rollouts=rollouts)
            return own(self, parts, state, drawn)
        return Graded.of(request, rollouts, grade(parts, request.prompts, rollouts))


class Hosted:
    """Driver from the host, for prompts in files and host verifiers.

    Each function is jitted once; loops are Python's. The host grades a chunk while the
    device draws the next. With a host verifier a stopping rule is tested between its
    rounds, each a draw of its own.

    Attributes:
        logs: whether reasons for missing outcomes are logged.
        background: a thread, in which a host verifier runs.
        clock: times of the present step.
        reason: latest reason for missing outcomes; None: none was missing.
        begins: whether a draw that is one step ahead is begun.
    """

    logs = begins = True

    def __init__(
        self,
        sharding: Any = None,
        seeds: int = 1,
        context: Callable[[], Any] = contextlib.nullcontext,
        split: meshes.Split | None = None,
    ):
        """Compile nothing.

        Args:
            sharding: of what a step gives of a train state; None: on one device.
            seeds: that run side by side; with several every function is vmapped over a
                first axis of all its arguments.
            context: that of the mesh that draws, for threads of the driver.
            split: of the devices, where what draws ahead has its own.
        """
        self._jitted: dict[tuple[Any, ...], Program] = {}
        self._sharding, self._seeds, self._context = sharding, seeds, context
        self._split, self._copies = split, dict[str, tuple[Any, Any]]()
        self.background = ThreadPoolExecutor(1, "verify")
        self._draws = ThreadPoolExecutor(2, "draw")  # of this step and of the next
        self._next: Ahead | None = None
        self.clock = Clock()
        self.reason: str | None = None

    def jitted(
        self,
        function: Callable,
        parts: Subject,
        *,
        updates: bool = False,
        **options: Any,
    ) -> Program:
        """The jitted function with `parts` bound, kept by function, parts and options.

        Its programs are freed with this driver; with `parts` as a static argument of a
        global jitted function they would be kept forever. A function made anew for each
        call is another one each time, and would compile each time.

        Raises:
            ValueError: it was made anew: a lambda, an inner function or a partial.
        """
        if "<" in getattr(function, "__qualname__", "<"):
            raise ValueError(
                f"{function} is made at each call and would be compiled at each; make "
                "it a function of a module, and what it binds its arguments."
            )
        key = function, parts, updates, *options
        if key not in self._jitted:
            bound = partial(function, parts)
            many = self._seeds > 1
            each = jax.vmap(bound, axis_name=SEEDS) if many else bound
            where = self._sharding
            self._jitted[key] = Program(each, where, updates=updates, **options)
        return self._jitted[key]

    def call(self, function: Callable, parts: Subject, *args: Any) -> Any:
        """Call the jitted function; it compiles at the first call."""
        return self.jitted(function, parts)(*args)

    def call_task(self, function: Callable, parts: Subject, *args: Any) -> Any:
        """Call a function on the host with numpy arrays if the task is in files."""
        if not parts.task.in_files:
            return self.call(function, parts, *args)
        return function(parts, *peers.fetch(args))

    def call_timed(
        self, stage: Stage, function: Callable, parts: Subject, *args: Any
    ) -> Any:
        """As `call`, and wait for the result: its time is that of the stage."""
        with self.clock.times(stage):
            return self._waited_for(self.call(function, parts, *args))

    def finish(self, function: Callable, parts: Subject, *args: Any) -> Any:
        """Call the jitted function, donating its first array; timed as the update."""
        with self.clock.times("update"):
            return jax.block_until_ready(self.finishing(function, parts)(*args))

    def finishing(self, function: Callable, parts: Subject) -> Program:
        """The jitted function that ends a step, with the sharding of its state."""
        return self.jitted(
            function,
            parts,
            out_shardings=(self._sharding, None),
            donate_argnums=0,
            keep_unused=True,  # what is used up makes room for what is made
            updates=True,
        )

    def repeat(self, wants: Callable, body: Callable, start: Any) -> Any:
        """Run a Python loop."""
        while wants(start):
            start = body(start)
        return start

    def draw(self, parts: Subject, state: Weights, request: Request) -> Rollouts:
        """Draw all completions, testing the stopping rule meanwhile, or ask."""
        if play.hosted(parts):
            return self._played(parts, state, request).rollouts
        if not outside.draws(parts, request):
            return self.call_timed("rollout", draw.draw, parts, state, request)
        with self.clock.times("rollout"):
            asked = self.call(outside.asked, parts, request)
            given, drawn = self._answered(parts, state, request, asked)
            what = parts, state, request, given
            rollouts, gaps = self._waited_for(self.call(outside.rollouts, *what))
        self.clock.drawn_outside(drawn.counts, gaps)
        if drawn.reason:
            self.reason = f"the engine gave no completion: {drawn.reason}"
        return rollouts

    def _answered(self, *what: Any) -> tuple[outside.Given, Drawn]:
        return outside.answered(*what)

    def beside(self, own: Behaviour) -> Behaviour:
        """The same, copied to the devices that draw if these are others."""
        return meshes.moved(own, self._split.draw) if self._split else own

    def ahead(
        self, function: Callable, parts: Components, state: TrainState, then: Behaviour
    ) -> Any:
        """The state, and what the last step began or is made now.

        That of the next step is begun. Where several processes share a run nothing is:
        programs that they all take part in must come in one order.
        """
        start, (begun, self._next) = time.perf_counter(), (self._next, None)
        if begun is not None and parts.engine:  # which draws by one policy at a time
            wait([begun.made])
        own = ahead.of_step(state)
        now = None
        if begun is None or not begun.is_of(own):
            begun, now = None, self._drawn(function, parts, own)
        if begun is not None and begun.made.done():
            begun.made.result()  # if it failed nothing more is begun
        more = self.begins and peers.count() == 1
        if more and int(state.step) + 1 < parts.config.steps:
            after = ahead.of_next(parts, state, then)
            aside = copy.copy(self)
            aside.clock = Clock()
            what = function, parts, after
            self._next = Ahead(after, aside, self._draws.submit(aside._drawn, *what))
        if begun is not None:
            now = begun.made.result()
            self.clock = begun.driver.clock
            self.clock.waited = time.perf_counter() - start
            self.reason = begun.driver.reason or self.reason
        return self._where_it_trains(state), now

    def _drawn(self, function: Callable, parts: Components, state: TrainState) -> Any:
        """What a function makes of a state, on the devices that draw, for the others.

        What no step changes is copied once.
        """
        if split := self._split:
            fixed = {"frozen": state.frozen, "reference": state.reference}
            state = dataclasses.replace(state, **dict.fromkeys(fixed))
            for name, tree in fixed.items():
                if name not in self._copies or self._copies[name][0] is not tree:
                    self._copies[name] = tree, meshes.moved(tree, split.draw)
            copies = {name: self._copies[name][1] for name in fixed}
            state = meshes.moved(dataclasses.replace(state, **copies), split.draw)
        with self._context():
            _, drawn = function(self, parts, state)
        return meshes.moved(drawn, split.train) if split else drawn

    def _where_it_trains(self, state: TrainState) -> TrainState:
        """The state where it learns, and of its behaviour what learning looks at."""
        if not self._split:
            return state
        own = ahead.without_params(present(state.behaviour))
        own = meshes.moved(own, self._split.train)
        return dataclasses.replace(state, behaviour=own)

    def draw_and_grade(
        self, parts: Subject, state: Weights, request: Request
    ) -> Graded:
        """Draw at once, in chunks or in rounds of `stop`, as requested, and grade."""
        if own := grader(parts):
            rollouts = self.draw(parts, state, request)
            drawn = Ungraded(request=request, rollouts=rollouts)
            with self.clock.times("verify"):
                return self._waited_for(own(self, parts, state, drawn))
        if request.stops and (
            not parts.task.on_device or outside.draws(parts, request)
        ):
            return self._in_rounds(parts, state, request)
        if request.chunks > 1:
            return self._in_chunks(parts, state, request)
        return self._graded(parts, request, [self.begin(parts, state, request)])

    def begin(self, parts: Subject, state: Weights, request: Request) -> "Begun":
        """Draw at once, and begin to grade: a host verifier runs in the background."""
        if play.hosted(parts):
            return self._played(parts, state, request)
        rollouts = self.draw(parts, state, request)
        if not parts.task.on_device:
            return Begun(rollouts, self._grade_on_host(parts, request, rollouts))
        of = outside.grade if outside.draws(parts, request) else grade
        outcome = self.call(of, parts, request.prompts, rollouts)
        return Begun(rollouts, finished(reward.Verdicts(outcome, {})))

    def _played(self, parts: Subject, state: Weights, request: Request) -> "Begun":
        """Draw turn by turn, between which the host's environment answers."""
        played, key = self.call(play.begun, parts, request)
        episodes = play.Episodes(parts.task, request.prompts, key)

        def another(played: play.Played) -> play.Played:
            what = parts, state, request, played
            played = self.call_timed("rollout", play.turn, *what)
            with self.clock.times("verify"):
                given = self._answers(episodes, played)
            return self.call(play.answered, parts, played, given)

        wants = partial(self.call, play.goes_on, parts)
        try:
            rollouts = self.repeat(wants, another, played).rollouts
        finally:
            episodes.close()
        return Begun(rollouts, finished(self._verdicts(episodes, rollouts)))

    def _answers(self, episodes: play.Episodes, played: play.Played) -> play.Given:
        return episodes.answers(played)

    def _verdicts(self, episodes: play.Episodes, rollouts: Rollouts) -> reward.Verdicts:
        return play.verdicts(episodes, rollouts)

    def outcome(self, begun: "Sequence[Begun]") -> Any:
        """`[N]` float32 outcomes of all that was begun, as `verdicts`."""
        return self._joined([one.outcome for one in self.verdicts(begun)])

    def verdicts(self, begun: "Sequence[Begun]") -> list[reward.Verdicts]:
        """Verdicts on what was begun; waits for them, and for other processes.

        They are counted and, those of this process, logged.
        """
        with self.clock.times("verify"):
            own = [one.verdicts.result() for one in begun]
            if not isinstance(own[0].outcome, np.ndarray):
                return self._waited_for(own)
            joined = grading.join(own)
        for mine, all_ in zip(own, joined, strict=True):
            if self.logs:
                mine.log()
            self.clock.graded(mine.seconds, all_)
            self.reason = all_.reason or self.reason
        return joined

    def _graded(
        self, parts: Subject, request: Request, begun: "Sequence[Begun]"
    ) -> Graded:
        """All that was begun of a request, with rewards where its grader has terms."""
        verdicts, rollouts = self.verdicts(begun), begun[0].rollouts
        if len(begun) > 1:
            rollouts = self.call(_concatenated, parts, [one.rollouts for one in begun])
        if (terms := parts.task.terms) and request.terms:
            rewards = self._joined([one.reward(terms.weights) for one in verdicts])
            rollouts = dataclasses.replace(rollouts, reward=rewards)
        outcome = self._joined([one.outcome for one in verdicts])
        return Graded.of(request, rollouts, outcome)

    def _joined(self, arrays: Sequence[Any]) -> Any:
        """`[N]` float32, all of them; on the host where they are there."""
        if isinstance(arrays[0], np.ndarray):
            return np.concatenate(arrays).astype(np.float32)
        return jnp.concatenate(arrays) if len(arrays) > 1 else arrays[0]

    def _waited_for(self, arrays: Any) -> Any:
        return jax.block_until_ready(arrays)

    def _in_rounds(self, parts: Subject, state: Weights, request: Request) -> Graded:
        """Draw in rounds, between which the stopping rule is tested."""

        def another(pool: Graded | None) -> Graded:
            rows = self.call(draw.round_rows, parts, request, pool)
            part = dataclasses.replace(request, rows=rows, stops=False, chunks=1)
            new = self._graded(parts, part, [self.begin(parts, state, part)])
            return self.call(draw.add_round, parts, pool, new)

        wants = partial(self.call, draw.wants_round, parts, request)
        return self.repeat(wants, another, another(None))

    def _in_chunks(self, parts: Subject, state: Weights, request: Request) -> Graded:
        """Draw in chunks; the host verifies one while the device draws the next."""
        prefix = None
        if not (outside.draws(parts, request) or play.hosted(parts)):
            prefix = self.call_timed("rollout", draw.prefill, parts, state, request)
        begun = []
        for number in range(request.chunks):
            rows = self.call(draw.chunk_rows, parts, request, jnp.int32(number))
            part = dataclasses.replace(request, rows=rows, prefix=prefix, chunks=1)
            begun.append(self.begin(parts, state, part))
        return self._graded(parts, request, begun)

    def _grade_on_host(
        self, parts: Subject, request: Request, rollouts: Rollouts
    ) -> "Future[reward.Verdicts]":
        rollouts = dataclasses.replace(rollouts, support=None)  # large, and not read
        prompts, rollouts = peers.fetch((request.prompts, rollouts))
        graded = partial(reward.on_host, terms=request.terms)
        own = grading.own(rollouts)
        # A completion that an engine did not give has no token.
        there = own.exists & own.mask.any(-1)
        own = dataclasses.replace(own, exists=there)
        return self.background.submit(graded, parts.task, prompts, own)


class Begun(NamedTuple):
    """Completions, and their outcomes as soon as they are graded."""

    rollouts: Rollouts
    verdicts: "Future[reward.Verdicts]"  # by a host verifier those of this process


class Ahead(NamedTuple):
    """What is made for the next step, while this one goes on."""

    state: TrainState  # by which it is drawn
    driver: Hosted  # of its own, for its clock
    made: "Future[Any]"

    def is_of(self, state: TrainState) -> bool:
        """Whether it is what this state draws: it has the very same parameters."""
        return self.state.params is state.params


def traced(name: str, program: Any, args: tuple[Any, ...]) -> Any:
    """Shapes and dtypes of the outputs of a jitted function, whose trace is kept."""
    return program.eval_shape(*args)


class Abstract(Hosted):
    """Driver that computes shapes alone, through the programs of a hosted driver.

    Functions that cannot be traced fail here, and the traces are kept for the run. The
    body of a loop is traced once. Functions that read files are called, with zeros.
    """

    def __init__(self, of: Hosted, visit: Callable = traced, kind: str = ""):
        """Share the jitted functions of a hosted driver.

        Args:
            of: the hosted driver.
            visit: gives the shapes of the outputs of each program, as `traced`.
            kind: words before the names of the programs.
        """
        super().__init__(of._sharding, of._seeds, of._context, of._split)
        self._jitted, self._visit, self._kind = of._jitted, visit, kind

    def call(self, function: Callable, parts: Subject, *args: Any) -> Any:
        """Shapes and dtypes of the function's outputs."""
        program = self.jitted(function, parts)
        return self._visit(self._kind + function.__name__.strip("_"), program, args)

    def call_task(self, function: Callable, parts: Subject, *args: Any) -> Any:
        """Call the function on zeros if the task is in files, else as `call`."""
        if not parts.task.in_files:
            return self.call(function, parts, *args)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), args)
        return function(parts, *zeros)

    def ahead(
        self, function: Callable, parts: Components, state: TrainState, then: Behaviour
    ) -> Any:
        """The state, and shapes of what the function makes of its behaviour."""
        drawn = self._drawn(function, parts, ahead.of_step(state))
        return self._where_it_trains(state), drawn

    def finish(self, function: Callable, parts: Subject, *args: Any) -> Any:
        """Shapes and dtypes of the function's outputs."""
        return self._visit(function.__name__, self.finishing(function, parts), args)

    def repeat(self, wants: Callable, body: Callable, start: Any) -> Any:
        """Trace condition and body once."""
        wants(start)
        body(start)
        return start

    def _waited_for(self, arrays: Any) -> Any:
        return arrays

    def _answered(self, *what: Any) -> tuple[outside.Given, Drawn]:
        parts, _, request, asked = what
        return outside.shapes(parts, request, asked), Drawn([], {}, None)

    def _answers(self, episodes: play.Episodes, played: play.Played) -> play.Given:
        shape = played.rollouts.tokens.shape
        return jax.eval_shape(lambda: play.blank(shape, episodes.environment.measures))

    def _verdicts(self, episodes: Any, rollouts: Rollouts) -> reward.Verdicts:
        outcome = jax.ShapeDtypeStruct(rollouts.exists.shape, jnp.float32)
        return reward.Verdicts(outcome, {})  # pyright: ignore[reportArgumentType]

    def _grade_on_host(self, parts, request, rollouts) -> "Future[Any]":
        return finished(self._verdicts(None, rollouts))

    def _joined(self, arrays: Sequence[Any]) -> Any:
        if len(arrays) == 1:
            return arrays[0]
        rows, where = sum(one.shape[0] for one in arrays), arrays[0].sharding
        return jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=where)


def finished(value: Any) -> Future:
    """A completed future with this result."""
    done = Future()
    done.set_result(value)
    return done


def _concatenated(parts: Subject, drawn: list[Rollouts]) -> Rollouts:
    """Rows of all chunks, concatenated."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *drawn)


class Clock:
    """Seconds of each stage of a step, and missing outcomes of its host verifier."""

    def __init__(self):
        """Start all times at zero."""
        self._seconds: dict[Stage, float] = dict.fromkeys(get_args(Stage), 0.0)
        self._grading, self._missing = 0.0, Counter[str]()
        self.waited: float | None = None  # for drawing and grading; None: for all
        self._terms: dict[str, list[np.ndarray]] = {}
        self._engine = defaultdict[str, float](float)  # an engine's counts
        self._gaps: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def times(self, stage: Stage) -> Iterator[None]:
        """A context that times a stage; for verify, the time spent waiting for it."""
        start = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - start

    def graded(self, seconds: float, verdicts: reward.Verdicts) -> None:
        """Add the seconds of a grading on the host, its missing outcomes and terms."""
        self._grading += seconds
        self._missing += verdicts.missing
        for name, values in (verdicts.terms or {}).items():
            self._terms.setdefault(name, []).append(values[~np.isnan(values)])

    def drawn_outside(self, counts: Mapping[str, float], gaps: dict[str, Any]) -> None:
        """Add the counts of a draw by an engine, and how far its log-probs were off."""
        for name, value in counts.items():
            self._engine[f"engine/{name}"] += value
        self._gaps.append(gaps)

    def _outside(self) -> dict[str, Any]:
        """Metrics of an engine, by name; none without one."""
        if not self._gaps:
            return {}
        gaps = peers.fetch(self._gaps)
        names = "requests", "again", "missing", "hand_over_bytes", "hand_over_s"
        row: dict[str, Any] = {f"engine/{name}": 0.0 for name in names}
        row |= self._engine
        total, tokens = np.sum([one["engine/gap_nats"] for one in gaps], 0)
        row["engine/gap_nats"] = total / tokens if tokens else np.float32(np.nan)
        most = [one["engine/gap_max_nats"][0] for one in gaps]
        return row | {"engine/gap_max_nats": np.max(most)}

    def row(self, on_device: bool) -> dict[str, Any]:
        """Times, counts of missing outcomes by reason, and means of terms, by name.

        `verify/other` counts all reasons that are not of `KINDS`.
        """
        row: dict[str, Any] = {f"time/{k}_s": took for k, took in self._seconds.items()}
        drawing, verify = self._seconds["rollout"], self._seconds["verify"]
        waited = drawing + verify if self.waited is None else self.waited
        took = drawing + max(self._grading, verify)
        row["time/hidden_fraction"] = max(1.0 - waited / took, 0.0) if took else 0.0
        row |= self._outside()
        if on_device:
            return row
        hidden = max(self._grading - self._seconds["verify"], 0.0)
        kinds = {f"verify/{kind}": self._missing[kind] for kind in KINDS}
        kinds["verify/other"] = self._missing.total() - sum(kinds.values())
        for name, values in self._terms.items():
            every = np.concatenate(values)
            row[f"term/{name}"] = every.mean() if every.size else np.float32(np.nan)
        return row | kinds | {"time/verify_hidden_s": hidden}
