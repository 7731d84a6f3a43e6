"""`make demo` from a fresh clone: bytes downloaded and installed, CPU and wall seconds.

    python benchmarks/demo_install.py               # writes demo_install.json beside this file

It clones this repository into a temporary folder (what is committed), without pip's cache, and runs
`make demo`. What is downloaded is then downloaded once more into a folder, whose size is recorded.
CPU seconds are those of all processes together; wall time depends on the network and on what else
the machine does.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RECORD = HERE / "demo_install.json"
EXTRA = ".[serve]"  # as in the Makefile


def disk_bytes(folder: Path) -> int:
    files = (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return sum(file.stat().st_size for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        clone, wheels = Path(temporary, "clone"), Path(temporary, "wheels")
        subprocess.run(["git", "clone", "--quiet", str(HERE.parent), str(clone)], check=True)
        own = ("JAX_", "PYTHON", "PIP_CACHE", "MAKE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        environment = kept | {"PIP_NO_CACHE_DIR": "1"}
        seconds = {}
        for target in (".venv/.demo", "demo"):
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            command = ["make", target, f"PYTHON={options.python}"]
            subprocess.run(command, cwd=clone, env=environment, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            seconds[target] = {"cpu": round(cpu, 1), "wall": round(time.monotonic() - start, 1)}
        pip = [".venv/bin/python", "-m", "pip", "download", "--quiet", "-c", "constraints.txt"]
        subprocess.run([*pip, "-d", str(wheels), EXTRA], cwd=clone, env=environment, check=True)
        record = {
            "downloaded_megabytes": round(disk_bytes(wheels) / 1e6),
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
