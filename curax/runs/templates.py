"""Pages from templates of jinja2: each value is escaped as it is put in.

The templates stand in the folder `html` of a package. A page is one file that loads
nothing else, so it can be mailed or published.
"""

import base64
import importlib.resources
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from curax.runs import drawing
from curax.settings.packages import install, is_installed

if TYPE_CHECKING:
    from jinja2 import Environment

NO_PICTURES = f"No pictures: matplotlib is not installed; run {install('pictures')}."
_BROAD = 800  # pixels; a broader picture has a row of its own, and is moved on a phone


def filled(name: str, *, version: str | None = None, **values: Any) -> bytes:
    """A template with its values, as UTF-8; what UTF-8 cannot hold is replaced.

    Args:
        name: `PACKAGE/FILE` of the template.
        version: of the files that were read: the page asks its server for `version` and
            renews itself where the answer is another; None: it asks nothing.
        values: names of the template; text is escaped.
    """
    page = _environment().get_template(name).render(version=version, **values)
    return page.encode("utf-8", "replace")


@cache
def _environment() -> "Environment":
    """Where templates are found, and how their values become HTML and JSON."""
    import jinja2

    def source(name: str) -> str:
        package, _, file = name.partition("/")
        return (importlib.resources.files(package) / "html" / file).read_text("utf-8")

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # JSON of a script element cannot end it: `tojson` also escapes `<`, `>` and `&`.
    made.policies["json.dumps_kwargs"] = {
        "separators": (",", ":"),
        "allow_nan": False,
    }
    return made


def drawn(
    some: Iterable[drawing.Picture], of: Any
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Values of the template `pictures.html`, and light PNG by names of pictures.

    Args:
        some: the pictures; those without data are left out, and all of them without
            matplotlib, which the page says.
        of: what they are drawn of.
    """
    if not is_installed("matplotlib"):
        return {"figures": [], "no_pictures": NO_PICTURES}, {}
    figures, files = [], {}
    for one in some:
        light, dark = (
            drawing.png(one, of, style) for style in (drawing.LIGHT, drawing.DARK)
        )
        if light and dark:
            files[one.name] = light
            width, height = (int.from_bytes(light[i : i + 4]) for i in (16, 20))
            figures.append(
                {
                    "title": one.title,
                    "caption": one.caption,
                    "light": base64.b64encode(light).decode(),
                    "dark": base64.b64encode(dark).decode(),
                    "width": width,  # pixels, of the header of a PNG
                    "height": height,
                    "broad": width > _BROAD,
                }
            )
    return {"figures": figures, "no_pictures": ""}, files
