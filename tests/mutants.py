"""Change curax at random lines, one at a time, and see whether a test notices.

    python tests/mutants.py cover                        # which file of tests runs what
    python tests/mutants.py try --count 120 --seed 0     # which mutants are killed
    python tests/mutants.py compare BEFORE AFTER         # none that were now live

A mutant turns a comparison, moves a constant, flips a sign or drops a line. It is tried
in a copy of the tree, by the files of tests that cover its line, until one fails: the
file named after the module first, then the quickest. Both parts go on where they were
stopped, after `--minutes` at the latest, `--jobs` at a time; what they know is kept
under `--out`, in files of JSON. A file of tests that fails in a copy as it is says
nothing of mutants and is left out. With PYTEST_ADDOPTS='-m "not long"' it is the tests
of `make test` alone that are asked. Tests may be pruned where `compare` says that no
fewer mutants are killed.
"""

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COPIED = ("curax", "configs", "experiments", "benchmarks", "docs", "tests")
TURNED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
FLIPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


def mutated(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names of the mutations of a node, each with what stands in its place."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        new.ops[0] = TURNED[type(node.ops[0])]()
        yield "comparison turned", new
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        moved = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "constant moved", ast.Constant(moved)
    elif isinstance(node, ast.BinOp) and type(node.op) in FLIPPED:
        new.op = FLIPPED[type(node.op)]()
        yield "sign flipped", new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield "sign flipped", new.operand
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "line dropped", ast.Pass()


def mutants(path: Path) -> Iterator[dict[str, Any]]:
    """All mutants of a module: file, line, the bytes that change, and to what."""
    raw = path.read_bytes()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(raw)):
        for name, new in mutated(node):
            at: Any = node
            first = starts[at.lineno - 1] + at.col_offset
            last = starts[at.end_lineno - 1] + at.end_col_offset
            put = ast.unparse(new)
            yield {
                "file": str(path.relative_to(ROOT)),
                "line": at.lineno,
                "mutation": name,
                "bytes": (first, last),
                "was": raw[first:last].decode(),
                "is": put if isinstance(node, ast.stmt) else f"({put})",
            }


def text_of(mutant: dict[str, Any]) -> str:
    """The module with the mutant in it."""
    raw, (first, last) = (ROOT / mutant["file"]).read_bytes(), mutant["bytes"]
    return (raw[:first] + mutant["is"].encode() + raw[last:]).decode()


def chosen(count: int, seed: int, covered: dict[str, set[int]]) -> list[dict]:
    """`count` mutants, of lines taken at random among those that any test runs."""
    lines: dict[tuple[str, int], list[dict]] = {}
    for file in sorted(covered):
        for mutant in mutants(ROOT / file):
            if mutant["line"] in covered[file]:
                lines.setdefault((mutant["file"], mutant["line"]), []).append(mutant)
    chance = random.Random(seed)
    places = chance.sample(sorted(lines), min(count, len(lines)))
    return [chance.choice(lines[place]) for place in places]


def pytest(cwd: Path, file: str, *before: str, most: float | None = None) -> int | None:
    """Exit status of a file of tests, run in a tree; None: it took too long."""
    command = [sys.executable, *before, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": f"{cwd}:{cwd / 'tests'}"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        run = subprocess.run([*command, file], cwd=cwd, env=env, timeout=most, **quiet)
    except subprocess.TimeoutExpired:
        return None
    return run.returncode


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the tree, without its history."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        leave = shutil.ignore_patterns("__pycache__")
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=leave)
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, tree)
        yield tree


def each(jobs: int, until: float, call: Callable, items: Iterable) -> None:
    """Call for each item, `jobs` at a time, none after the time is over."""

    def in_time(item: Any) -> bool:
        if time.monotonic() > until:
            return False
        call(item)
        return True

    with ThreadPoolExecutor(jobs) as pool:
        if not all([*pool.map(in_time, items)]):
            print("Out of time; the same command goes on.")


def cover(out: Path, jobs: int, until: float) -> None:
    """Write which lines of curax each file of tests runs, its seconds and status."""
    from coverage import CoverageData

    records = out / "covered"
    records.mkdir(parents=True, exist_ok=True)

    def one(file: Path) -> None:
        began = time.monotonic()
        with copied_tree() as tree:
            kept = tree / "covered.data"
            args = ("-m", "coverage", "run", "--source=curax", f"--data-file={kept}")
            status = pytest(tree, f"tests/{file.name}", *args)
            data = CoverageData(str(kept))
            data.read()
            lines = {
                str(Path(name).relative_to(tree)): sorted(data.lines(name) or ())
                for name in data.measured_files()
            }
        seconds = round(time.monotonic() - began, 1)
        found = {"seconds": seconds, "status": status, "lines": lines}
        (records / f"{file.stem}.json").write_text(json.dumps(found))
        print(f"{file.stem}: {seconds} s, exit status {status}", flush=True)

    files = sorted((ROOT / "tests").glob("test_*.py"))
    left = [x for x in files if not (records / f"{x.stem}.json").exists()]
    each(jobs, until, one, left)


def attempt(mutant: dict, files: list[str], seconds: dict[str, float]) -> str | None:
    """The file of tests that notices the mutant, or is too slow; None: none does."""
    with copied_tree() as tree:
        (tree / mutant["file"]).write_text(text_of(mutant))
        for file in files:
            status = pytest(tree, f"tests/{file}.py", most=60 + 3 * seconds[file])
            if status != 0:
                return file if status else f"{file}, out of time"
    return None


def try_all(out: Path, count: int, seed: int, jobs: int, until: float) -> None:
    """Try mutants that were not tried yet, and write what became of each."""
    found = {
        path.stem: record
        for path in sorted((out / "covered").glob("*.json"))
        if not (record := json.loads(path.read_text()))["status"]
    }
    seconds = {file: record["seconds"] for file, record in found.items()}
    covered: dict[str, set[int]] = {}
    for record in found.values():
        for name, lines in record["lines"].items():
            covered.setdefault(name, set()).update(lines)
    results = out / f"mutants-{seed}.json"
    tried = json.loads(results.read_text()) if results.exists() else []
    writing = threading.Lock()
    before = {(row["file"], *row["bytes"]) for row in tried}

    def one(mutant: dict) -> None:
        module = f"test_{Path(mutant['file']).stem}"
        files = sorted(
            (
                file
                for file, record in found.items()
                if mutant["line"] in record["lines"].get(mutant["file"], ())
            ),
            key=lambda file: (file != module, seconds[file]),
        )
        by = attempt(mutant, files, seconds)
        with writing:
            tried.append({**mutant, "killed_by": by})
            results.write_text(json.dumps(tried, indent=1))
        place = f"{mutant['file']}:{mutant['line']}"
        print(f"{place} {mutant['mutation']}: {by or 'LIVES'}", flush=True)

    mutants = chosen(count, seed, covered)
    left = [x for x in mutants if (x["file"], *x["bytes"]) not in before]
    each(jobs, until, one, left)
    killed = sum(bool(row["killed_by"]) for row in tried)
    print(f"{killed} of {len(tried)} mutants are killed.")


def compare(before: Path, after: Path) -> int:
    """Print mutants that were killed and live now; status 1 where there are any."""

    def killed(path: Path) -> dict[tuple, bool]:
        rows = json.loads(path.read_text())
        key = ("file", "mutation", "was", "is")
        return {tuple(r[k] for k in key): bool(r["killed_by"]) for r in rows}

    old, new = killed(before), killed(after)
    lost = [key for key in old.keys() & new.keys() if old[key] and not new[key]]
    for file, mutation, was, put in sorted(lost):
        print(f"{file}: {mutation}, {was!r} to {put!r}: lives")
    both = len(old.keys() & new.keys())
    print(f"{len(lost)} of {both} mutants that both tried are no longer killed.")
    return int(bool(lost) or not both)


def main() -> int:
    """Cover, try or compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("cover", "try", "compare"))
    parser.add_argument("files", nargs="*", type=Path, help="of compare: two results")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--jobs", type=int, default=1, help="that run at once")
    parser.add_argument("--out", type=Path, default=ROOT / ".mutants", metavar="DIR")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    if args.action == "cover":
        cover(args.out, args.jobs, until)
    elif args.action == "try":
        try_all(args.out, args.count, args.seed, args.jobs, until)
    else:
        return compare(*args.files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
