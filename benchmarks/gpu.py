"""python -m benchmarks.gpu: Qwen3 shapes in bfloat16 on an NVIDIA GPU, beside trl.

Each shape and each system is measured in a process of its own, one after another:
tokens decoded and trained in a second, shares of the bandwidth and of the peak that
the same process measured, and memory. trl is measured where its environment is there
(`python -m benchmarks.peers --setup`, with a build of torch for GPUs).
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import machine, peers
from benchmarks.qwen3 import SMALL
from benchmarks.show import of_real
from benchmarks.workload import QWEN3
from curax.settings.packages import install

RESULTS = Path(__file__).parent / "results" / "gpu.json"
# Options of benchmarks.qwen3.
SIZES = {"prompts": 32, "group_size": 16, "prompt_tokens": 256, "max_tokens": 512}
CHUNK = 2048  # tokens whose logits exist at a time: 512 take 4 % longer to update
SHRUNKEN = {"prompts": 2, "group_size": 2, "prompt_tokens": 4, "max_tokens": 4}


def missing() -> str | None:
    """What is missing to measure a GPU; None: nothing."""
    # In a process of its own, which gives the memory of the GPU back.
    ask = "import jax; print(jax.default_backend())"
    done = subprocess.run(
        (sys.executable, "-c", ask), stdout=subprocess.PIPE, text=True
    )
    kind = done.stdout.strip()
    if kind == "gpu":
        return None
    return (
        f"JAX finds no NVIDIA GPU here, its devices are of kind {kind or 'none'}: run "
        f"{install('cuda')} on a machine with one, or try the command with "
        "--shrunken."
    )


def curax(size: str, how: argparse.Namespace) -> dict[str, Any]:
    """What `benchmarks.qwen3` measures, in a process of its own.

    Raises:
        peers.FailedError: it failed.
    """
    sizes = SHRUNKEN if how.shrunken else SIZES
    words = [f"--size={size}", "--dtype=bfloat16", f"--steps={how.steps}"]
    words += [f"--token-chunk={CHUNK}"]
    words += [f"--{name.replace('_', '-')}={n}" for name, n in sizes.items()]
    if how.shrunken:
        words += ["--shrunken", "--layers=1", "--micro-batches=1"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = (sys.executable, "-m", "benchmarks.qwen3", *words, f"--out={file}")
        done = subprocess.run(command, cwd=machine.ROOT, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise peers.FailedError(f"curax ended with status {done.returncode}.")
        (point,) = json.loads(file.read_text())["points"]
    return {"system": "curax"} | point


def trl(size: str, how: argparse.Namespace) -> dict[str, Any]:
    """The same work for trl, which says less.

    Raises:
        peers.FailedError: it is not there, or failed.
    """
    if not Path(how.trl).exists():
        raise peers.FailedError(
            "trl is not measured: there is no environment of it; "
            "python -m benchmarks.peers --setup makes one."
        )
    sizes = SHRUNKEN if how.shrunken else SIZES
    work = QWEN3[size](**sizes, slots=sizes["prompts"] * sizes["group_size"])  # pyright: ignore[reportArgumentType]
    if how.shrunken:
        work = replace(work, **SMALL)
    tokens = work.rows * work.max_tokens
    process = peers.Process(
        "trl", str(how.trl), json.dumps(asdict(work)), how.limit, platforms=None
    )
    try:
        first, *rest = [process.iterate() for _ in range(1 + how.steps)]
    finally:
        process.stop()
    rollout, update = (
        statistics.median(one[name] for one in rest)
        for name in ("rollout_s", "update_s")
    )
    return {
        "system": "trl",
        "size": size,
        "dtype": "bfloat16",
        "rollout_s": rollout,
        "update_s": update,
        "first_s": first["iteration_s"],
        "generated_tokens_per_s": tokens / rollout,
        "trained_tokens_per_s": tokens / update,
        "peak_mib": rest[-1]["peak_rss_mib"],
        "parameters": work.parameters,
        "disturbed": any(one["disturbed"] for one in rest),
        **sizes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write; exit status, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    python = peers.ENVIRONMENTS / "trl" / "bin" / "python"
    some = f"some of {', '.join(QWEN3)}; default: %(default)s"
    add("--sizes", default="qwen3-0.6b,qwen3-1.7b", help=some)
    add("--steps", type=int, default=3, help="measured, after one that compiles")
    add("--shrunken", action="store_true", help="tiny shapes, on any device: a try")
    add("--trl", type=Path, default=python, metavar="PYTHON", help="of trl")
    add("--limit", type=float, default=1800, help="seconds per iteration, at most")
    add("--out", type=Path, default=RESULTS, help="file")
    argv = sys.argv[1:] if argv is None else argv
    how = parser.parse_args(argv)
    if not how.shrunken and (why := missing()):
        print(why, file=sys.stderr)
        return 2
    points, notes = [], []
    for size in how.sizes.split(","):
        for system in (curax, trl):
            try:
                points.append(system(size, how))
            except peers.FailedError as failure:
                notes.append(f"{size}: {failure}")
                print(notes[-1], file=sys.stderr, flush=True)
    found = machine.about(shlex.join(["python", "-m", "benchmarks.gpu", *argv]))
    found |= {"points": points, "notes": notes}
    machine.write(how.out, found)
    print(of_real(found))
    return 0 if points else 1


if __name__ == "__main__":
    sys.exit(main())
