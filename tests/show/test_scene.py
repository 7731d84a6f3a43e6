"""What is drawn is what jax places."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.models import abstract_arrays, decoder_rules, preset
from meshwright.show import array_grid, axis_table, machine_grid, page, ring_lines, scene
from meshwright.show.terminal import id_ranges, lies_on


def drawn(*parts: object, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*parts)
    return console.export_text()


@pytest.mark.parametrize(
    ("mesh", "machine", "shape", "layout"),
    [
        ("fsdp=2,tp=4", "cpu:8", (16, 32), "a b -> a@fsdp b@tp"),
        ("fsdp=2,tp=4", "cpu:8", (16, 32), "a b -> a@tp+fsdp b"),
        ("dp=2,fsdp=2,tp=2", "cpu:8", (8, 8, 8), "a b c -> a@tp b@dp c@fsdp"),
        ("dp=2,fsdp=2,tp=2", "cpu:8", (8, 8), "a b -> a b@fsdp"),
        ("fsdp=2,tp=4", "cpu:8", (8, 8), "a b -> a2 b4"),
    ],
)
def test_shards_are_where_jax_puts_them(
    mesh: str, machine: str, shape: tuple[int, ...], layout: str, eight: list[jax.Device]
) -> None:
    planned = mw.mesh(mesh, machine=machine)
    array = scene(planned, [(shape, layout)]).arrays[0]
    shards = array.layout.shard_indices(planned.shape).reshape(8, -1)
    real = mw.sharding(layout, mesh=planned.to_jax(eight)).devices_indices_map(shape)
    for device, index in zip(planned.devices.flat, shards, strict=True):
        steps = array.layout.shard_shape(shape, planned.shape)
        expected = [s.indices(n)[:2] for s, n in zip(real[eight[device.id]], shape, strict=True)]
        assert [(i * n, (i + 1) * n) for i, n in zip(index, steps, strict=True)] == expected


def test_the_terminal_shows_each_shard_with_its_devices() -> None:
    mesh = mw.mesh("dp=2,fsdp=2,tp=2", machine="cpu:8")
    text = drawn(array_grid(scene(mesh, [((8, 16), "a b -> a@fsdp b@tp")]).arrays[0], mesh))
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["", "b 0:8", "b 8:16"], ["a 0:4", "0,4", "1,5"], ["a 4:8", "2,6", "3,7"]
    ]  # fmt: skip
    assert "4 shards of 4×8 (128 B), 2 copies" in text


def test_the_terminal_shows_which_chip_sits_at_which_position() -> None:
    mesh = mw.mesh("fsdp=4,tp=4", machine="v5e:4x4")
    text = drawn(machine_grid(mesh))
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")][1:]
    shown = {
        (x, int(row[0])): tuple(map(int, cell.split(",")))
        for row in rows
        for x, cell in enumerate(row[1:])
    }
    for index in np.ndindex(4, 4):
        x, y, _, _ = mesh.coords[index]
        assert shown[x, y] == index


@pytest.mark.parametrize(
    ("mesh", "machine", "words"),
    [
        ("dp=2,fsdp=64,tp=4", "2*v5e:16x16", {"dp": "2 slices (the slower network)"}),
        ("fsdp=16,tp=8", "h100:16x8", {"fsdp": "16 hosts (the network)", "tp": "gpu (8)"}),
        ("dp=4,fsdp=32,tp=4", "2*v5e:16x16", None),
        ("fsdp=16,tp=2", "v3:4x4", None),
        ("dp=1,tp=8", "cpu:8", {"dp": "one place", "tp": "cpu (8)"}),
        ("fsdp=768,tp=8", "v5p:16x16x24", None),
    ],
)
def test_any_machine_can_be_drawn(mesh: str, machine: str, words: dict[str, str] | None) -> None:
    planned = mw.mesh(mesh, machine=machine)
    for axis, text in (words or {}).items():
        assert lies_on(planned, axis) == text
    assert all(len(line) <= 200 for line in drawn(machine_grid(planned), width=200).splitlines())
    assert all(name in drawn(axis_table(planned)) for name in planned.axis_names)


@pytest.mark.parametrize(
    ("mesh", "machine", "lines", "counts"),
    [
        ("fsdp=16,sp=16", "v6e:16x16", ["sp: ring of 16, every hop one link"], {"1": 16}),
        ("fsdp=4,sp=4", "v5e:4x4", ["sp: ring of 4, 1 of 4 hops takes 3 links"], {"1": 3, "3": 1}),
        ("fsdp=8,sp=2", "v5e:4x4", [], None),
        ("sp=8", "h100:8", [], None),
    ],
)
def test_the_hops_of_a_ring_are_told(
    mesh: str, machine: str, lines: list[str], counts: dict[str, int] | None
) -> None:
    planned = mw.mesh(mesh, machine=machine)
    assert ring_lines(planned) == lines
    shown = scene(planned)
    axis = shown.data()["axes"][-1]
    assert axis.get("hops_by_links") == counts
    assert ([f"sp: {axis['ring']}"] if "ring" in axis else []) == lines
    assert all(line.removeprefix("sp: ") in page(shown) for line in lines)


@pytest.mark.parametrize(
    ("ids", "text"),
    [([0, 1, 2, 5], "0-2,5"), ([3], "3"), (list(range(0, 20, 2)), "0,2,4,6,8,10,… (10)")],
)
def test_ids_are_shortened(ids: list[int], text: str) -> None:
    assert id_ranges(ids) == text


def test_a_model_is_part_of_the_scene() -> None:
    mesh = mw.mesh("dp=1,fsdp=4,tp=4,sp=1", machine="v5e:4x4")
    table = mw.explain(abstract_arrays(preset("tiny")), decoder_rules(), mesh)
    names = [array.name for array in scene(mesh, model=table).arrays]
    assert "layers/mlp/gate" in names


def test_a_layout_that_does_not_fit_is_refused() -> None:
    mesh = mw.mesh("fsdp=4,tp=4", machine="v5e:4x4")
    with pytest.raises(MeshwrightError, match="size 6"):
        scene(mesh, [((6,), "a -> a@fsdp")])


def test_the_page_is_self_contained_and_holds_the_data() -> None:
    mesh = mw.mesh("fsdp=4,tp=4", machine="v5e:4x4")
    html = page(scene(mesh, [((16, 16), "a b -> a@fsdp b@tp")], title="</script><b>x"))
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in html
    assert "src=" not in html
    assert "</script><b>" not in html
    assert html.count("</script>") == 1
    assert "a b -\\u003e a@fsdp b@tp" in html or "a b -> a@fsdp b@tp" in html


@pytest.mark.parametrize("machine", ["v3:4x4", "v5p:2x4x4", "h100:4x8", "2*v5e:4x4"])
def test_the_page_draws_each_device_where_it_sits_with_its_shard(machine: str) -> None:
    mesh = mw.mesh("fsdp=4,tp=8", machine=machine)
    data = scene(mesh, [((16, 64, 3), "a b c -> a@fsdp b@tp c")]).data()
    shards = data["arrays"][0]["shards"]
    for k, (index, device) in enumerate(np.ndenumerate(mesh.devices)):
        number, slice_index, _, *place = data["devices"][k]
        assert (number, slice_index) == (device.id, device.slice_index)
        tpu = mesh.machine.is_tpu
        assert tuple(place) == (device.position if tpu else (*reversed(device.position), 0, 0))
        assert shards[k] == index[0] * 8 + index[1]
