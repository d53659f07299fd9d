"""Dashboards that show a run while it trains: TensorBoard, wandb, trackio, MLflow.

`logging.dashboards` names functions of this module, or has functions like them: session
to dashboard. The files of the run folder are the truth: what a dashboard gets is a copy
of their rows, a resumed run goes on with its dashboard's run, and one that fails is
left with a warning. All but TensorBoard find account, project and server where they
always do, in their own environment variables and files.
"""

import contextlib
import dataclasses
import importlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from curax.config import ConfigError
from curax.runs.reading import overall_mean
from curax.settings import files
from curax.settings.cli import write_whole
from curax.settings.config_paths import full_name
from curax.settings.config_types import Function
from curax.settings.declared import declared, declares
from curax.settings.packages import missing

EVENTS = "tensorboard"  # folder of TensorBoard's events in the run folder
IDS = "dashboards.json"  # file of the run folder: dashboard to the id of its run
PROJECT = "curax"
COLUMNS = (
    *("step", "prompt_id", "prompt", "text", "outcome", "reward", "advantage"),
    "kept",
)

Row = Mapping[str, Any]
File = tuple[Path, os.stat_result]  # path and status


class Session(NamedTuple):
    """Arguments with which a dashboard is opened."""

    workdir: Path
    config: Any  # described, as in config.json
    id: str | None  # of the dashboard's run that goes on; None: a new one
    step: int  # of the checkpoint that the run goes on from; -1: none


class Dashboard(Protocol):
    """Interface of a dashboard that shows metrics and completions of a run.

    Attributes:
        id: of its run, kept in the run folder.
        file: path and status of its file in the run folder; None: it has none.
    """

    id: str
    file: File | None

    def write(self, rows: Sequence[Row], rollouts: Sequence[Row]) -> None:
        """Show rows of metrics, and rows of completions of the same steps."""
        ...

    def close(self) -> None:
        """Send buffered rows and end the dashboard's run."""
        ...


def means(row: Row) -> dict[str, float]:
    """Metrics of a row, each a mean over finite seeds; others are left out."""
    each = {name: overall_mean(row[name]) for name in row if name != "step"}
    return {name: mean for name, mean in each.items() if np.isfinite(mean)}


def table(rollouts: Sequence[Row]) -> list[list[Any]]:
    """`COLUMNS` of each completion as JSON values; None where an outcome is missing."""
    return [[files.json_value(row.get(name)) for name in COLUMNS] for row in rollouts]


# ----- dashboards, functions of a session


class TensorBoard:
    """TensorBoard scalars, written synchronously: on disk when `write` returns."""

    file: File | None

    def __init__(self, path: Path, *, upto: int):
        """Open a new file that makes TensorBoard hide older events after `upto`.

        TensorBoard reads files in the order of their names. The number in front of the
        time there is higher than in those before, for clocks are set back.
        """
        path.mkdir(exist_ok=True)
        names = [re.match(r"events(\d*)\.", name) for name in os.listdir(path)]
        last = max((int(found[1] or 0) for found in names if found), default=-1)
        prefix = path / f"events{last + 1:05}"
        self._writer = EventsWriter(str(prefix), f".{upto + 1}")
        there = Path(self._writer._file_name)
        self.id, self.file = "", (there, there.stat())
        log = SessionLog(status=SessionLog.START)
        self._add(Event(step=upto + 1, session_log=log))

    def write(self, rows: Sequence[Row], rollouts: Sequence[Row]) -> None:
        """Write one event per row with its metrics; completions are not shown."""
        for row in rows:
            values = [
                Summary.Value(tag=name, simple_value=mean)
                for name, mean in means(row).items()
            ]
            self._add(Event(step=row["step"], summary=Summary(value=values)))
        self._writer.flush()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


@dataclasses.dataclass
class Logged:
    """A run that is told by `log`; steps that it has already are left out by it."""

    id: str
    log: Callable[..., Any]
    close: Callable[[], Any]
    tabled: Callable[..., Any]
    file: File | None = None

    def write(self, rows: Sequence[Row], rollouts: Sequence[Row]) -> None:
        """As `Dashboard.write`."""
        for row in rows:
            self.log(means(row), step=row["step"])
        if rollouts:
            shown = self.tabled(columns=list(COLUMNS), data=table(rollouts))
            self.log({"rollouts": shown}, step=rows[-1]["step"])


@dataclasses.dataclass
class MLflow:
    """A run of MLflow; completions are tables, one for each time rows are written."""

    id: str
    client: Any
    metric: Callable[..., Any]
    file: File | None = None

    def write(self, rows: Sequence[Row], rollouts: Sequence[Row]) -> None:
        """As `Dashboard.write`."""
        now = int(1000 * time.time())
        for row in rows:
            each = means(row).items()
            values = [self.metric(k, v, now, row["step"]) for k, v in each]
            self.client.log_batch(self.id, metrics=values)
        if rollouts:
            columns = zip(*table(rollouts), strict=True)
            shown = dict(zip(COLUMNS, map(list, columns), strict=True))
            name = f"rollouts/{rows[-1]['step']:08d}.json"
            self.client.log_table(self.id, shown, artifact_file=name)

    def close(self) -> None:
        """As `Dashboard.close`."""
        self.client.set_terminated(self.id)


def tensorboard(session: Session) -> Dashboard:
    """Events of TensorBoard in the folder `tensorboard` of the run folder."""
    return TensorBoard(session.workdir / EVENTS, upto=session.step)


@declares(package="wandb")
def wandb(session: Session, *, project: str = PROJECT) -> Dashboard:
    """Weights & Biases, offline with WANDB_MODE=offline.

    Its files are in the folder `wandb` of the run's.

    Args:
        session: of the run.
        project: where its run is; WANDB_PROJECT precedes it.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    name = session.id or secrets.token_hex(4)
    run = wandb.init(
        id=name,
        project=os.environ.get("WANDB_PROJECT", project),
        name=session.workdir.name,
        dir=str(session.workdir),
        config=session.config,
        resume="allow",
        settings=wandb.Settings(console="off", silent=True),
    )
    return Logged(name, run.log, run.finish, wandb.Table)


@declares(package="trackio")
def trackio(session: Session, *, project: str = PROJECT) -> Dashboard:
    """Trackio, local unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set.

    Args:
        session: of the run.
        project: where its run is; TRACKIO_PROJECT precedes it.
    """
    import trackio  # pyright: ignore[reportMissingImports]

    name = session.id or f"{session.workdir.name}-{secrets.token_hex(4)}"
    trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", project),
        name=name,
        config=session.config,
        resume="allow",
        embed=False,
    )
    return Logged(name, trackio.log, trackio.finish, trackio.Table)


@declares(package="mlflow")
def mlflow(session: Session, *, project: str = PROJECT) -> Dashboard:
    """MLflow, at MLFLOW_TRACKING_URI.

    Args:
        session: of the run.
        project: experiment that its run is of; MLFLOW_EXPERIMENT_NAME precedes it.
    """
    import mlflow  # pyright: ignore[reportMissingImports]

    made = MLflow(session.id or "", mlflow.MlflowClient(), mlflow.entities.Metric)
    if session.id is not None:
        made.client.update_run(made.id, status="RUNNING")
        return made
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", project)
    known = made.client.get_experiment_by_name(name)
    of = known.experiment_id if known else made.client.create_experiment(name)
    run = made.client.create_run(of, run_name=session.workdir.name)
    made.id = run.info.run_id
    made.client.log_dict(made.id, session.config, "config.json")
    return made


NAMED = {one.__name__: one for one in (tensorboard, wandb, trackio, mlflow)}


# ----- those of a run


def functions(named: Iterable[str | Function]) -> dict[str, Function]:
    """The functions of `logging.dashboards` by their names."""
    found = (NAMED[one] if isinstance(one, str) else one for one in named)
    return {full_name(one).rpartition(".")[2]: one for one in found}


def check(named: Iterable[str | Function]) -> None:
    """Check that the packages of dashboards are installed.

    Raises:
        ConfigError: one is not.
    """
    for name, function in functions(named).items():
        if package := declared(function, "package", None):
            try:
                importlib.import_module(package)
            except ImportError as error:
                why = missing(error) or f"{package} cannot be imported ({error})."
                raise ConfigError(f"logging.dashboards: for {name}, {why}") from error


class Dashboards:
    """The dashboards of a run; one that fails is closed, with a warning."""

    def __init__(
        self,
        named: Iterable[str | Function],
        workdir: Path,
        config: Any,
        *,
        step: int,
        warn: Callable[[str], None],
    ):
        """Open all dashboards; ids of their runs are kept in the run folder.

        Args:
            named: of `logging.dashboards`.
            workdir: run folder.
            config: described config of the run.
            step: of the checkpoint that the run goes on from; -1: none.
            warn: shows a warning.

        Raises:
            OSError: a file of the run folder cannot be written.
        """
        self._open: dict[str, Dashboard] = {}
        self._warn, path = warn, workdir / IDS
        kept = files.known(path) if step >= 0 else {}
        ids = {name: str(one) for name, one in kept.items()}
        for name, function in functions(named).items():
            session = Session(workdir, config, ids.get(name), step)
            with self._guard(name):
                self._open[name] = function(session)
        now = ids | {name: one.id for name, one in self._open.items() if one.id}
        if now != ids:
            write_whole(path, files.json_bytes(now))

    def write(self, rows: Sequence[Row], rollouts: Sequence[Row]) -> None:
        """Show rows of metrics, and rows of completions of the same steps.

        Raises:
            OSError: a file of the run folder cannot be written.
        """
        for name, one in list(self._open.items()):
            with self._guard(name, one):
                one.write(rows, rollouts)

    def files(self) -> Iterator[File]:
        """Path and status of the files that are open in the run folder."""
        for one in self._open.values():
            if one.file:
                yield one.file

    def close(self) -> None:
        """Send buffered rows and close all dashboards."""
        for name, one in list(self._open.items()):
            with self._guard(name, one):
                one.close()

    @contextlib.contextmanager
    def _guard(self, name: str, one: Dashboard | None = None) -> Iterator[None]:
        """Go on without a dashboard that fails, but for files of the run folder.

        Its error may quote secrets and is not shown.
        """
        try:
            yield
        except Exception as error:
            in_folder = name == EVENTS or (one and one.file)
            if in_folder and isinstance(error, OSError):
                raise
            self._open.pop(name, None)
            self._warn(
                f"{name} failed ({type(error).__name__}), so the run goes on without "
                "it; the run folder has everything."
            )
