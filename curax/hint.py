"""What completions are conditioned on: the prompt, and a hint where it gets one."""

from curax.types import Contexts, Prompts


def none(prompts: Prompts) -> Contexts:
    """Every prompt is its own context, without a hint: context b is prompt b."""
    return Contexts(tokens=prompts.tokens, mask=prompts.mask)
