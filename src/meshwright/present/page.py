"""One self-contained HTML page from a template that extends base.html."""

import json
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.files import cannot_be_written

BASE = Path(__file__).with_name("base.html")
# of a page that a server of ours sends: it loads nothing, and asks its own server alone
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def render(template: Path, *, title: str, data: Any, **values: Any) -> str:
    """The page's HTML; it loads no other files.

    `data` is what the page's script draws, there as `data`; `values` are the template's own names.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MeshwrightError("an HTML page needs jinja2: pip install jinja2") from None

    environment = Environment(
        loader=FileSystemLoader([template.parent, BASE.parent]),
        autoescape=True,
        undefined=StrictUndefined,
    )
    # JSON has no NaN, and a browser would refuse the page: fail here
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return environment.get_template(template.name).render(title=title, data=text, **values)


def write_page(file: Path, html: str) -> None:
    """Write the page to the file that `--html` names."""
    try:
        file.write_text(html, encoding="utf-8")
    except OSError as reason:
        raise cannot_be_written(f"--html {str(file)!r}", reason) from None
