"""Exact versions from pip's report: `write_constraints.py REPORT CONSTRAINTS` (`make lock`)."""

import json
import sys
from pathlib import Path


def main(report: Path, constraints: Path) -> None:
    resolved = json.loads(report.read_text(encoding="utf-8"))["install"]
    pins = {item["metadata"]["name"]: item["metadata"]["version"] for item in resolved}
    pins.pop("meshwright", None)
    lines = ["# Exact versions everything is tested with; made by 'make lock'."]
    lines += [f"{name}=={pins[name]}" for name in sorted(pins, key=str.lower)]
    constraints.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
