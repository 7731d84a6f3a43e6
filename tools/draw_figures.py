"""Draw the figures of docs/concepts.md: `python tools/draw_figures.py` writes docs/images/*.svg.

Device numbers and slices come from the library itself, so a figure shows what a mesh and a layout
do. A test checks that the committed files are what this draws.
"""

import html
from pathlib import Path

import meshwright as mw

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = ("#3f6ea3", "#2c807b", "#9c6212", "#b93b3a", "#7c5ba6", "#7a6655")
INK, FAINT = "#1c2430", "#7a8594"


class Figure:
    """An SVG picture; coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="Helvetica, Arial, '
            f'sans-serif">\n<title>{html.escape(title)}</title>'
        )
        self.parts = [f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>']

    def box(self, x: float, y: float, w: float, h: float, fill: str, line: str = "#ffffff") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" '
            f'stroke="{line}" stroke-width="1.5"/>'
        )

    def text(
        self, x: float, y: float, words: str, size: int = 13, colour: str = INK, at: str = "middle"
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{at}">{html.escape(words)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}" '
            'stroke-width="1.6" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker>'
            "</defs>"
        )
        return "\n".join([self.head, marker, *self.parts, "</svg>"]) + "\n"


def mesh_figure() -> Figure:
    """Eight devices in the order of `fsdp=4,tp=2`."""
    figure = Figure(520, 210, "Eight devices as a mesh fsdp=4,tp=2")
    devices = mw.mesh("fsdp=4,tp=2", machine="h100:8").devices
    figure.text(20, 28, 'mw.mesh("fsdp=4,tp=2"): 8 devices, two axes', 14, at="start")
    for fsdp in range(4):
        figure.text(160 + 90 * fsdp, 62, f"fsdp={fsdp}", 12, FAINT)
        for tp in range(2):
            x, y = 122 + 90 * fsdp, 74 + 58 * tp
            figure.box(x, y, 76, 46, COLOURS[fsdp])
            figure.text(x + 38, y + 29, f"device {devices[fsdp, tp].id}", 13, "#ffffff")
    for tp in range(2):
        figure.text(100, 102 + 58 * tp, f"tp={tp}", 12, FAINT, at="end")
    return figure


def layout_figure() -> Figure:
    """A matrix, and which device holds which part of it."""
    figure = Figure(560, 300, "A matrix split by embed@fsdp mlp@tp")
    expression = "embed mlp -> embed@fsdp mlp@tp"
    mesh = mw.mesh("fsdp=4,tp=2", machine="h100:8")
    layout = mw.Layout.parse(expression)
    shape = (4096, 14336)
    slices = layout.slices(shape, mesh.shape)
    figure.text(20, 28, expression, 14, at="start")
    figure.text(20, 48, f"{shape[0]} × {shape[1]}, a device holds {_size(layout, shape, mesh)}",
                12, FAINT, at="start")  # fmt: skip
    left, top, width, height = 110.0, 84.0, 380.0, 184.0
    for fsdp in range(4):
        for tp in range(2):
            rows, columns = slices[fsdp, tp]
            x = left + width * columns.start / shape[1]
            y = top + height * rows.start / shape[0]
            w = width * (columns.stop - columns.start) / shape[1]
            h = height * (rows.stop - rows.start) / shape[0]
            figure.box(x, y, w, h, COLOURS[fsdp])
            figure.text(x + w / 2, y + h / 2 + 5, f"device {mesh.devices[fsdp, tp].id}", 13, "#fff")
    figure.text(left + width / 2, top - 10, "mlp, split over tp", 12, FAINT)
    figure.text(left - 10, top + height / 2 - 4, "embed,", 12, FAINT, at="end")
    figure.text(left - 10, top + height / 2 + 12, "over fsdp", 12, FAINT, at="end")
    return figure


def _size(layout: mw.Layout, shape: tuple[int, int], mesh: mw.MachineMesh) -> str:
    return " × ".join(str(size) for size in layout.shard_shape(shape, mesh.shape))


def storage_figure() -> Figure:
    """How FSDP follows from two layouts of one weight."""
    figure = Figure(640, 250, "Storage layout, compute layout, and the collectives between them")
    columns = ((30, "stored", "embed@fsdp mlp@tp"), (252, "computed with", "embed mlp@tp"),
               (474, "gradient, stored", "embed@fsdp mlp@tp"))  # fmt: skip
    for x, title, words in columns:
        figure.text(x + 68, 40, title, 14)
        figure.text(x + 68, 60, words, 11, FAINT)
        for part in range(4):
            whole = title == "computed with"
            fill = COLOURS[part] if not whole else COLOURS[0]
            strong = whole or part == 0
            figure.box(x, 76 + 32 * part, 136, 32, fill if strong else "#e8ebef")
            if strong and (whole or part == 0):
                figure.text(x + 68, 97 + 32 * part, "on this device", 11, "#ffffff")
            elif not whole:
                figure.text(x + 68, 97 + 32 * part, f"on fsdp={part}", 11, FAINT)
    for x, words in ((170, "all-gather"), (392, "reduce-scatter")):
        figure.arrow(x + 4, 140, x + 76, 140)
        figure.text(x + 40, 130, words, 11)
        figure.text(x + 40, 158, "over fsdp", 11, FAINT)
    figure.text(320, 234, "FSDP is the difference of the two layouts on one axis", 12, FAINT)
    return figure


ROLES = (
    ("dp", "replicate", "the batch", "gradients: all-reduce"),
    ("fsdp", "shard", "batch and weights", "weights: all-gather"),
    ("tp", "tensor", "heads, mlp, vocab", "activations: all-reduce"),
    ("sp", "context", "the sequence", "keys: ring or all-to-all"),
    ("ep", "expert", "experts", "tokens: all-to-all"),
    ("pp", "stage", "layers", "no pipelines yet"),
)


def roles_figure() -> Figure:
    """What each axis splits, and what goes over it."""
    figure = Figure(680, 272, "The six axis roles: what each splits and what it sends")
    for index, (axis, role, splits, sends) in enumerate(ROLES):
        x, y = 16 + 220 * (index % 3), 16 + 124 * (index // 3)
        figure.box(x, y, 208, 112, "#f5f7f9", "#d9dee4")
        figure.box(x + 12, y + 14, 52, 30, COLOURS[index])
        figure.text(x + 38, y + 34, axis, 14, "#ffffff")
        figure.text(x + 76, y + 35, role, 13, at="start")
        figure.text(x + 12, y + 68, f"splits {splits}", 12, at="start")
        figure.text(x + 12, y + 90, sends, 12, FAINT, at="start")
    return figure


def family_figure() -> Figure:
    """What a model family declares, and who reads it."""
    figure = Figure(680, 270, "A model family declares a model once; every command reads it")
    declared = ("config, presets", "arrays with dims", "rules", "forward, loss", "work, remat",
                "Hugging Face names")  # fmt: skip
    readers = ("plan", "prove, audit", "train", "serve, generate", "export")
    figure.text(110, 30, "a family declares", 14)
    for index, words in enumerate(declared):
        y = 44 + 35 * index
        figure.box(20, y, 180, 29, COLOURS[0])
        figure.text(110, y + 19, words, 12, "#ffffff")
    figure.box(274, 104, 132, 58, "#eef1f4", "#c6cdd6")
    figure.text(340, 130, "registry", 14)
    figure.text(340, 149, "by name or config", 11)
    figure.arrow(204, 133, 268, 133)
    figure.text(570, 30, "commands read", 14)
    for index, words in enumerate(readers):
        y = 44 + 42 * index
        figure.box(490, y, 160, 34, COLOURS[4])
        figure.text(570, y + 22, words, 12, "#ffffff")
        figure.arrow(410, 133, 484, y + 17)
    return figure


FIGURES = {
    "concept-mesh.svg": mesh_figure,
    "concept-layout.svg": layout_figure,
    "concept-storage.svg": storage_figure,
    "concept-roles.svg": roles_figure,
    "concept-family.svg": family_figure,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (IMAGES / name).write_text(draw().svg(), encoding="utf-8")
        print(f"wrote docs/images/{name}")
