"""A recipe of each kind: what takes long of all is asked of these in `make test`."""

import pytest

FIRST = (
    *("ada_seq_sage", "dapo", "dynamo_published", "gvm_grpo_published"),
    *("own_prefix", "sage_exact", "sage_offline", "sage_teacher"),
)


def one_of_each_first(names, first=FIRST):
    """Names as parameters: those in `first`, then the others, which are long."""
    others = [name for name in names if name not in first]
    rest = [pytest.param(name, marks=pytest.mark.long) for name in others]
    return [*(name for name in names if name in first), *rest]
