"""curax demo DIR: a tiny model, problems for it and a config, to try the commands on.

The model has random weights and the form of a checkpoint of Hugging Face. The problems
are word problems with worked solutions, half of them wrong by one: what imitates these
solves about half, and RL can teach it better.
"""

import json
import os
import random
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from curax.config import ConfigError
from curax.models import families, transformer
from curax.models.export import write_new
from curax.settings.cli import Parser, command_line, program, written_to
from curax.settings.packages import missing
from curax.tasks import byte_pairs, text, word_problems

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve")
THINGS = ("apples", "books", "coins", "dice")
KINDS = (("buys", "more", "+", 1), ("gives", "away", "-", -1))
WRONG = 0.5  # of the teacher's solutions
TRAIN, HELD_OUT, SHOP = 1000, 100, 400  # problems in the files
WORDS = 400  # ids of the tokenizer
TEXT = {"train": 2000, "test": 200, "forms": 200, "numbers": 200}  # with --text
TEXT_SEED = 10**9  # of its first problem: the recipe's are far below
SIZES: dict[str, Any] = {
    "layers": 1,
    "heads": 4,
    "kv_heads": 2,
    "width": 64,
    "mlp_width": 128,
}

HEAD_DIM = 16

CONFIG = '''\
"""Word problems with a tiny model: a warm start on worked solutions, then RL.

Any recipe, by its name: change the line RECIPE. Its stages, its numbers of completions
and of updates are taken over, its task, model, optimizer and lengths are not.

Command:  curax train words.py
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import optax

from curax import update
from curax.config import Config, Evaluation, Logging, WarmStart
from curax.config import load, transferred
from curax.models import pretrained
from curax.tasks import file_task

HERE = Path(__file__).resolve().parent
RECIPE = "dr_grpo"  # any that curax recipes lists
RATE = partial(update.warmup_cosine, peak=8e-3, warmup=10, steps=150, end=3e-4)


def get_config() -> Config:
    recipe = load(RECIPE)
    return transferred(
        recipe,
        max_tokens=16,
        task=partial(
            file_task.task,
            train=str(HERE / "train.jsonl"),
            held_out=str(HERE / "test.jsonl"),
            max_prompt_tokens=64,
            max_trace_tokens=16,
            hints=bool(recipe.hint),
            reference="{answer}" if recipe.reflection else None,
            delimiter="####" if recipe.reflection else "",
        ),
        model=partial(
            pretrained.model,
            path=str(HERE / "model"),
            scan_layers=False,
            dtype="float32",
        ),
        warm_start=WarmStart(
            steps=150,
            rows=64,
            micro_batches=2,
            optimizer=partial(optax.adamw, learning_rate=RATE),
        ),
        optimizer=partial(optax.adam, learning_rate=4e-4, b2=0.99),
        update=replace(recipe.update, tokens_per_micro_batch=0, token_chunk=128),
        evaluation=Evaluation(every=50, prompts=64, samples=4),
        logging=Logging(every=1, checkpoint_every=20),
        steps=200,
    )
'''


def parser() -> Parser:
    """Argument parser of `curax demo`."""
    result = Parser(
        "demo",
        description="Write a tiny model, problems for it and a config, to try the "
        "commands on.",
        epilog="The folder appears under its name when it is whole.",
    )
    result.add_argument("out", metavar="DIR", help="folder that does not exist yet")
    result.add_argument(
        "--text",
        action="store_true",
        help="problems alone, others of those that the recipe text makes",
    )
    return result


@command_line("curax.demo")
def main(argv: list[str]) -> int:
    """Exit status: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    out = Path(args.out)
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists already; name a new folder.")
    try:
        with written_to(out, "a folder that can"):
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".demo.", dir=out.parent) as hidden:
                (write_text if args.text else write)(made := Path(hidden) / "demo")
                os.rename(made, out)
    except ImportError as error:
        raise ConfigError(missing(error) or f"{error}.") from error
    sizes = TEXT if args.text else {"train": TRAIN, "test": HELD_OUT, "shop": SHOP}
    files = ", ".join(f"{name}.jsonl ({count})" for name, count in sizes.items())
    if args.text:
        print(f"Written: {out} with {files}")
        return 0
    print(f"Written: {out} with model, {files} and words.py")
    print(f"Go on with: {program('train')} {shlex.quote(str(out / 'words.py'))}")
    return 0


def write(folder: Path) -> None:
    """Write the model, files of problems and a config into a new folder.

    Args:
        folder: does not exist yet.

    Raises:
        ImportError: `tokenizers` is not installed.
        OSError: something cannot be written.
    """
    spoken = write_problems(folder)
    write_model(folder / "model", spoken)
    shutil.rmtree(spoken.path)


def write_text(folder: Path) -> None:
    """Write files of the word problems of `curax train text` into a new folder.

    Those of `forms` and `numbers` have sentences, or a number or more, that no training
    problem has.

    Args:
        folder: does not exist yet.

    Raises:
        OSError: something cannot be written.
    """
    folder.mkdir(parents=True)
    seed = TEXT_SEED
    for name, count in TEXT.items():
        unseen = name if name in word_problems.UNSEEN else None
        made = word_problems.records(count, seed=seed, unseen=unseen)
        write_lines(folder / f"{name}.jsonl", made)
        seed += count


def write_model(
    folder: Path,
    spoken: text.Tokenizer,
    architecture: str = "Qwen3ForCausalLM",
    **options: Any,
) -> None:
    """Write a random model with a tokenizer into a new folder.

    Args:
        folder: does not exist yet.
        spoken: the tokenizer, whose files are copied.
        architecture: of `families.FAMILIES`.
        **options: of `transformer.model`, in place of the sizes of the demo's model.
    """
    family = families.FAMILIES[architecture]
    model = transformer.model(
        vocab_size=-(-spoken.size // 64) * 64,  # more than words, as real ones have
        head_dim=HEAD_DIM,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        scan_layers=True,  # drawn the same, and quicker to compile
        **(SIZES | options),
    )
    params = jax.jit(model.init)(jax.random.key(0))
    write_new(folder, params, head_dim=HEAD_DIM, rope_theta=1e4, norm_eps=1e-6)
    shutil.copytree(spoken.path, folder, dirs_exist_ok=True)


def write_problems(folder: Path) -> text.Tokenizer:
    """Write files of problems, a config, and a tokenizer of their words in `tokenizer`.

    Args:
        folder: does not exist yet, or holds none of them.

    Returns:
        The tokenizer.

    Raises:
        ImportError: `tokenizers` is not installed.
        OSError: something cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = list(problems(TRAIN + HELD_OUT))
    spoken = [f"{one['question']}\n{one['solution']}" for one in made]
    shop = enumerate(problems(SHOP, wrong=0.0))
    write_lines(folder / "train.jsonl", made[:TRAIN])
    write_lines(folder / "test.jsonl", made[TRAIN:])
    write_lines(folder / "shop.jsonl", (of_shop(i, one) for i, one in shop))
    (folder / "words.py").write_text(CONFIG, "utf-8")
    return byte_pairs.tokenizer(folder / "tokenizer", spoken, vocab_size=WORDS)


def problems(
    count: int, *, seed: int = 0, wrong: float = WRONG
) -> Iterator[dict[str, str]]:
    """Word problems, all different: question, answer, worked solution and level.

    Args:
        count: how many, at most 1140.
        seed: of their order and of the mistakes.
        wrong: share of the solutions that are one too high; answers are right.
    """
    asked = [
        (name, thing, kind, a, b)
        for name in NAMES
        for thing in THINGS
        for kind in KINDS
        for a in range(1, 7)
        for b in range(1, 7)
        if kind[3] > 0 or a >= b
    ]
    made = random.Random(seed)
    for name, thing, (verb, word, sign, factor), a, b in made.sample(asked, count):
        answer = a + factor * b
        said = answer + (made.random() < wrong)
        yield {
            "question": f"{name} has {a} {thing} and {verb} {b} {word}. "
            f"How many {thing} does {name} have now?",
            "answer": str(answer),
            "solution": f"{a} {sign} {b} = {said}\n#### {said}",
            "level": "add" if factor > 0 else "subtract",
        }


def of_shop(number: int, problem: Mapping[str, str]) -> dict[str, Any]:
    """A problem in a layout that is none of the published ones."""
    return {
        "id": number,
        "problem": {"text": problem["question"]},
        "final": problem["answer"],
        "worked": problem["solution"],
        "grade": problem["level"],
    }


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write a file of JSON lines; its path is returned."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
