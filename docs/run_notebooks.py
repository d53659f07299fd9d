"""python docs/run_notebooks.py: run the notebooks, and store what they print and draw.

As Jupyter would: all code in one namespace, the text and then the figures of a cell.
Cells display nothing else, so they end in no value.
"""

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

NOTEBOOKS = sorted(Path(__file__).parent.glob("notebooks/*.ipynb"))


def outputs(path: Path) -> list[list[dict[str, Any]]]:
    """What each code cell of a notebook prints and draws, as notebooks store it."""
    names: dict[str, Any] = {"__name__": "notebook"}
    return [_outputs(one, path.name, names) for one in code(load(path))]


def _outputs(cell: Any, name: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile("".join(cell["source"]), f"{name}:{cell['id']}", "exec"), names)
    found: list[dict[str, Any]] = []
    if text := said.getvalue().splitlines(keepends=True):
        found.append({"name": "stdout", "output_type": "stream", "text": text})
    for number in plt.get_fignums():
        figure, drawn = plt.figure(number), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=80, metadata={"Software": None})
        data = {
            "image/png": base64.b64encode(drawn.getvalue()).decode() + "\n",
            "text/plain": [str(figure)],
        }
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return found


def load(path: Path) -> Any:
    """A notebook as it is stored."""
    return json.loads(path.read_text("utf-8"))


def code(notebook: Any) -> list[Any]:
    """The code cells of a notebook."""
    return [one for one in notebook["cells"] if one["cell_type"] == "code"]


def main() -> None:
    """Run all and store their outputs."""
    for path in NOTEBOOKS:
        notebook = load(path)
        pairs = zip(code(notebook), outputs(path), strict=True)
        for number, (cell, made) in enumerate(pairs, start=1):
            cell |= {"execution_count": number, "outputs": made}
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", "utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
