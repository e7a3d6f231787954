"""Files that scikit-learn is shipped with, found without importing it.

The import takes over a second of CPU time on every rank, most of it for scipy; reading the files
takes milliseconds.
"""

from importlib.util import find_spec
from pathlib import Path

from titanlite.errors import ConfigError


def packaged_file(name: str) -> Path:
    """The path of scikit-learn's file `name`, relative to `sklearn/datasets`.

    Raises ConfigError where scikit-learn, or the file in it, is missing.
    """
    spec = find_spec("sklearn")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        path = Path(folder, "datasets", name)
        if path.is_file():
            return path
    raise ConfigError(
        f"training.dataset: scikit-learn's file datasets/{name} is not installed; install "
        "scikit-learn, or train on another data set"
    )
