"""`make demo` from a fresh clone: bytes downloaded and installed, CPU and wall seconds.

    python benchmarks/demo_install.py               # writes demo_install.json beside this file

It clones this repository into a temporary folder (what is committed), without pip's cache, and runs
`make demo`. pip's log says how large each download is. CPU seconds are those of all processes
together; wall time depends on the network and on what else the machine does.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RECORD = HERE / "demo_install.json"
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def downloaded(log: str) -> float:
    """Bytes of every file that pip downloaded, by its log."""
    sizes = re.findall(r"Downloading \S+ \(([\d.]+) (bytes|kB|MB|GB)\)", log)
    return sum(float(size) * UNITS[unit] for size, unit in sizes)


def disk_bytes(folder: Path) -> int:
    files = (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return sum(file.stat().st_size for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        clone, log = Path(temporary, "clone"), Path(temporary, "pip.log")
        subprocess.run(["git", "clone", "--quiet", str(HERE.parent), str(clone)], check=True)
        own = ("JAX_", "PYTHON", "PIP_CACHE", "MAKE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        environment = kept | {"PIP_LOG": str(log), "PIP_NO_CACHE_DIR": "1"}
        seconds = {}
        for target in (".venv/.demo", "demo"):
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            command = ["make", target, f"PYTHON={options.python}"]
            subprocess.run(command, cwd=clone, env=environment, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            seconds[target] = {"cpu": round(cpu, 1), "wall": round(time.monotonic() - start, 1)}
        record = {
            "downloaded_megabytes": round(downloaded(log.read_text()) / 1e6),
            "installed_megabytes": round(disk_bytes(clone / ".venv") / 1e6),
            "install_seconds": seconds[".venv/.demo"],
            "demo_seconds": seconds["demo"],
            "cores": os.cpu_count(),
            "machine": os.uname().machine,
            "python": sys.version.split()[0],
        }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
