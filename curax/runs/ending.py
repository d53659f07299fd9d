"""What is written and said of a complete run: predictions, its page, a line."""

import sys
from pathlib import Path

import numpy as np

from curax.config import Config
from curax.runs import alarms, folder, page, reading, templates
from curax.settings.packages import is_installed
from curax.theory import expect


def write_report(config: Config, workdir: Path, took: str) -> int:
    """Write the report of a complete run and print it; returns the exit status.

    Args:
        config: config of the run.
        workdir: run folder.
        took: what was done and how long it took; empty where nothing was.
    """
    try:
        if took or not (workdir / folder.EXPECTED).exists():
            write_predictions(config, workdir)
        path, line = page.write(workdir), summary_line(workdir)
    except (reading.DamagedError, OSError) as error:
        why = str(error)
        if isinstance(error, OSError):
            why += "; mend that and write it with --resume."
        print(f"curax.train: the run is complete, but {why}", file=sys.stderr)
        return 1
    if not is_installed("matplotlib"):
        print(templates.NO_PICTURES)
    print(f"{line}{took}.\nReport: {path}", flush=True)
    return 0


def write_predictions(config: Config, workdir: Path) -> None:
    """Write expected.json: the metrics that theory predicts from held-out pass rates.

    Writes nothing where pass rates before or after the run are missing.
    """
    run = reading.read(workdir)
    if run.before is None or run.after is None:
        return
    # questions.json exists for tasks of files; other tasks have the number as option.
    prompts = reading.read_json(workdir / folder.QUESTIONS).get("prompts")
    sides = {
        side: expect.expected(config, rates, run.samples, prompts=prompts)
        for side, rates in (("before", run.before), ("after", run.after))
    }
    folder.write_json(workdir / folder.EXPECTED, sides)


def summary_line(workdir: Path) -> str:
    """One line about a finished run: alarms, change of the pass rate, steps, tokens."""
    run = reading.read(workdir)
    brief = [
        f"{alarms.SHORT.get(row['kind'], row['kind'])} (step {row['step']})"
        for row in run.alarms
    ]
    but = f"Complete, but with {', '.join(brief)}. " if brief else ""
    rates = list(reading.means(run.rows, "eval/pass_rate").values())
    if run.config.get("steps") == 0:  # supervised training alone: one evaluation
        rate = f"{rates[-1]:.3f}" if rates else "unknown"
        steps = reading.plural(len(run.warm), "supervised step")
        return f"{but}Held-out pass rate {rate} after {steps}"
    change = f"{rates[0]:.3f} -> {rates[-1]:.3f}" if rates else "unknown"
    tokens = reading.count_text(float(np.sum(run.rows[-1].get("rollout/tokens", 0))))
    steps = reading.plural(run.rows[-1]["step"], "step")
    return f"{but}Held-out pass rate {change}: {steps}, {tokens} tokens generated"
