"""Benchmarks by name: layout, prompt and sampling behind published figures.

No problems are shipped: files are those of the user. The prompt of a checkpoint is
`layouts.STEP_BY_STEP`, an instruction behind the question as in the released code of
arXiv:2504.11343; a run keeps the prompt it was trained with. Only the standard library
is imported.
"""

from typing import NamedTuple

PODS = "PODS, arXiv:2504.13818: 5 completions at temperature 0.9"
ADA = "Reinforce-Ada, arXiv:2510.04996: avg@32 at temperature 1 in 4096 tokens"


class Benchmark(NamedTuple):
    """A set of problems and the protocol of a paper that reports on it."""

    problems: int  # of the published set
    layout: str  # MODULE:FUNCTION, record to problem
    source: str  # whose protocol it is
    n: int = 32  # completions per problem
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 4096


BENCHMARKS = {
    "gsm8k": Benchmark(
        1319,
        "curax.tasks.layouts:gsm8k",
        PODS,
        n=5,
        temperature=0.9,
        max_tokens=512,  # as the paper trains; of its evaluation it says nothing
    ),
    "math500": Benchmark(500, "curax.tasks.layouts:math", ADA),
    "aime24": Benchmark(30, "curax.tasks.layouts:aime", ADA),
    "aime25": Benchmark(30, "curax.tasks.layouts:aime", ADA),
    "amc23": Benchmark(40, "curax.tasks.layouts:contest", ADA),
    "minerva": Benchmark(272, "curax.tasks.layouts:contest", ADA),
    "olympiad": Benchmark(675, "curax.tasks.layouts:olympiad", ADA),
}
PROTOCOL = ("layout", "n", "temperature", "top_p", "top_k", "max_tokens")
FEWER = {"olympiad": 674}  # size of another published copy of the set


def remarks(name: str, problems: int, changed: dict[str, object]) -> list[str]:
    """Sentences on the protocol of a benchmark, and on deviations from it.

    Args:
        name: of the benchmark.
        problems: number of problems of the file.
        changed: options of the protocol with other values, by name.
    """
    known = BENCHMARKS[name]
    lines = [f"{name}: {known.source}."]
    if changed:
        others = ", ".join(f"{key}={value}" for key, value in changed.items())
        lines[0] = f"{lines[0][:-1]}; here {others}."
    if problems not in (known.problems, FEWER.get(name)):
        lines.append(
            f"Warning: {name} has {known.problems} problems, and {problems} were "
            "asked: the figures are not those of the benchmark."
        )
    return lines
