"""GSM8K with Qwen3-0.6B, from a checkpoint and two files on disk.

Any recipe, by its name: change the line RECIPE. Its stages, its numbers of completions
and of updates are taken over, its task, model, optimizer and lengths are not.

Paper:    Cobbe et al. 2021, arXiv:2110.14168 (GSM8K); Yang et al. 2025,
          arXiv:2505.09388 (Qwen3); the recipe names its own.
Command:  python -m curax.train --config configs/gsm8k_qwen3_0p6b.py --set
          model.path=DIR task.train=train.jsonl task.held_out=test.jsonl
w(p):     That of the recipe, whose updates per batch are kept too.
"""

from functools import partial

from curax.config import Config, load
from curax.tasks import file_task, layouts
from curax.testbed import from_checkpoint

RECIPE = "dr_grpo"


def get_config() -> Config:
    recipe = load(RECIPE)
    return from_checkpoint(
        recipe,
        path="models/Qwen3-0.6B",
        max_tokens=512,
        tokens_per_micro_batch=4096,
        task=partial(
            file_task.task,
            train="data/gsm8k/train.jsonl",
            held_out="data/gsm8k/test.jsonl",
            layout=layouts.gsm8k,
            template=layouts.STEP_BY_STEP,
            thinking=bool(recipe.reflection),
            max_prompt_tokens=256,
            hints=bool(recipe.hint),
            reference="{answer}" if recipe.reflection else None,
            delimiter="</think>" if recipe.reflection else "",
        ),
    )
