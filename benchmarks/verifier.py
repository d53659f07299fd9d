"""python -m benchmarks.verifier: how many completions are judged in a second.

First a mix as a run on GSM8K and MATH would ask for, in groups of eight completions of
a prompt: of the prompts 70 % have a number for an answer, 15 % a fraction or the like,
spelled in several ways, 10 % need algebra, and to 5 % no completion claims anything;
half of the claims are right. Then a flood of claims that are made to take for ever,
with honest ones among them.
"""

import argparse
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from curax.verify import answers, graders
from curax.verify.serve import Verdict
from curax.verify.workers import Check, Workers

GROUP = 8
WORDS = "so we take the sum of {} and $x_{{{}}}$, which gives us {} more; "
# Answer, right claims, wrong claims.
ALGEBRA: list[Callable[[int], tuple[str, list[str], list[str]]]] = [
    lambda n: (
        rf"x^2 + {2 * n}x + {n * n}",
        [rf"(x+{n})^2", rf"{n * n} + x^2 + {2 * n}x"],
        [rf"(x-{n})^2", rf"x^2+{n * n}"],
    ),
    lambda n: (
        rf"{n}\sqrt{{3}}",
        [rf"\sqrt{{{3 * n * n}}}", rf"\sqrt{{3}}\cdot {n}"],
        [rf"\sqrt{{{3 * n}}}", rf"{n}\sqrt{{2}}"],
    ),
    lambda n: (rf"\{{{n}, {n + 1}\}}", [rf"\{{{n + 1}, {n}\}}"], [rf"\{{{n}\}}"]),
    lambda n: (
        rf"\frac{{{n}\pi}}{{4}}",
        [rf"{n}\cdot\frac{{\pi}}{{4}}", rf"\frac{{\pi}}{{4}}\cdot {n}"],
        [rf"\frac{{{n}}}{{4}}", rf"\frac{{\pi}}{{{n}}}"],
    ),
    lambda n: (rf"[{n}, \infty)", [rf"\left[ {n},\infty \right)"], [rf"({n},\infty)"]),
]
# Claims that would take for ever, or more memory than there is.
HOSTILE: dict[str, Callable[[int], str]] = {
    "tower": lambda n: rf"9^{{9^{{9^{{{n}}}}}}}",
    "power": lambda n: rf"(x+1)^{{{5000 + n}}}",
    "factorial": lambda n: rf"({10**8 + n})!",
    "integral": lambda n: (
        rf"\int \frac{{\sqrt{{\tan x + \sin^{{{n}}} x}}}}{{x^7 + \log x}} dx"
    ),
    "sum": lambda n: rf"\sum_{{k=1}}^{{{10**7 + n}}} \frac{{1}}{{k^{{{n}}}}}",
    "900 braces": lambda n: "{" * 900 + str(n) + "}" * 900,
    "1 MB text": lambda n: f"{n} " * (10**6 // len(f"{n} ")),
    "10^6 digits": lambda n: str(n)[0] * 10**6,
    "10^5 open boxes": lambda n: r"\boxed{" * 10**5 + str(n),
}


def mix(count: int, seed: int = 0) -> list[tuple[Check, float]]:
    """Checks and what each is worth, shuffled as groups are not."""
    chance, checks = random.Random(seed), []
    while len(checks) < count:
        kind, n = chance.random(), chance.randint(2, 2000)
        if kind < 0.70:
            gold, right, wrong = f"{n}", [f"{n}", f"{n:,}", f"{n}.0"], [f"{n + 1}"]
        elif kind < 0.85:
            gold = rf"\frac{{{n}}}{{7}}"
            right = [rf"\dfrac{{{n}}}{{7}}", f"{n}/7", rf"\frac{{{2 * n}}}{{14}}"]
            wrong = [rf"\frac{{{n + 1}}}{{7}}", f"{n / 7:.2f}"]
            if n % 7 == 0:
                continue
        else:
            gold, right, wrong = chance.choice(ALGEBRA)(n)
        for _ in range(GROUP):
            worth = chance.random() < 0.5 and kind < 0.95
            steps = "".join(WORDS.format(n, *chance.choices(range(99), k=2)) * 20)
            claim = rf"\boxed{{{chance.choice(right if worth else wrong)}}}"
            said = f"{steps} {chance.random()} {claim if kind < 0.95 else ''}."
            checks.append(((f"What is {gold}?", said, gold), float(worth)))
    return checks[:count]


def measure(count: int, repeats: int, deadline: float) -> dict[str, Any]:
    """Checks per second of the fast path, of math-verify, and of two workers."""
    asked = mix(count)
    checks, worth = [check for check, _ in asked], [worth for _, worth in asked]
    few = asked[:: max(1, count // 400)]
    points: dict[str, Any] = {}

    def fast() -> list[Any]:
        claims = [(gold, answers.final_answer(said)) for _, said, gold in checks]
        return [claim and answers.same(gold, claim) for gold, claim in claims]

    def alone() -> list[float]:
        from math_verify import parse, verify

        pairs = [(rf"\boxed{{{gold}}}", said) for (_, said, gold), _ in few]
        return [float(verify(parse(gold), parse(said))) for gold, said in pairs]

    told, points["fast path, one process"] = timed(fast, count, repeats)
    undecided = sum(verdict is None for verdict in told)
    alone()
    said, points["math-verify, one process"] = timed(alone, len(few), 1)
    print(f"of {count} checks the fast path left {undecided} to math-verify, or had no")
    print(f"claim; math-verify alone judged {_agree(said, [w for _, w in few])} right")
    with Workers(graders.mathematics, count=2, deadline=deadline) as workers:
        workers.start()
        verdicts, points["two workers, first time"] = timed(
            lambda: workers.grade(checks), count, 1
        )
        _, points["two workers, again"] = timed(
            lambda: workers.grade(checks), count, repeats
        )
    print(f"the workers judged {_agree(verdicts, worth)} right")
    return points


def flood(honest: int, each: int, deadline: float) -> dict[str, Any]:
    """How the workers fare where most of what takes time is hostile."""
    asked = [("honest", check, worth) for check, worth in mix(honest, seed=1)]
    for kind, claim in HOSTILE.items():
        asked += [
            (kind, ("", rf"so \boxed{{{claim(n)}}}", "7"), 0.0)
            for n in range(9, 9 + each)
        ]
    random.Random(0).shuffle(asked)
    with Workers(graders.mathematics, count=2, deadline=deadline) as workers:
        workers.start()
        start = time.perf_counter()
        verdicts = workers.grade([check for _, check, _ in asked])
        seconds = time.perf_counter() - start
    found: dict[str, Counter[str]] = {}
    for (kind, _, worth), verdict in zip(asked, verdicts, strict=True):
        right = "right" if verdict == worth else "wrong"
        said = verdict.partition(":")[0] if isinstance(verdict, str) else right
        found.setdefault(kind, Counter())[said] += 1
    return {"seconds": seconds, "checks": len(asked), "found": found}


def timed(
    function: Callable[[], list[Any]], count: int, repeats: int
) -> tuple[list[Any], dict[str, Any]]:
    """What a function returned, and checks per second, the best of a few repeats."""
    load, results = machine.Load(os.getpid()), []
    seconds = machine.repeated(lambda: results.append(function()), repeats)
    rate = {"per_second": count / min(seconds), "all_seconds": seconds}
    return results[-1], rate | load.told()


def _agree(verdicts: Sequence[Verdict], worth: Sequence[float]) -> str:
    right = sum(a == b for a, b in zip(verdicts, worth, strict=True))
    return f"{right} of {len(verdicts)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verifier", description="Measure the verifiers."
    )
    add = parser.add_argument
    add("--checks", type=int, default=16000, help="(default: %(default)s)")
    add("--repeats", type=int, default=3, help="(default: %(default)s)")
    add("--deadline", type=float, default=5.0, help="seconds (default: %(default)s)")
    add("--hostile", type=int, default=5, help="of each kind (default: %(default)s)")
    add("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    args = parser.parse_args(argv)
    results = machine.about(
        "python -m benchmarks.verifier "
        f"--checks {args.checks} --repeats {args.repeats} --hostile {args.hostile}"
    )
    results["points"] = measure(args.checks, args.repeats, args.deadline)
    for name, found in results["points"].items():
        mark = "  disturbed" if found["disturbed"] else ""
        print(f"{name:28s}{found['per_second']:9.0f} checks/s{mark}", flush=True)
    results["flood"] = flood(200, args.hostile, args.deadline)
    kinds = results["flood"]["found"]
    print(f"flood: {results['flood']['checks']} in {results['flood']['seconds']:.1f} s")
    for kind, found in kinds.items():
        told = ", ".join(f"{count} {said}" for said, count in found.items())
        print(f"  {kind:26s}{told}")
    print(f"load average {os.getloadavg()[0]:.1f}")
    machine.write(args.out / "verifier.json", results)


if __name__ == "__main__":
    main()
