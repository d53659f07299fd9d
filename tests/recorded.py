"""Record five steps of every recipe, so that a change of structure changes no number.

    python tests/recorded.py write
    python tests/recorded.py compare [NAME ...]

Each recipe runs shrunk as in `test_configs`, in every loop that can run it: `jitted`,
`staged` with the verifier on the device, and `host` with the same verifier in Python.
Recipes for files run `host` alone, on a tiny checkpoint, with plain groups, rounds,
refills, pilots, hints and reference answers. The record holds the metrics of each step
but times, a hash of each step's rollouts and one of the final parameters.

Results repeat bit for bit on one kind of machine and one version of JAX, which the
record names. Elsewhere write a record of the older commit with `--record FILE`, and
compare with that.
"""

import argparse
import gc
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  the flags and the strictness of the tests
import jax
import numpy as np
import real
import test_configs
import test_reflected

from curax.config import Config, load, override
from curax.step import build, loops
from curax.tasks import file_task

RECORD = Path(__file__).parent / "data" / "recorded.json"
STEPS = 5
SHOWN = {"logging.every": STEPS, "steps": STEPS, "logging.rollout_prompts": 16}
FILES = test_configs.ROOT / "configs" / "gsm8k_qwen3_0p6b.py"
ON_FILES = (
    *("dr_grpo", "dapo", "ada_seq_positive_exact", "gvm_grpo_published"),
    *("sage", "sage_light", "dro"),
)


def by_luck(target: Any, tokens: np.ndarray) -> float:
    """What the verifier of `test_configs` says, of one completion and in Python."""
    return float(tokens[0] % 2 == 0)


def lucky(prompt: str, completion: str, answer: Any) -> float:
    """A grader that a random policy satisfies now and then."""
    del prompt, answer
    return float(len(completion) % 3 == 0)


def on_host(make: Callable[[], Any]) -> Callable[[], Any]:
    """A task whose verifier is a Python function."""
    return lambda: replace(make(), verify=by_luck, on_device=False)


def runs() -> Iterator[tuple[str, Callable[[], tuple[Config, type[loops.Loop]]]]]:
    """Names of all runs, each with its config and its loop."""
    for path in test_configs.RECIPES:
        config = override(test_configs.shrunk(load(path)), SHOWN)
        host = replace(config, task=on_host(config.task))
        yield f"{path.stem}/jitted", partial(tuple, (config, loops.Jitted))
        yield f"{path.stem}/staged", partial(tuple, (config, loops.Staged))
        yield f"{path.stem}/host", partial(tuple, (host, loops.Staged))
    for path in test_configs.REFLECTIVE:
        for loop in (loops.Jitted, loops.Staged):
            kind = loop.__name__.lower()
            yield f"{path.stem}/{kind}", partial(reflective, path, loop)
    for name in ON_FILES:
        yield f"{FILES.stem}/{name}/host", partial(for_files, name)


def reflective(path: Path, loop: type[loops.Loop]):
    """A recipe without a verifier, as small as in its own tests."""
    config = replace(load(path), warm_start=None)
    looks = config.reflection and config.reflection.queries
    sizes = {
        name: value
        for name, value in (test_reflected.SMALL | SHOWN).items()
        if (looks or ".queries." not in name)
        and (path.stem == "dro" or not name.endswith("keep.level"))
    }
    return override(config, sizes), loop


def for_files(name: str):
    """A recipe on a checkpoint and on files."""
    checkpoint = {"model.path": str(real.checkpoint(small=True))}
    changes = SHOWN | test_configs.FILES_ON_DISK | test_configs.named() | checkpoint
    config = override(test_configs.with_recipe(FILES, name), changes)
    make = partial(config.task, grader=lucky)
    if config.reflection:
        config = override(config, {"sampling.max_tokens": 24})
        make = partial(thinking, **make.keywords)
    return replace(config, task=make), loops.Staged


@wraps(file_task.task)
def thinking(**options: Any):
    """The task, but one token ends a thought: a random policy has some."""
    return replace(file_task.task(**options), delimiter=(7,))


def digest(tree: Any) -> str:
    """A hash of all arrays of a tree, in order."""
    result = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        result.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return result.hexdigest()[:16]


def trained(config: Config, kind: type[loops.Loop]) -> dict[str, Any]:
    """What is recorded of a run."""
    built = build.build(config)
    loop = kind(built)
    try:
        with loop.context():
            state = loop.begin(loop.initial())
            state, rows, shown = loop.advance(state, STEPS)
    finally:
        getattr(built.task, "close", lambda: None)()
    return {
        "metrics": [
            {
                name: np.asarray(value).tolist()
                for name, value in sorted(row.items())
                if not name.startswith("time/")
            }
            for row in rows
        ],
        # Without versions, which say nothing of what was drawn.
        "rollouts": [digest(replace(some, version=None)) for some in shown],
        "params": digest(state.params),
    }


def machine() -> dict[str, str]:
    """On what a record repeats bit for bit."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.exists() else set()
    wide = [word for word in ("avx", "avx2", "avx512f", "amx_tile") if word in words]
    return {
        "processor": " ".join([platform.machine(), *wide]),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def differences(got: dict[str, Any], want: dict[str, Any]) -> Iterator[str]:
    """Where two records of a run differ; of each metric the first step that does."""
    if got["params"] != want["params"]:
        yield "other parameters in the end"
    pairs = enumerate(zip(got["rollouts"], want["rollouts"], strict=True), 1)
    if step := next((step for step, (a, b) in pairs if a != b), None):
        yield f"other rollouts from step {step} on"
    seen: set[str] = set()
    for step, rows in enumerate(zip(got["metrics"], want["metrics"], strict=True), 1):
        for name in sorted(set().union(*rows) - seen):
            a, b = (json.dumps(row.get(name, "absent")) for row in rows)
            if a != b:
                seen.add(name)
                yield f"{name} at step {step}: {a}, was {b}"


def main() -> int:
    """Write a record or compare with one; status 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("names", nargs="*", help="runs whose names begin so; all")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    args = parser.parse_args()
    old = json.loads(args.record.read_text()) if args.record.exists() else {"runs": {}}
    if args.action == "compare" and old.get("machine") != machine():
        print(f"Recorded on {old.get('machine')}, this is {machine()}: see --help.")
        return 2
    new, wrong = {}, 0
    for name, make in runs():
        if args.names and not name.startswith(tuple(args.names)):
            continue
        new[name] = json.loads(json.dumps(trained(*make())))
        jax.clear_caches()
        gc.collect()
        if args.action == "write":
            print(f"{name}: {new[name]['params']}", flush=True)
            continue
        if name not in old["runs"]:
            found = ["not in the record"]
        else:
            found = list(differences(new[name], old["runs"][name]))
        wrong += bool(found)
        print(f"{name}: {'; '.join(found[:5]) or 'the same'}", flush=True)
    if args.action == "write":
        kept = (old["runs"] if args.names else {}) | new
        args.record.parent.mkdir(exist_ok=True)
        rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in kept.items())
        text = f'{{"machine": {json.dumps(machine())},\n"runs": {{\n{rows}\n}}}}\n'
        args.record.write_text(text)
    else:
        print(f"{len(new) - wrong} of {len(new)} runs are the same, bit for bit.")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
