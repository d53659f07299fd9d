"""A comparison from its experiment to its report: runs, results.json, page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from curax.compare import analysis, figures, page, runner
from curax.compare.experiment import Arm, Experiment, in_json, setting_of, warm_key
from curax.runs import folder, libraries, reading
from curax.runs.progress import Progress
from curax.settings import files, lock
from curax.settings.cli import write_file
from curax.settings.packages import VERSION

RESULTS = "results.json"


def compare(
    experiment: Experiment,
    arms: Sequence[Arm],
    workdir: Path,
    *,
    cost: tuple[float, float] | None,
    name: str,
) -> str:
    """Run the remaining arms, write results and report, and return the claims as text.

    Args:
        experiment: what runs.
        arms: of the experiment.
        workdir: folder of the comparison; made if it is missing.
        cost: of a token drawn and of one trained; None: that of the experiment, else
            measured.
        name: headline of the report.

    Raises:
        ConfigError: wrong input; nothing has been written.
    """
    folder.check_writable(workdir)
    libraries.set_up()
    cost = cost or experiment.cost
    with lock.hold(workdir, "--workdir"):
        runner.check(workdir, experiment, arms)
        work = runner.Comparison(experiment, arms, workdir)
        with Progress(Console(highlight=False)) as progress:
            ran = work.run(measures=cost is None, progress=progress)
        measured = {} if cost else reading.read_json(workdir / runner.COST)
        prices = cost or (measured["drawn_s"], measured["trained_s"])
        shown = results(experiment, ran, prices)
        found = {"name": name, "measured": measured or None, **shown.found}
        found |= {"tuned": ran.tuned} if ran.tuned else {}
        write_file(workdir / RESULTS, files.json_bytes(found))
        path = page.write(workdir, shown._replace(found=found))
    claims = analysis.claims(found) or [analysis.without_claims(found)]
    return "\n".join([*analysis.tuned_texts(found), *claims, f"Report: {path}"])


def entries(
    experiment: Experiment, arms: Sequence[Arm], histories: Mapping[str, Any]
) -> list[analysis.Entry]:
    """Arms with their histories under all conditions, in order."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        found.setdefault(arm.label, []).append(arm)
    return [
        analysis.Entry(
            *(each[0].recipe, each[0].swept[0], in_json(each[0].swept[1])),
            {a.condition: analysis.history_of(histories[a.name]) for a in each},
            {a.condition: warm_key(experiment, a) for a in each},
            own={n: in_json(setting_of(each[0].config, n)) for n in experiment.sweep},
        )
        for each in found.values()
    ]


def results(
    experiment: Experiment, ran: runner.Ran, prices: tuple[float, float]
) -> figures.Shown:
    """Results of the arms with their histories, in the form of results.json."""
    question = analysis.Question(
        baseline=experiment.against,
        prices=prices,
        budgets=experiment.budgets,
        threshold=experiment.threshold,
    )
    compared = entries(experiment, ran.arms, ran.histories)
    found = analysis.analyse(compared, question)
    about = {"seeds": experiment.seeds, **ran.on, "curax": VERSION}
    listed = [
        {
            "name": arm.name,
            "recipe": arm.recipe,
            "condition": arm.condition,
            "setting": arm.swept[0],
            "value": arm.settings.get(arm.swept[0]),
        }
        for arm in ran.arms
    ]
    both = about | found | {"arms": listed, "histories": dict(ran.histories)}
    return figures.Shown(both, compared, question)
