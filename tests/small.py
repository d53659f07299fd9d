"""The quickstart, shrunk: a config file for tests of whole runs."""

from pathlib import Path

from curax.config import Config, load, override

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.py"
SIZES = """
    task.depth=1 task.num_prompts=64 task.num_held_out=32
    model.width=16 model.layers=1 model.heads=2 model.kv_heads=1 model.head_dim=8
    model.mlp_width=16
    warm_start.steps=5 warm_start.rows=32
    warm_start.optimizer.learning_rate.peak=0.05
    warm_start.optimizer.learning_rate.warmup=1
    warm_start.optimizer.learning_rate.steps=5
    sampling.prompts=4 sampling.group_size=4 sampling.max_tokens=2 aggregate.length=2
    optimizer.learning_rate=0.01
    evaluation.every=3 evaluation.prompts=8 evaluation.samples=4
    logging.every=2 logging.checkpoint_every=2
    steps=6
"""


def get_config() -> Config:
    return override(load(QUICKSTART), SIZES.split())
