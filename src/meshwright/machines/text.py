"""The text of a machine: `v5p:4x4x8`, `v5p-256`, `h100:16x8`, `16*p5.48xlarge`, `cpu:8`."""

import math
import re
from collections.abc import Mapping

from meshwright.errors import MeshwrightError, did_you_mean, one_of
from meshwright.machines.chips import CHIPS, Chip, find_chip
from meshwright.machines.cloud_names import (
    INSTANCES,
    cloud_topology,
    instances_shape,
    is_cloud_name,
)
from meshwright.machines.slices import check_slice, slice_shapes
from meshwright.present import count

MAX_DEVICES = 1_000_000
GRAMMAR = (
    "a machine is CHIP:SHAPE (v5p:4x4x8, v5e:16x16, h100:8, h100:16x8 for hosts x GPUs, cpu:8), "
    "a cloud name (v5p-256, p5.48xlarge), N*MACHINE for N slices or instances (2*v5e:16x16, "
    "16*p5.48xlarge), or 'here'"
)


def read_machine(
    text: str, own: Mapping[str, Chip] | None = None
) -> tuple[Chip, tuple[int, ...], int]:
    """`"2*v5e:16x16"` -> (the v5e chip, (16, 16), 2 slices); `own` chips come before ours."""
    own = own or {}
    if not isinstance(text, str):
        raise MeshwrightError(f"machine {text!r} is not text; {GRAMMAR}")
    rest = text.strip()
    slices = 1
    if "*" in rest.partition(":")[0]:
        head, rest = (part.strip() for part in rest.split("*", 1))
        if not re.fullmatch(r"[0-9]{1,5}", head) or int(head) < 1:
            raise MeshwrightError(
                f"machine {text!r}: {head!r} is not a number of slices; write 2*v5e:16x16"
            )
        slices = int(head)
    name, colon, sizes_text = (part.strip() for part in rest.partition(":"))
    if name == "here":
        raise MeshwrightError(
            f"machine {text!r}: 'here' takes no shape: it is the machine this process runs on"
        )
    if not colon:
        if is_cloud_name(name):
            chip_name, shape = cloud_topology(name, text)
            return CHIPS[chip_name], shape, slices
        if name.lower() in INSTANCES:
            per_host = CHIPS[INSTANCES[name.lower()][0]].chips_per_host
            chip_name, shape = instances_shape(name, slices, per_host)
            return CHIPS[chip_name], shape, 1
        chip = own.get(name) or find_chip(name)
        if chip is not None:
            raise MeshwrightError(
                f"machine {text!r} names a chip but not how many; write {one_of(_examples(chip))}"
            )
        if (counted := _counted(name)) is not None:
            raise MeshwrightError(f"machine {text!r} is written {counted!r}: the chip comes first")
        raise MeshwrightError(
            f"machine {text!r} is not known{_near(name, own)} {GRAMMAR[0].upper()}{GRAMMAR[1:]}"
        )
    chip = own.get(name) or find_chip(name)
    if chip is None:
        raise MeshwrightError(
            f"machine {text!r}: no chip is called {name!r}{_near(name, own)} For hardware that is "
            "not in the catalogue give your own: mw.Machine(mw.Chip(...), shape), or "
            "`meshwright plan --catalogue FILE`"
        )
    if re.fullmatch(r"[0-9]+(x[0-9]+)*", sizes_text) and re.search("[0-9]{8}", sizes_text):
        raise MeshwrightError(
            f"machine {text!r} is too large; at most {MAX_DEVICES:,} devices are supported"
        )
    if not re.fullmatch(r"[0-9]{1,7}(x[0-9]{1,7})*", sizes_text):
        raise MeshwrightError(
            f"machine {text!r}: {sizes_text!r} is not a shape; sizes are numbers joined by x, "
            f"as in {one_of(_examples(chip))}"
        )
    sizes = tuple(map(int, sizes_text.split("x")))
    if 0 in sizes:
        raise MeshwrightError(f"machine {text!r}: every size must be at least 1")
    shape = _shape_for(chip, sizes, text)
    known = slice_shapes(chip.kind)
    if shape not in known:  # 8x4x4 is a 4x4x8
        shape = next((one for one in known if sorted(one) == sorted(shape)), shape)
    check_slice(chip, shape, slices, text)
    return chip, shape, slices


def _shape_for(chip: Chip, sizes: tuple[int, ...], text: str) -> tuple[int, ...]:
    examples = one_of(_examples(chip))
    if chip.platform == "cpu":
        if len(sizes) != 1:
            raise MeshwrightError(f"machine {text!r}: CPUs take one number, as in {examples}")
        return sizes
    if chip.platform == "gpu":
        if len(sizes) > 2:
            raise MeshwrightError(
                f"machine {text!r}: GPUs take one number, or hosts x GPUs, as in {examples}"
            )
        hosts, per_host = sizes if len(sizes) == 2 else (1, sizes[0])
        if per_host > chip.chips_per_host:
            fix = math.ceil(hosts * per_host / chip.chips_per_host)
            raise MeshwrightError(
                f"machine {text!r} puts {per_host} GPUs in one host; {chip.name} hosts hold "
                f"{chip.chips_per_host}: write '{chip.name}:{fix}x{chip.chips_per_host}'"
            )
        return hosts, per_host
    if chip.torus_dims == 2 and len(sizes) == 3 and sizes[2] == 1:
        sizes = sizes[:2]
    if len(sizes) != chip.torus_dims:
        raise MeshwrightError(
            f"machine {text!r}: a {chip.name} slice is a {chip.torus_dims}-D torus, "
            f"{count(len(sizes), 'size')} given; write {examples}"
        )
    return sizes


def _counted(name: str) -> str | None:
    """What is meant by a number and a chip that are written another way, such as 8xH100."""
    match = re.fullmatch(r"([0-9]{1,5}) ?x? ?(\w.*)|(.*\w) ?x ?([0-9]{1,5})", name.lower())
    if match is None:
        return None
    chip, number = find_chip(match[2] or match[3]), int(match[1] or match[4])
    if chip is None or chip.platform == "tpu" or not number:  # whose shape is not known
        return None
    hosts, rest = divmod(number, chip.chips_per_host)
    many = chip.platform == "gpu" and hosts > 1 and not rest
    return f"{chip.name}:{hosts}x{chip.chips_per_host}" if many else f"{chip.name}:{number}"


def _examples(chip: Chip) -> list[str]:
    shapes = {"tpu": {2: ["4x4", "16x16"], 3: ["2x2x1", "4x4x8"]}.get(chip.torus_dims, [])}
    by_platform = shapes | {"gpu": ["8", "16x8"], "cpu": ["8"]}
    return [f"{chip.name}:{shape}" for shape in by_platform[chip.platform]]


def _near(name: str, own: Mapping[str, Chip]) -> str:
    return did_you_mean(name.lower(), [*own, *CHIPS, *INSTANCES, "here"])
