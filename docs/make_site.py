"""python docs/make_site.py: lays out what mkdocs builds; --check: tests the links.

Pages stay as they are read in the repository. Here they are copied to build/site/pages,
their links to code turned into links to API and recipe pages, which are made from the
code; `make site` does all of it. Only the standard library is imported.
"""

import ast
import base64
import json
import math
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
PAGES, HTML = ROOT / "build/site/pages", ROOT / "build/site/html"
FENCE = re.compile(r"^ *(```|~~~)")
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
WIDTH, HEIGHT, EDGE = 260, 160, 28  # of a picture, pixels
REACH = 4  # powers of two that a picture shows above and below w(.5)


def pages() -> list[Path]:
    """Markdown files that the site has."""
    folders = ("*.md", "docs/*.md", "experiments/*/README.md", "benchmarks/README.md")
    return sorted(path for folder in folders for path in ROOT.glob(folder))


def place(path: Path) -> str:
    """Where a file or folder of the repository is found on the site.

    Raises:
        ValueError: a folder without a page.
    """
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    if name.startswith("configs/") and path.suffix == ".py":
        return f"recipes/{path.stem}.md"
    if name.startswith("curax/") and (path.suffix == ".py" or path.is_dir()):
        return f"api/{module(path)}.md"
    if path.suffix == ".ipynb":
        return path.relative_to(ROOT).with_suffix(".md").as_posix()
    if path.is_dir():
        raise ValueError(f"{name} is a folder without a page")
    return name


def module(path: Path) -> str:
    """Dotted name of a file or package of curax."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def with_links(text: str, source: Path) -> tuple[str, set[Path]]:
    """A page with its links as they are on the site, and the files they lead to.

    Raises:
        ValueError: a link leads nowhere.
    """
    here, linked = posixpath.dirname(place(source)), set[Path]()

    def moved(found: re.Match[str]) -> str:
        link, mark, anchor = found[1].partition("#")
        if "://" in link or not link or link.startswith("mailto:"):
            return found[1]
        path = Path(os.path.normpath(source.parent / unquote(link)))
        if not path.exists():
            raise ValueError(f"{source}: {link} leads nowhere")
        linked.add(path)
        return posixpath.relpath(place(path), here) + mark + anchor

    lines, code = [], False
    for line in text.splitlines():
        code ^= bool(FENCE.match(line))
        lines.append(line if code else LINK.sub(moved, line))
    return "\n".join(lines) + "\n", linked


def write(name: str, text: str) -> None:
    """Write a file of the site's pages."""
    path = PAGES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def lay_out() -> None:
    """Make all pages anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    linked = set[Path]()
    for source in pages():
        text, found = with_links(source.read_text(), source)
        write(place(source), text)
        linked |= found
    for path in linked - set(pages()):
        if path.is_file() and place(path) == path.relative_to(ROOT).as_posix():
            (PAGES / place(path)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, PAGES / place(path))
    notebooks()
    api()
    recipes()


def notebooks() -> None:
    """A page per notebook, its text, its code and what that gave, and the notebook."""
    for path in sorted(ROOT.glob("docs/notebooks/*.ipynb")):
        parts = [
            part
            for cell in json.loads(path.read_text())["cells"]
            for part in cell_parts(cell, path.stem, Path(place(path)).parent)
        ]
        page, _ = with_links("\n\n".join(parts), path)
        note = f"\nAs a notebook: [{path.name}]({path.name}).\n"
        write(place(path), page.replace("\n", f"\n{note}", 1))
        shutil.copy(path, (PAGES / place(path)).parent)


def cell_parts(cell: Any, name: str, folder: Path) -> Iterator[str]:
    """Markdown of a cell; pictures are written into a folder of the pages."""
    text = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield text
        return
    yield f"```python\n{text}\n```"
    for number, output in enumerate(cell["outputs"]):
        if "text" in output:
            yield f"```text\n{''.join(output['text'])}```"
        else:
            file = f"{name}-{cell['id']}-{number}.png"
            (PAGES / folder).mkdir(parents=True, exist_ok=True)
            data = base64.b64decode(output["data"]["image/png"])
            (PAGES / folder / file).write_bytes(data)
            yield f'<img alt="what the cell draws" src="{file}"/>'


def api() -> None:
    """A page per module, from its docstrings, and one that lists them."""
    lines = ["# API", "", "| module | |", "|---|---|"]
    for path in sorted((ROOT / "curax").rglob("*.py")):
        if path.stem == "__main__":
            continue
        name, doc = module(path), ast.get_docstring(ast.parse(path.read_text())) or ""
        first = " ".join(doc.partition("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| [{name}]({name}.md) | {first} |")
        write(f"api/{name}.md", f"# {name}\n\n::: {name}\n")
    write("api/index.md", "\n".join(lines) + "\n")


def recipes() -> None:
    """A page per recipe with its picture, and one that shows all pictures."""
    known = weights((ROOT / "docs/recipes.md").read_text())
    lines = [
        "# Pictures of w(p)\n",
        "How much a prompt with pass rate p weighs, over one with p = .5, by the",
        "x-ray, at the pass rates of [the table](docs/recipes.md); dotted: p itself.",
        f"What is beyond {2**REACH}x or below 1/{2**REACH}x is drawn there.\n",
    ]
    for path in sorted((ROOT / "configs").glob("*.py")):
        name, text = path.stem, path.read_text()
        doc = ast.get_docstring(ast.parse(text)) or ""
        page = [f"# {name}\n"]
        if name in known:
            write(f"pictures/{name}.svg", picture(name, known[name]))
            page.append(f"![w(p) of {name}](../pictures/{name}.svg)\n")
            shown = f"[![{name}](pictures/{name}.svg)](recipes/{name}.md)"
            lines.append(shown)
        page += ["```text", doc, "```\n", f"`configs/{name}.py`:\n", "```python"]
        page += [text.partition('"""\n\n')[2].rstrip(), "```"]
        write(f"recipes/{name}.md", "\n".join(page) + "\n")
    write("gallery.md", "\n".join(lines) + "\n")


def weights(table: str) -> dict[str, dict[float, float]]:
    """w by pass rate of each recipe in the table of docs/recipes.md."""
    known, rates = {}, list[float]()
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells[:1] == ["recipe"]:
            rates = [float(cell) for cell in cells if re.fullmatch(r"\.\d+", cell)]
        elif rates and (found := re.match(r"\[(\w+)\]\(\.\./configs", line[2:])):
            values = cells[-len(rates) :]
            if all(re.fullmatch(r"\d*\.?\d+", value) for value in values):
                known[found[1]] = dict(zip(rates, map(float, values), strict=True))
    return known


def picture(name: str, row: dict[float, float]) -> str:
    """SVG of w(p) / w(.5), on a scale of powers of two."""
    points = list[tuple[float, float]]()
    for p, value in row.items():
        if value > 0:
            power = max(-REACH, min(REACH, math.log2(value / row[0.5])))
            x = EDGE + p * (WIDTH - 2 * EDGE)
            points.append((x, HEIGHT / 2 - power * (HEIGHT / 2 - EDGE) / REACH))
    curve = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#3949ab"/>' for x, y in points
    )
    text = 'font-family="sans-serif" font-size="10"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
width="{WIDTH}" height="{HEIGHT}">
<rect width="100%" height="100%" fill="#fff"/>
<path d="M{EDGE} {HEIGHT / 2}H{WIDTH - EDGE}" stroke="#999" stroke-dasharray="2 3"/>
<polyline points="{curve}" fill="none" stroke="#3949ab" stroke-width="2"/>{marks}
<text x="{WIDTH / 2}" y="14" {text} text-anchor="middle">{name}</text>
<text x="{EDGE}" y="{HEIGHT - 6}" {text}>p = 0</text>
<text x="{WIDTH - EDGE}" y="{HEIGHT - 6}" {text} text-anchor="end">1</text>
<text x="2" y="{EDGE + 4}" {text}>{2**REACH}x</text>
<text x="2" y="{HEIGHT / 2 + 4}" {text}>1x</text>
<text x="2" y="{HEIGHT - EDGE + 4}" {text}>1/{2**REACH}x</text>
</svg>
"""


class Links(HTMLParser):
    """Links and ids of an HTML page."""

    def __init__(self, text: str):
        """Read a page."""
        super().__init__()
        self.links, self.ids = set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what the tag links to and is called."""
        for key, value in attrs:
            if key in ("href", "src") and value and tag != "base":
                self.links.add(value)
            if key == "id" and value:
                self.ids.add(value)


def broken() -> Iterator[str]:
    """Links of the built site that lead nowhere."""
    found = {path: Links(path.read_text()) for path in sorted(HTML.rglob("*.html"))}
    for path, page in found.items():
        for link in sorted(page.links):
            name, _, anchor = unquote(link).partition("#")
            if ":" in name or name.startswith("//") or path.name == "404.html":
                continue
            to = Path(os.path.normpath(path.parent / name)) if name else path
            to = to / "index.html" if to.is_dir() else to
            known = found[to].ids if to in found else set()
            if not to.is_file() or (anchor and to in found and anchor not in known):
                yield f"{path.relative_to(HTML)}: {link}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        nowhere = list(broken())
        print(
            "\n".join(nowhere) or f"All links of {HTML.relative_to(ROOT)} lead there."
        )
        sys.exit(bool(nowhere))
    lay_out()
