"""MATH with Qwen2.5-Math-1.5B, from a checkpoint and two files on disk.

Any recipe that has a verifier, by its name: change the line RECIPE. Its stages, its
numbers of completions and of updates are taken over, its task, model, optimizer and
lengths are not.

Paper:    Hendrycks et al. 2021, arXiv:2103.03874 (MATH); Yang et al. 2024,
          arXiv:2409.12122 (Qwen2.5-Math); Xiong et al. 2025, arXiv:2510.04996
          (Reinforce-Ada, whose smallest model this is); the recipe names its own.
Command:  python -m curax.train --config configs/math_qwen25_math_1p5b.py --set
          model.path=DIR task.train=train.jsonl task.held_out=math500.jsonl
w(p):     That of the recipe, whose updates per batch are kept too.
"""

from functools import partial

from curax.config import Config, load
from curax.tasks import file_task
from curax.testbed import from_checkpoint

RECIPE = "ada_seq_balanced_exact"


def get_config() -> Config:
    recipe = load(RECIPE)
    return from_checkpoint(
        recipe,
        path="models/Qwen2.5-Math-1.5B",
        max_tokens=2048,
        tokens_per_micro_batch=8192,
        task=partial(
            file_task.task,
            train="data/math/train.jsonl",
            held_out="data/math/math500.jsonl",
            system="Please reason step by step, and put your final answer within "
            "\\boxed{}.",
            max_prompt_tokens=1024,
            hints=bool(recipe.hint),
        ),
    )
