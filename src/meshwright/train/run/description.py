"""What a run is, written into its folder for whoever reads it later."""

import json
from pathlib import Path
from typing import Any

from meshwright.files import write_whole


def write_description(
    folder: Path, settings: dict[str, Any], about: dict[str, Any], tokenizer: dict[str, Any]
) -> None:
    """config.json (all settings), run.json (what the page shows first), tokenizer_state.json."""
    files = {"config.json": settings, "run.json": about, "tokenizer_state.json": tokenizer}
    for name, data in files.items():
        write_whole(folder / name, json.dumps(data, indent=2) + "\n")
