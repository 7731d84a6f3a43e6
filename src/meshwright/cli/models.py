"""`meshwright models`: the presets and their sizes."""

import dataclasses
import json

from rich.console import Console

from meshwright.cli.parser import POSITIONAL
from meshwright.errors import MeshwrightError
from meshwright.present import Column, Row, aligned, count_text, gib


@dataclasses.dataclass(frozen=True)
class ModelsSettings:
    name: str = dataclasses.field(default="", metadata=POSITIONAL)
    """Only presets whose names contain this, such as qwen."""
    json: bool = False
    """Print JSON."""


def models(settings: ModelsSettings) -> None:
    """List the model presets with their sizes.

      meshwright models qwen

    Where a MODEL is asked for, these names can be given; so can a Hugging Face config.json, a
    folder that holds one, and a name on the Hub (org/name).
    """
    from meshwright.models import PRESETS, family_of, layer_count, parameter_counts  # import jax

    known = {name: config for name, config in PRESETS.items() if settings.name.lower() in name}
    if not known:
        raise MeshwrightError(
            f"no preset has {settings.name!r} in its name; meshwright models lists all"
        )
    found = []
    for name, config in known.items():
        parameters, active = parameter_counts(config)
        found.append({
            "name": name,
            "family": family_of(config).name,
            "parameters": parameters,
            "active": active,
            "layers": layer_count(config),
            "embed": config.embed,
            "vocab": config.vocab,
            "context": config.max_seq,
        })  # fmt: skip
    if settings.json:
        print(json.dumps(found))
        return
    columns = [Column("model", right=False), Column("family", right=False, importance=1)]
    columns += map(Column, ("parameters", "active", "bf16 GiB", "layers", "embed"))
    columns += [Column("vocab", importance=2), Column("context")]
    lines = [
        Row((
            str(each["name"]), str(each["family"]), count_text(each["parameters"]),
            count_text(each["active"]) if each["active"] != each["parameters"] else "",
            gib(2 * each["parameters"]), str(each["layers"]), str(each["embed"]),
            f"{each['vocab']:,}", f"{each['context']:,}",
        ))
        for each in found
    ]  # fmt: skip
    console = Console()
    console.print(*aligned(columns, lines, console.width), sep="\n")
    console.print("active: parameters that a token meets, of a mixture of experts")
