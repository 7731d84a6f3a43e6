"""One self-contained HTML page: the machine, the mesh axes in colour, shards on hover."""

import json
from pathlib import Path

from meshwright.show.scene import Scene

TEMPLATE = Path(__file__).with_name("page.html")


def page(scene: Scene) -> str:
    """The page's HTML; it needs nothing from outside."""
    from jinja2 import Environment

    data = json.dumps(scene.data(), separators=(",", ":"))
    environment = Environment(autoescape=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=scene.title, data=data
    )
