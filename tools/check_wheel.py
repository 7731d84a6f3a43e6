"""Build a wheel, install it on each Python that is here, and train with it from an empty folder.

`python tools/check_wheel.py` (make wheel). It shows that the wheel holds all that a run needs,
pages and data too, and that pip finds packages of everything it depends on.
"""

import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from find_python import candidates, runs

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ((3, 11), (3, 12), (3, 13))
TRAIN = "train tiny --cpu-devices 2 --mesh fsdp=2 --steps 2 --batch 4 --seq 64 --run first"
USE = "generate first --prompt Once --max-new 4 --cpu-devices 1"


def pythons() -> dict[tuple[int, int], str]:
    """An interpreter of each version that is here: one that is not older, and not newer."""
    return {
        (major, minor): python
        for major, minor in VERSIONS
        for python in reversed([*candidates(major, minor)])
        if runs(python, major, minor) and not runs(python, major, minor + 1)
    }


def check(python: str, wheel: Path, folder: Path) -> None:
    """Install the wheel in a new environment and use it; raises if a command fails."""
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    own = folder / "venv" / "bin"
    pip = [str(own / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, str(wheel)], check=True)
    for words in ("--version", TRAIN, USE):
        subprocess.run([str(own / "meshwright"), *shlex.split(words)], check=True, cwd=folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(ROOT)]
        subprocess.run([*build, "--wheel-dir", str(folder)], check=True)
        (wheel,) = folder.glob("meshwright-*.whl")
        for version, python in pythons().items():
            place = folder / "-".join(map(str, version))
            place.mkdir()
            check(python, wheel, place)
            where = f"Python {version[0]}.{version[1]}, {platform.system()} {platform.machine()}"
            print(f"{wheel.name} works: {where}", flush=True)


if __name__ == "__main__":
    main()
