"""One self-contained HTML page: the machine, the mesh axes in colour, shards on hover."""

from pathlib import Path

from meshwright.present import render
from meshwright.show.scene import Scene

TEMPLATE = Path(__file__).with_name("page.html")


def page(scene: Scene) -> str:
    """The page's HTML; it loads no other files."""
    return render(TEMPLATE, title=scene.title, data=scene.data())
