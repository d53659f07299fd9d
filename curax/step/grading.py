"""Verdicts of host verifiers, where several processes share the grading.

    own -> reward.on_host, in a thread -> join, in the main thread

Each completion is graded by one process. A verifier may be slow or answer at random, so
what it said is exchanged before anything depends on it: all processes then have equal
outcomes, and equal states after the update.
"""

import dataclasses
from collections.abc import Sequence
from functools import reduce

import numpy as np

from curax.processes import peers
from curax.reward import Verdicts
from curax.types import Rollouts


def own(rollouts: Rollouts) -> Rollouts:
    """Rollouts in which only the rows that this process grades exist.

    Args:
        rollouts: `[N]` numpy arrays, the same on all processes.
    """
    if peers.count() == 1:
        return rollouts
    exists = np.zeros_like(rollouts.exists)
    exists[peers.share(np.flatnonzero(rollouts.exists))] = True
    return dataclasses.replace(rollouts, exists=exists)


def join(verdicts: Sequence[Verdicts]) -> list[Verdicts]:
    """Verdicts on all completions, joined from those of all processes.

    Args:
        verdicts: of this process; as many, of the same rollouts, on every process.
    """
    return [merged(each) for each in zip(*peers.gather(list(verdicts)), strict=True)]


def merged(shares: Sequence[Verdicts]) -> Verdicts:
    """Verdicts of all processes as one; each has graded other rows.

    Their seconds are those of the first, which are not comparable between processes.
    """
    first = shares[0]
    terms = first.terms and {
        name: reduce(np.fmax, [(share.terms or {})[name] for share in shares])
        for name in first.terms
    }
    reasons = dict(item for share in shares for item in share.reasons.items())
    outcome = reduce(np.fmax, [share.outcome for share in shares])  # what is not NaN
    return Verdicts(outcome, reasons, first.seconds, terms)
