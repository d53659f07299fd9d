"""Word problems in text, from nothing: pretraining on a bad teacher, then RL.

Any recipe, by its name: change the line RECIPE. Its stages, its numbers of completions
of a prompt and of updates are taken over, and four times its number of prompts.

Paper:    Liu et al. 2025, "Dr. GRPO", arXiv:2503.20783; the recipe names its own.
Command:  python -m curax.train --config configs/text.py
w(p):     That of the recipe, whose updates per batch are kept too.
"""

from curax.config import Config, load
from curax.testbed import in_words

RECIPE = "dr_grpo"


def get_config() -> Config:
    return in_words(load(RECIPE))
