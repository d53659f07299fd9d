"""Properties that a stage function declares, for checks of how stages combine.

    equal_groups    the allocator gives every prompt the same number, up to 1
    has_ratio       the loss corrects for a policy that differs from the sampler's
    least_group     smallest group with a gradient; or the name of the option that
                    sets it
    constant        a multiplier, or an off-policy weight, is 1 for every token
    per             the option of an off-policy rule that is what a ratio is of
    weighs          its option that is the rule whose weights it changes
    of_batch        its weights depend on all rows of an update
    trains_prompt   a credit of hinted groups trains the prompt without its hint, by
                    the coefficient that they had under it
    method          the function among `methods` of the config whose method keeps what
                    this one reads
    recall          the right completions that a source of hints reads, of a method's
                    state; a prompt has no hint before there is one
    remembers       the rule that keeps prompts has a state from selection to selection
    keeps           the option of a down-sampling that is the most it keeps of a prompt
    floor           the option of an allocator that is the least it gives a prompt
    rows_per_prompt the option of a correction that is the rows trained per prompt
    objective       the option of an objective that is the function f of a pass rate
    series, terms   its options that are the coefficients of f', and how many it takes
    lengths         the options of a stage that are lengths of completions in tokens
    ranks           the option of a rule that keeps prompts, for which it needs ranks of
                    the tokens of references
    checkpoint      the option of a model that is the checkpoint it begins from
    check_weights   of a model, what raises where its checkpoint holds no weights
    computes_in     the option of a model that is the dtype of its matrix products
    recomputes      the option of a model that is what a backward pass computes again
    tokenizer       the option of a task that is the checkpoint of its tokenizer; None
                    there: the model's
    num_prompts     the option of a task that is its number of prompts
    prompt_tokens   the option of a task that is the longest of its prompts
    trace_tokens    the option of a task that is the longest of its traces
    contract        what a function takes and gives, as its annotations state it; set
                    by `arrays/checks.py`, whose decorator sets the others as well
    package         the package that a grader or a dashboard cannot do without
    states          of a grader, `(completion, **options) -> bool`, whether a completion
                    states an answer that it reads, by the grader's own options
    pool            of a grader, `(**options) -> verify.workers.Pool`, which grades all
                    checks of a batch in place of worker processes
    other_terms     rewards by a grader have more terms than its outcome
    most_draws      the option of a correction that is the most a prompt draws
    right_above     the option that is the largest outcome of a wrong completion
    counts_right    of an estimator, the option that is how many right completions it
                    needs, which it counts by rewards; 0 there: none

Checks read properties, never the name of a function, so a user's function declares what
it needs in the same way. Only the standard library is imported.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

# Right is an outcome above this, wherever right and wrong are told apart: what stops a
# draw is what is accepted, corrected, counted and evaluated.
RIGHT = 0.5

F = TypeVar("F", bound=Callable[..., Any])


def declares(**properties: Any) -> Callable[[F], F]:
    """Decorator that sets properties of a function."""

    def marked(function: F) -> F:
        vars(function).update(properties)
        return function

    return marked


def declared(function: Any, name: str, default: Any) -> Any:
    """A declared property of a function, bound or not; `default` where it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, name, default)
