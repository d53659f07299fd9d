"""Packages that are not installed, and the line that installs them.

Only the standard library is imported.
"""

import importlib.util

# What pip calls a package that is imported by another name.
OF_CURAX = {
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


def missing(error: BaseException) -> str | None:
    """What to do where an import failed for want of a package; None: no such failure.

    Args:
        error: whatever was raised; those that it was raised from are looked at too.

    Returns:
        A sentence with the package and the line that installs it. None as well where
        the package is there and a module of it is not.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, ModuleNotFoundError):
        seen = seen.__cause__
    if seen is None or not seen.name:
        return None
    name = seen.name.partition(".")[0]
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
