"""The version of curax, and messages about packages that are not installed.

Only the standard library is imported.
"""

import importlib.metadata
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

VERSION = "0.1.0"  # of curax
# Extras of curax, and names of packages on PyPI, by the name of the import.
OF_CURAX = {
    "matplotlib": "pictures",
    "math_verify": "math",
    "pyarrow": "parquet",
    "tokenizers": "tokenizers",
    "huggingface_hub": "hub",
    "httpx": "http",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "reasoning_gym": "gym",
    "gymnasium": "gymnasium",
    "websockets": "openenv",
    "tensorflow_datasets": "tfds",
    "array_record": "tfds",
}
NAMES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def is_installed(name: str) -> bool:
    """Whether a package or module is there, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # half imported, hidden, or of what is no package
        return False


@cache
def install(extra: str) -> str:
    """Command that installs what an extra of curax brings.

    curax is on no index, and the clone or wheel that it came from may be gone, so the
    command names the packages themselves, as the metadata of curax does. Where there is
    no metadata, curax was not installed, and the command names its clone.
    """
    try:
        lines = importlib.metadata.requires("curax") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    of_extra = re.compile(rf"(.+?)\s*;\s*extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    found = [line[1] for line in map(of_extra.fullmatch, lines) if line]
    clone = Path(__file__).parents[2]
    return f"pip install {shlex.join(found or [f'{clone}[{extra}]'])}"


def missing(error: BaseException) -> str | None:
    """Sentence about a package that an import failed to find.

    Args:
        error: error of an import; its causes are searched too.

    Returns:
        The package and the command that installs it; None where the error is another
        one, or where the package is installed and lacks a module.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    if cause is None or not cause.name:
        return None
    name = cause.name.partition(".")[0]
    try:
        if importlib.util.find_spec(name):
            return None
    except (ImportError, ValueError):  # half imported
        return None
    if name in OF_CURAX:
        what = f"the package {name.replace('_', '-')} is not installed"
        return f"{what}; run {install(OF_CURAX[name])}."
    return (
        f"the package {name} is not installed; run pip install "
        f"{NAMES.get(name, name)}, or put its folder on PYTHONPATH if it is yours."
    )
