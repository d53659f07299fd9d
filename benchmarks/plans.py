"""python -m benchmarks.plans: what RL of Qwen3 policies takes on slices of TPUs.

One table, of estimates from shapes and, where --compile names them, of what the TPU
compiler says. No TPU is needed, nor a checkpoint: the sizes of the models are those of
their published config.json.
"""

import argparse
import datetime
import functools
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curax.settings.tables import markdown

MODELS = {  # hidden_size, layers, heads, intermediate_size, tied
    "Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 6144, True),
    "Qwen3-8B": (4096, 36, 32, 12288, False),
    "Qwen3-32B": (5120, 64, 64, 25600, False),
}
SLICES = ("v5e:2x2", "v5e:4x4", "v6e:4x4", "v5p:2x2x1", "v5p:4x4x4")
SETTINGS = (  # of configs/gsm8k_qwen3_0p6b.py
    "sampling.prompts=128",
    "sampling.group_size=8",
    "sampling.max_tokens=2048",
    "sampling.slots=256",
    "task.max_prompt_tokens=512",
    "update.minibatches=1",
    "update.length_buckets=1",
)
ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "plans.json"
PAGE = ROOT / "docs" / "plan.md"
BEGIN, END = "<!-- table: python -m benchmarks.plans -->", "<!-- end of the table -->"


def config_json(name: str) -> dict[str, Any]:
    """The published config.json of a model, as far as it is read."""
    width, layers, heads, inner, tied = MODELS[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": inner,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }


@functools.cache
def traced(model: str, settings: tuple[str, ...] = SETTINGS) -> Any:
    """The run of a model as shapes; one of `MODELS`, or a folder with config.json."""
    from curax.config import load, override
    from curax.planning import planner

    with tempfile.TemporaryDirectory() as folder:
        if model in MODELS:
            (Path(folder) / "config.json").write_text(json.dumps(config_json(model)))
        else:
            folder = model
        config = load(ROOT / "configs" / "gsm8k_qwen3_0p6b.py")
        config = override(config, [f"model.path={folder}", *settings])
        return planner.traced(config)


def planned(model: str, place: str, *, compiles: bool, quick: bool) -> dict[str, Any]:
    """The JSON page of one plan, with as many meshes as are compiled at most."""
    from curax.planning import chips, planner, table

    on = chips.topology(place)
    found = planner.plan(traced(model), on, auto=True, compiles=compiles, quick=quick)
    page = table.page(found)
    return {
        "model": model,
        "quick": quick,
        "date": f"{datetime.date.today():%Y-%m-%d}",
        **page,
        "layouts": page["layouts"][: planner.COMPILED],
    }


def row(page: dict[str, Any]) -> list[str]:
    """Cells of the first layout of a plan, compiled if it was."""
    layouts = page["layouts"]
    one = next((x for x in layouts if x["mesh"] == page["best"]), layouts[0])
    verdict = {True: "fits", None: "may fit", False: "too large"}[one["fits"]]
    cells = [page["model"], page["topology"]]
    cells.append(" x ".join(str(size) for size in one["mesh"].values()))
    estimated = [one["total"][role] / 2**30 for role in ("draw", "learn")]
    cells += [f"{size:.3g}" for size in estimated]
    cells += [verdict, f"{one['seconds']:.3g}", *compiled(page, one["mesh"])]
    return cells


def compiled(page: dict[str, Any], mesh: Any) -> list[str]:
    """Cells of the compiled programs of a mesh; empty where there are none."""
    found = [each for each in page["compiled"] if each["mesh"] == mesh]
    if not found:
        return [""] * 4
    programs = {one["role"]: one for one in found[0]["programs"]}
    cells = []
    for role in ("draw", "learn"):
        total = programs[role]["total"]
        beyond = ", too large" if programs[role]["fits"] is False else ""
        cells.append("refused" if total is None else f"{total / 2**30:.3g}{beyond}")
    turn = programs["draw"]["compiled"]["traffic"]["turn"]["received"]
    drew = programs["draw"]["total"] is not None
    cells.append(f"{sum(turn.values()) / 2**20:.3g}" if drew else "")
    took = sum(one["compiled"]["compile_s"] for one in programs.values())
    return [*cells, f"{math.ceil(took)}{' (quick)' if page['quick'] else ''}"]


def table(pages: list[dict[str, Any]]) -> str:
    """The table of all plans in Markdown."""
    head = ["model", "slice", "data x fsdp x tensor", "draw, GiB", "learn, GiB"]
    head += ["estimate", "step at least, s", "compiled: draw, GiB", "learn, GiB"]
    return markdown([*head, "MiB per token", "s"], map(row, pages))


def write(pages: list[dict[str, Any]]) -> None:
    """Write results, and the table into its page."""
    RESULTS.write_text(json.dumps(pages, indent=1) + "\n")
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(pages)}\n{END}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0. Plans among the results are kept unless they are compiled."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans")
    parser.add_argument(
        "--compile",
        nargs="*",
        default=[],
        metavar="MODEL@SLICE",
        help="plans that are compiled too, as Qwen3-8B@v5p:4x4x4; needs libtpu",
    )
    parser.add_argument("--quick", action="store_true", help="as of curax plan")
    args = parser.parse_args(argv)
    from curax.commands import plan
    from curax.planning import chips

    plan.prepare(chips.topology(SLICES[0]))
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {(page["model"], page["topology"]): page for page in kept}
    every = [(model, place) for model in MODELS for place in SLICES]
    for model in MODELS:
        for place in SLICES:
            compiles = f"{model}@{place}" in args.compile
            if compiles or (model, place) not in known:
                page = planned(model, place, compiles=compiles, quick=args.quick)
                known[model, place] = page
            print(row(known[model, place]), flush=True)
            write([known[key] for key in every if key in known])
    return 0


if __name__ == "__main__":
    sys.exit(main())
