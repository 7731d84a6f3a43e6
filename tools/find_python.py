"""Print a Python that runs and is new enough: `find_python.py 3.12`.

The newest jax needs a newer Python than this project does. A name on the PATH may be pyenv's shim
of a version that is not activated, which runs nothing, so each is tried, and pyenv's versions last.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def candidates(major: int, minor: int) -> Iterator[str]:
    for name in (*(f"python{major}.{minor + later}" for later in range(4)), "python3"):
        if path := shutil.which(name):
            yield path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [path for path in pyenv.glob("versions/*") if path.name[0].isdigit()]
    for folder in sorted(folders, key=lambda path: [*map(int, re.findall(r"\d+", path.name))]):
        yield str(folder / "bin" / "python")


def runs(python: str, major: int, minor: int) -> bool:
    code = f"import ensurepip, sys, venv; sys.exit(sys.version_info < ({major}, {minor}))"
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def main() -> None:
    major, minor = map(int, sys.argv[1].split("."))
    for python in candidates(major, minor):
        if runs(python, major, minor):
            print(python)
            return
    sys.exit(
        f"no Python {major}.{minor} or newer with venv runs here: install one, or give it with "
        f"NEWEST_PYTHON=PATH (pyenv: 'pyenv install {major}.{minor}')"
    )


if __name__ == "__main__":
    main()
