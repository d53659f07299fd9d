"""Alarms on the metrics of a run, and the conditions under which it must stop."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from curax.verify import graders

Row = dict[str, Any]

FALLEN = {  # by kind: metric, share of its first value that raises an alarm, what to do
    "formats": (
        *("format/effective_number", 0.5),
        "completions take one form; look at the losing ones in rollouts.jsonl, and at "
        "pass@k, before more steps make it the only one: an entropy bonus, a higher "
        "loss.high or a KL to the reference slow this down",
    ),
    "thought": (
        *("reflect/thought_tokens", 0.1),
        "completions hardly think before they answer; set reflection.weights to weigh "
        "the reference tokens by how much they depend on the thought, for their plain "
        "mean ends thoughts, or lower the learning rate",
    ),
}
FEWEST = 0.5  # share that draws of another policy are worth, and of the ratio's mean
CAUSES = {  # of ratios of policy and behaviour, with what to do
    "truncation": "top_k or top_p cuts off too much: raise sampling.top_p or "
    "sampling.top_k",
    "lag": "the policy moves far in one step: lower optimizer.learning_rate, make "
    "fewer updates of a batch, or set sampling.ahead to 0",
    "engine": "sampler and trainer compute differently: let both have the same "
    "parameters and dtype, and look at sampler/drift_nats",
}
SILENT = 0.5  # share of held-out completions without an answer that raises one
GAP = 0.1  # nats of an engine from the trainer, mean over tokens, that raise one
SURPRISE, STREAK = 4.0, 10  # standard deviations, and steps in a row beyond them
SHORT = {  # words for the summary line, by kind; these kinds go into alarms.jsonl
    "nonfinite": "updates that were not finite",
    "collapse": "nothing left to learn from",
    "drift": "ratios off 1 before any update",
    "off_policy": "draws far from the policy",
    "engine": "an engine far from the trainer",
    "formats": "completions of fewer forms",
    "thought": "thoughts that shrank",
    "surprise": "dead groups far from the forecast",
    "silent": "completions that state no answer",
    "hints": "hints that are too long",
    "logits": "logits that were not finite",
}


class Alarms:
    """Alarms of a run, raised row by row; each kind is reported once."""

    def __init__(self, *, patience: int, drift_nats: float):
        """Start before the first row.

        Args:
            patience: steps in a row without a finite gradient, or with nothing but
                dead groups, before the run stops or counts as collapsed.
            drift_nats: largest `sampler/drift_nats` without an alarm.
        """
        self._patience, self._drift_nats = patience, drift_nats
        self._reported: set[str] = set()
        self._first: dict[str, np.ndarray] = {}
        self._surprised = np.zeros(1, np.int64)
        self._dead = np.zeros(1, np.int64)  # steps in a row

    def check(self, row: Row) -> dict[str, str]:
        """Alarms that a row raises for the first time: kind to sentence."""
        new = {k: text for k, text in self._triggered(row) if k not in self._reported}
        self._reported |= set(new)
        return new

    def resume(self, rows: Iterable[Row], kept: Iterable[Row]) -> None:
        """Take up the rows and the kept alarms that a run has behind it.

        Of kinds that are kept, those were reported: the bounds may have been others.
        """
        for row in rows:
            self.check(row)
        self._reported -= SHORT.keys()
        self._reported |= {alarm["kind"] for alarm in kept}

    def _triggered(self, row: Row) -> Iterator[tuple[str, str]]:
        """All alarms of a row, reported before or not: (kind, sentence)."""
        step = row["step"]
        bad = _values(row, "update/nonfinite") > 0
        if np.any(bad):
            yield (
                "nonfinite",
                f"{nonfinite_metric(row)} at step {step}: the update was skipped; "
                f"after {self._patience} such steps in a row the run stops.",
            )
        drew = _values(row, "rollout/length_tokens") > 0
        wild = ~np.isfinite(_values(row, "policy/entropy_nats"))
        if np.any(drew & wild & ~bad):  # else the sentence on the update tells it
            yield (
                "logits",
                f"the logits of a draw were not finite at step {step}: go back to an "
                "earlier checkpoint, and lower optimizer.learning_rate or "
                "update.clip_norm.",
            )
        if text := silence(row):
            yield "silent", text
        if text := unfit_hints(row):
            yield "hints", text
        dead = (_values(row, "group/signal_fraction", 1) == 0) & ~bad
        self._dead = streak(dead, self._dead)
        if np.all(dead):
            yield (
                "dead",
                f"nothing to train on at step {step}, so no update: "
                f"{no_signal_reason(row, dead)}.",
            )
        if np.any(gone := self._dead >= self._patience):
            yield (
                "collapse",
                f"nothing to train on in {self._patience} steps in a row up to step "
                f"{step}, so no updates: {no_signal_reason(row, gone)}; if it was "
                "otherwise before, the policy has collapsed: start anew with a lower "
                "optimizer.learning_rate.",
            )
        drift = _values(row, "sampler/drift_nats")
        if np.any(drift > self._drift_nats):
            yield (
                "drift",
                f"sampler/drift_nats is {np.nanmax(drift):.3g} at step {step}, above "
                f"{self._drift_nats:g}: sampler and trainer give one token different "
                "log-probs, so ratios are off 1 before any update; likely the model "
                "looks at more than the tokens before (padding, cache, dropout), or "
                "the bound logging.drift_nats is too low for its dtype.",
            )
        if text := far_off(row):
            yield "off_policy", text
        gap = _values(row, "engine/gap_nats")
        if np.any(gap > GAP):
            yield (
                "engine",
                f"engine/gap_nats is {np.nanmax(gap):.3g} at step {step}, above "
                f"{GAP:g}: engine and trainer give tokens log-probs that differ by "
                "more than rounding; likely the engine's are those before the "
                "temperature (--logprobs-mode processed_logprobs), or other weights.",
            )
        for kind, (name, share, remedy) in FALLEN.items():
            if name not in row:
                continue
            now = _values(row, name)
            first = self._first.get(name, np.full_like(now, np.nan))
            self._first[name] = first = np.where(np.isnan(first), now, first)
            low = now < share * first
            if np.any(low):
                yield (
                    kind,
                    f"{name} is {now[low][0]:.3g} at step {step}, and was "
                    f"{first[low][0]:.3g} at first: {remedy}.",
                )
        z = _values(row, "forecast/dead_z", np.nan)
        self._surprised = surprise_streak(z, self._surprised)
        if np.any(np.abs(self._surprised) >= STREAK):
            more = "more" if np.any(self._surprised >= STREAK) else "fewer"
            yield (
                "surprise",
                f"{more} groups are dead than the memory forecasts, by {SURPRISE:g} "
                f"standard deviations for {STREAK} steps up to step {step}: outcomes "
                "are not what they were; look whether the verifier works, and lower "
                "memory.half_life if the policy moves fast.",
            )


@dataclasses.dataclass(kw_only=True)
class Totals:
    """What the host of a run counts, in whole numbers; a list is of one per seed."""

    tokens: Any = 0  # generated since step 0
    updates: Any = 0  # of the optimizer since step 0
    nonfinite_in_a_row: Any = 0  # steps without a finite gradient
    missing_in_a_row: Any = 0  # steps without any outcome

    def add(self, row: Mapping[str, Any], like: Any) -> dict[str, Any]:
        """Add the counts of a step; its metrics that are counted since step 0.

        Args:
            row: metrics of the step; those that are left out are 0.
            like: `[]` or `[R]`, seeds of the run.
        """
        for metric, name in (("rollout/tokens", "tokens"), ("update/count", "updates")):
            new = np.asarray(row.get(metric, np.zeros(np.shape(like))))
            old = np.asarray(getattr(self, name), np.int64)
            setattr(self, name, (old + new.astype(np.int64)).tolist())
        return {"rollout/tokens": self.tokens, "update/count": self.updates}

    def must_stop(
        self, row: Row, *, patience: int, saved: int, allocator: str, verifier: str
    ) -> str | None:
        """Sentence on why a run must stop at a row; None: it goes on.

        Args:
            row: metrics of the step.
            patience: steps in a row without any outcome, or without a finite gradient,
                that end it.
            saved: step that it is saved at.
            allocator: as `contract_violation`.
            verifier: why outcomes are missing.
        """
        step, drawn = row["step"], np.asarray(row.get("rollout/drawn", 0))
        missing = np.asarray(row.get("outcome/missing", 0)) >= np.maximum(drawn, 1)
        self.missing_in_a_row = streak(missing, self.missing_in_a_row).tolist()
        if np.all(np.asarray(self.missing_in_a_row) >= patience):
            who, gave = _silent(row)
            return (
                f"{who} {gave} in the last {patience} steps up to step {step} "
                f"({verifier}), so the run stops, saved as step {saved}; mend {who} "
                "and go on with --resume."
            )
        if violation := contract_violation(row, allocator):
            return f"{violation}, and start anew in another --workdir."
        bad = np.asarray(row.get("update/nonfinite", 0)) > 0
        self.nonfinite_in_a_row = streak(bad, self.nonfinite_in_a_row).tolist()
        if np.all(np.asarray(self.nonfinite_in_a_row) >= patience):
            return (
                f"{nonfinite_metric(row)} at step {step}, as in all of the last "
                f"{patience} steps, so the run stops; what it had learnt until then is "
                f"saved as step {saved}; start anew with a lower "
                "optimizer.learning_rate."
            )
        return None


def contract_violation(row: Row, allocator: str) -> str | None:
    """Why a run must stop: allocator or verifier left its range; None: neither did.

    Args:
        row: metrics of a step.
        allocator: name of the allocator for the sentence, as `allocate=...`.
    """
    dropped = float(np.max(_values(row, "allocate/dropped_rows")))
    if dropped > 0:
        return (
            f"{allocator} asked in step {row['step']} for {dropped:.0f} "
            "completions more than there is room for, and they were dropped; mend it: "
            "counts lie between 0 and sampling.group_size, and their sum is at most "
            "the completions of a step"
        )
    outside = float(np.max(_values(row, "outcome/out_of_range")))
    if outside > 0:
        return (
            f"the verifier or environment of task gave {outside:.0f} outcomes outside "
            f"[0, 1] in step {row['step']}; mend it, and put what is "
            "more than right or wrong into shape_reward"
        )
    return None


def silence(row: Row) -> str:
    """Sentence on held-out completions without an answer, if most are; else empty."""
    share = float(np.max(_values(row, "format/no_answer_fraction")))
    if not share > SILENT:
        return ""
    return (
        f"{share:.0%} of the held-out completions at step {row['step']} "
        f"{graders.SILENT}."
    )


def unfit_hints(row: Row) -> str:
    """Sentence on hints that are too long, if no group has one; else empty."""
    long = _values(row, "hint/overlong")
    if not np.any((long > 0) & (_values(row, "hint/hinted_fraction", 1) == 0)):
        return ""
    return (
        f"no group has a hint at step {row['step']}, and {np.max(long):.0f} hints are "
        "longer than hint.width with the words around them; raise hint.width."
    )


def far_off(row: Row) -> str:
    """Sentence on draws far from the policy, with the likeliest cause; else empty.

    They are where they are worth less than half as many of the policy's own, or where
    the mean ratio is off 1 by more than a factor of two. Of the causes that the row
    knows the one with the largest gap of perplexities is named.
    """
    name = "off_policy/{}_perplexity_gap_nats".format
    known = [cause for cause in CAUSES if name(cause) in row]
    worth, mean, *gaps = np.broadcast_arrays(
        _values(row, "off_policy/effective_fraction", 1.0),
        _values(row, "off_policy/ratio_mean", 1.0),
        *(np.abs(_values(row, name(cause))) for cause in known),
    )
    off = (worth < FEWEST) | (mean < FEWEST) | (mean > 1 / FEWEST)
    if not np.any(off):
        return ""
    seed = int(np.argmax(off))
    gap, why = max((gap[seed], cause) for gap, cause in zip(gaps, known, strict=True))
    return (
        f"draws are far from the policy at step {row['step']}: off_policy/"
        f"effective_fraction is {worth[seed]:.3g} and off_policy/ratio_mean "
        f"{mean[seed]:.3g}; likeliest, by a gap of {gap:.3g} nats per token, "
        f"{CAUSES[why]}; what sampling.off_policy cuts is in off_policy/cut_fraction."
    )


def surprise_streak(z: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Steps in a row with z above `SURPRISE`, or minus those below `-SURPRISE`, `[R]`.

    Args:
        z: `[R]` z-score of a step.
        before: `[R]` integer, the streak up to the step before.
    """
    above, below = np.maximum(before, 0) + 1, np.minimum(before, 0) - 1
    return np.where(z > SURPRISE, above, np.where(z < -SURPRISE, below, 0))


def streak(bad: Any, before: Any) -> np.ndarray:
    """Steps in a row that were bad, `[]` or `[R]`, the streak before them included."""
    return np.where(bad, np.asarray(before, np.int64) + 1, 0)


def nonfinite_metric(row: Row) -> str:
    """Phrase that names the metric of a row that is not finite, with its value."""
    for name in ("loss/mean", "gradient/norm"):
        values = _values(row, name)
        if not np.all(np.isfinite(values)):
            return f"{name} is {values[~np.isfinite(values)][0]}"
    return "the gradient of an epoch or mini-batch is not finite"


def _silent(row: Row) -> tuple[str, str]:
    """Who left all outcomes of a step missing, and what it did not give."""
    drawn = np.maximum(np.asarray(row.get("rollout/drawn", 0)), 1)
    if np.all(np.asarray(row.get("engine/missing", 0)) >= drawn):
        return "the engine", "gave no completion"
    return "the verifier", "gave no outcome for any completion"


def no_signal_reason(row: Row, dead: np.ndarray) -> str:
    """Phrase that says why a step has no learning signal, with a fix.

    Args:
        row: of the step.
        dead: `[R]` bool, the seeds that have none.
    """

    def each(name: str, default: float = 0.0) -> np.ndarray:
        return np.broadcast_to(_values(row, name, default), dead.shape)[dead]

    if np.all(each("outcome/missing") >= each("rollout/drawn", np.inf)):
        return f"{' '.join(_silent(row))}; look at the warnings that it logged"
    failed, solved = (
        float(np.mean(each(f"group/{end}_fraction"))) for end in ("failed", "solved")
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
        "sampling.group_size or sampling.attempts, warm-start for longer, or take "
        "easier prompts"
    )


def _values(row: Row, name: str, default: float = 0.0) -> np.ndarray:
    """`[R]` float64 values of a metric, one per seed; `default` where it is absent."""

    return np.atleast_1d(np.asarray(row.get(name, default), np.float64))
