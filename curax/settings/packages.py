"""Messages about packages that are not installed.

Only the standard library is imported.
"""

import importlib.util

# Extras of curax, and names of packages on PyPI, by the name of the import.
OF_CURAX = {
    "matplotlib": "pictures",
    "math_verify": "math",
    "pyarrow": "parquet",
    "tokenizers": "tokenizers",
    "huggingface_hub": "hub",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "reasoning_gym": "gym",
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
    """Whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # half imported, or hidden
        return False


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
        install = f"pip install 'curax[{OF_CURAX[name]}]'"
        return f"the package {name.replace('_', '-')} is not installed; run {install}."
    return (
        f"the package {name} is not installed; run pip install "
        f"{NAMES.get(name, name)}, or put its folder on PYTHONPATH if it is yours."
    )
