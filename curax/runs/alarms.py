"""What in the metrics of a run deserves a sentence, and when the run must stop."""

from typing import Any

import numpy as np

Row = dict[str, Any]

FORMATS, THOUGHT = 0.5, 0.1  # of the first value, below which something is said
SURPRISE, IN_A_ROW = 4.0, 10  # standard deviations, and for how many steps
BRIEF = {  # of each kind of alarm that is kept, for the line that ends a run
    "nonfinite": "updates that were not finite",
    "collapse": "nothing left to learn from",
    "drift": "ratios off 1 before any update",
    "formats": "completions of fewer forms",
    "thought": "thoughts that shrank",
    "surprise": "dead groups far from the forecast",
}


class Watch:
    """Looks at every row of metrics. Each kind of trouble is told once."""

    def __init__(self, *, patience: int, drift_nats: float):
        """Nothing has happened yet.

        Args:
            patience: steps in a row without a finite gradient, or with dead groups
                alone, that are let pass.
            drift_nats: how far log-probs of sampler and trainer may be apart.
        """
        self._patience, self._drift_nats = patience, drift_nats
        self._told: set[str] = set()
        self._first: dict[str, np.ndarray] = {}
        self._surprised = np.zeros(1, np.int64)
        self._dead = np.zeros(1, np.int64)  # steps in a row

    def look(self, row: Row) -> dict[str, str]:
        """A sentence by kind about a row, without the kinds that were told before."""
        new = {kind: text for kind, text in self._seen(row) if kind not in self._told}
        self._told |= set(new)
        return new

    def _seen(self, row: Row):
        step = row["step"]
        bad = _of(row, "update/nonfinite") > 0
        if np.any(bad):
            yield (
                "nonfinite",
                f"{culprit(row)} at step {step}: the update was skipped; after "
                f"{self._patience} such steps in a row the run stops.",
            )
        dead = (_of(row, "group/signal_fraction", 1) == 0) & ~bad
        self._dead = np.where(dead, self._dead + 1, 0)
        if np.all(dead):
            yield (
                "dead",
                f"nothing to train on at step {step}, so no update: {remedy(row)}.",
            )
        if np.any(self._dead >= self._patience):
            yield (
                "collapse",
                f"nothing to train on in {self._patience} steps in a row up to step "
                f"{step}, so no updates: {remedy(row)}; if it was otherwise before, "
                "the policy has collapsed: start anew with a lower "
                "optimizer.learning_rate.",
            )
        drift = _of(row, "sampler/drift_nats")
        if np.any(drift > self._drift_nats):
            yield (
                "drift",
                f"sampler/drift_nats is {np.nanmax(drift):.3g} at step {step}, above "
                f"{self._drift_nats:g}: sampler and trainer give one token different "
                "log-probs, so ratios are off 1 before any update; likely the model "
                "looks at more than the tokens before (padding, cache, dropout), or "
                "the bound logging.drift_nats is too low for its dtype.",
            )
        yield from self._shrunk(
            row,
            "format/effective_number",
            FORMATS,
            "formats",
            "completions take one form; look at the losing ones in rollouts.jsonl, and "
            "at pass@k, before more steps make it the only one: an entropy bonus, a "
            "higher loss.high or a KL to the reference slow this down",
        )
        yield from self._shrunk(
            row,
            "reflect/thought_tokens",
            THOUGHT,
            "thought",
            "completions hardly think before they answer; set reflection.weights to "
            "weigh the reference tokens by how much they depend on the thought, for "
            "their plain mean ends thoughts, or lower the learning rate",
        )
        z = _of(row, "forecast/dead_z", np.nan)
        self._surprised = signed_run(z, self._surprised)
        if np.any(np.abs(self._surprised) >= IN_A_ROW):
            more = "more" if np.any(self._surprised >= IN_A_ROW) else "fewer"
            yield (
                "surprise",
                f"{more} groups are dead than the memory forecasts, by {SURPRISE:g} "
                f"standard deviations for {IN_A_ROW} steps up to step {step}: outcomes "
                "are not what they were; look whether the verifier works, and lower "
                "memory.half_life if the policy moves fast.",
            )

    def _shrunk(self, row: Row, name: str, share: float, kind: str, remedy: str):
        """A metric has fallen below a share of the first value it had."""
        if name not in row:
            return
        now = _of(row, name)
        first = self._first.get(name, np.full_like(now, np.nan))
        self._first[name] = first = np.where(np.isnan(first), now, first)
        low = now < share * first
        if np.any(low):
            yield (
                kind,
                f"{name} is {now[low][0]:.3g} at step {row['step']}, and was "
                f"{first[low][0]:.3g} at first: {remedy}.",
            )


def broken(row: Row, allocator: str) -> str | None:
    """Why a run must stop at a row that shows a broken promise; None: it need not.

    Args:
        row: of metrics.
        allocator: `allocate=` and the function's name.
    """
    dropped = float(np.max(_of(row, "allocate/dropped_rows")))
    if dropped > 0:
        return (
            f"{allocator} asked in step {row['step']} for {dropped:.0f} "
            "completions more than there is room for, and they were dropped; mend it: "
            "counts lie between 0 and sampling.group_size, and their sum is at most "
            "the completions of a step"
        )
    outside = float(np.max(_of(row, "outcome/out_of_range")))
    if outside > 0:
        return (
            f"the verifier of task gave {outside:.0f} outcomes outside [0, 1] in step "
            f"{row['step']}; mend it, and put what is more than right or wrong into "
            "shape_reward"
        )
    return None


def signed_run(z: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Steps in a row far above what was expected, or below: then negative; per seed."""
    above, below = np.maximum(before, 0) + 1, np.minimum(before, 0) - 1
    return np.where(z > SURPRISE, above, np.where(z < -SURPRISE, below, 0))


def in_a_row(row: Row, before: Any) -> np.ndarray:
    """Steps in a row without a finite gradient, this one included; per seed."""
    bad = np.asarray(row.get("update/nonfinite", 0)) > 0
    return np.where(bad, np.asarray(before, np.int64) + 1, 0)


def missing_in_a_row(row: Row, before: Any) -> np.ndarray:
    """Steps in a row without any outcome, this one included; per seed."""
    drawn = np.asarray(row.get("rollout/drawn", 0))
    missing = np.asarray(row.get("outcome/missing", 0)) >= np.maximum(drawn, 1)
    return np.where(missing, np.asarray(before, np.int64) + 1, 0)


def culprit(row: Row) -> str:
    """Which metric of a row is not finite, and what it is."""
    for name in ("loss/mean", "gradient/norm"):
        values = _of(row, name)
        if not np.all(np.isfinite(values)):
            return f"{name} is {values[~np.isfinite(values)][0]}"
    return "the gradient of an epoch or mini-batch is not finite"


def remedy(row: Row) -> str:
    """Why no completion of a step could teach anything, and what would change that."""
    if np.all(_of(row, "outcome/missing") >= _of(row, "rollout/drawn", np.inf)):
        return (
            "the verifier gave no outcome for any completion; look at the warnings "
            "that it logged"
        )
    failed, solved = (
        float(np.mean(_of(row, f"group/{end}_fraction")))
        for end in ("failed", "solved")
    )
    if failed + solved < 1:
        return (
            "no completion passed the gate and the down-sampling with credit left; "
            "loosen gate or downsample, or raise sampling.group_size"
        )
    if solved > failed:
        return (
            f"{solved:.0%} of the groups are solved by every completion; take harder "
            "prompts, or end the run"
        )
    return (
        f"{failed:.0%} of the groups are failed by every completion; raise "
        "sampling.group_size or sampling.rounds, warm-start for longer, or take easier "
        "prompts"
    )


def _of(row: Row, name: str, default: float = 0.0) -> np.ndarray:
    return np.atleast_1d(np.asarray(row.get(name, default), np.float64))
