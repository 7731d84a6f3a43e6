"""Machine texts, and the devices they describe."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import CHIPS, Machine, MeshwrightError
from meshwright.machines.slices import slice_shapes

TPUS = [chip for chip in CHIPS.values() if chip.platform == "tpu"]


@pytest.mark.parametrize(
    ("text", "slice_shape", "host_shape", "devices", "hosts"),
    [
        ("v3:4x4", (4, 4, 1, 2), (2, 2, 1, 2), 32, 4),
        ("v2:2x2", (2, 2, 1, 2), (2, 2, 1, 2), 8, 1),
        ("v4:2x2x4", (2, 2, 4, 1), (2, 2, 1, 1), 16, 4),
        ("v5p:4x4x8", (4, 4, 8, 1), (2, 2, 1, 1), 128, 32),
        ("v5p-256", (4, 4, 8, 1), (2, 2, 1, 1), 128, 32),
        ("v5e:2x4", (2, 4, 1, 1), (2, 4, 1, 1), 8, 1),
        ("v5e:4x4", (4, 4, 1, 1), (2, 2, 1, 1), 16, 4),
        ("v5e:1x1", (1, 1, 1, 1), (1, 1, 1, 1), 1, 1),
        ("2*v5e:16x16", (16, 16, 1, 1), (2, 2, 1, 1), 512, 128),
        ("7x:2x2x2", (2, 2, 2, 2), (2, 2, 1, 2), 16, 2),
        ("tpu7x-128", (4, 4, 4, 2), (2, 2, 1, 2), 128, 16),
    ],
)
def test_tpu_slices_have_the_stated_boxes(
    text: str, slice_shape: tuple[int, ...], host_shape: tuple[int, ...], devices: int, hosts: int
) -> None:
    machine = Machine.parse(text)
    assert machine.slice_shape == slice_shape
    assert machine.host_shape == host_shape
    assert machine.num_devices == devices == len(machine.devices)
    assert machine.num_hosts == hosts == len({d.process_index for d in machine.devices})


@pytest.mark.parametrize(
    ("text", "printed", "devices", "hosts"),
    [("h100:8", "h100:8", 8, 1), ("h100:16x8", "h100:16x8", 128, 16), ("cpu:8", "cpu:8", 8, 1),
     ("H100:1x8", "h100:8", 8, 1), ("2*a100-80:2x8", "2*a100-80:2x8", 32, 4)],
)  # fmt: skip
def test_gpus_stand_in_hosts(text: str, printed: str, devices: int, hosts: int) -> None:
    machine = Machine.parse(text)
    assert str(machine) == printed
    assert (machine.num_devices, machine.num_hosts) == (devices, hosts)
    assert len({d.process_index for d in machine.devices}) == hosts


def test_here_is_the_machine_of_this_process() -> None:
    assert Machine.parse("here") == Machine(CHIPS["cpu"], (len(jax.devices()),))


# (text, first devices as (id, host, coords, core)): as libtpu 0.0.42 lists them for the TPU compiler
LISTED = [
    ("v3:4x4", [(0, 0, (0, 0, 0), 0), (1, 0, (0, 0, 0), 1), (2, 0, (1, 0, 0), 0),
                (3, 0, (1, 0, 0), 1), (8, 0, (0, 1, 0), 0), (9, 0, (0, 1, 0), 1),
                (10, 0, (1, 1, 0), 0), (11, 0, (1, 1, 0), 1), (4, 1, (2, 0, 0), 0)]),
    ("v5p:4x4x4", [(0, 0, (0, 0, 0), 0), (1, 0, (1, 0, 0), 0), (4, 0, (0, 1, 0), 0),
                   (5, 0, (1, 1, 0), 0), (2, 1, (2, 0, 0), 0), (3, 1, (3, 0, 0), 0),
                   (6, 1, (2, 1, 0), 0), (7, 1, (3, 1, 0), 0), (8, 2, (0, 2, 0), 0)]),
    ("7x:2x2x2", [(0, 0, (0, 0, 0), 0), (1, 0, (0, 0, 0), 1), (2, 0, (1, 0, 0), 0),
                  (3, 0, (1, 0, 0), 1), (4, 0, (0, 1, 0), 0), (5, 0, (0, 1, 0), 1),
                  (6, 0, (1, 1, 0), 0), (7, 0, (1, 1, 0), 1), (8, 1, (0, 0, 1), 0)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "first"), LISTED)
def test_devices_come_in_the_order_the_tpu_runtime_lists_them(
    text: str, first: list[tuple[int, int, tuple[int, ...], int]]
) -> None:
    devices = Machine.parse(text).devices
    listed = [(d.id, d.process_index, d.coords, d.core_on_chip) for d in devices]
    assert listed[: len(first)] == first
    assert sorted(d.id for d in devices) == list(range(len(devices)))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    chip = draw(st.sampled_from(list(CHIPS.values())))
    side = st.integers(1, 9)
    if chip.platform == "tpu":
        shape = tuple(draw(side) for _ in range(chip.torus_dims))
    elif chip.platform == "gpu":
        shape = (draw(side), draw(st.integers(1, chip.chips_per_host)))
    else:
        return Machine(chip, (draw(side),))
    return Machine(chip, shape, draw(st.integers(1, 4)))


@given(machines())
def test_a_printed_machine_reads_back_if_it_can_be_had(machine: Machine) -> None:
    known = slice_shapes(machine.chip.name)
    if not known or machine.shape in known:
        assert Machine.parse(str(machine)) == machine
        return
    if any(sorted(shape) == sorted(machine.shape) for shape in known):
        assert Machine.parse(str(machine)).shape in known
        return
    with pytest.raises(MeshwrightError, match="there is no such"):
        Machine.parse(str(machine))


@given(machines())
def test_every_device_has_a_place_of_its_own(machine: Machine) -> None:
    devices = machine.devices
    assert len({(d.slice_index, *d.position) for d in devices}) == machine.num_devices
    per_host: dict[int, int] = {}
    for device in devices:
        per_host[device.process_index] = per_host.get(device.process_index, 0) + 1
    assert len(set(per_host.values())) == 1


@given(
    st.text(max_size=30)
    | st.from_regex(
        r"([0-9]{1,3}\*)?[a-z0-9-]{1,8}[:-][0-9]{1,4}(x[0-9]{1,4}){0,3}", fullmatch=True
    )
)
def test_any_text_is_a_machine_or_a_readable_error(text: str) -> None:
    try:
        machine = Machine.parse(text)
    except MeshwrightError as error:
        assert len(str(error)) > 20
    else:
        assert Machine.parse(str(machine)) == machine


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v5q:4x4x4", ["'v5q'", "did you mean 'v5e' or 'v5p'?"]),
        ("h100", ["not how many", "'h100:8' or 'h100:16x8'"]),
        ("h100:16", ["'h100:16'", "hold 8", "'h100:2x8'"]),
        ("v5p:4x4", ["3-D torus", "2 sizes", "'v5p:4x4x8'"]),
        ("v5e:4x4x4", ["2-D torus", "3 sizes"]),
        ("v5p-250", ["'v5p-250'", "counts cores", "v5p-256"]),
        ("v5e-12", ["counts chips", "v5e-8, v5e-16"]),
        ("0*v5e:4x4", ["'0'", "number of slices"]),
        ("v5e:0x4", ["at least 1"]),
        ("v5e:4by4", ["'4by4'", "joined by x"]),
        ("cpu:2x4", ["one number", "'cpu:8'"]),
        ("a100:8", ["'a100-40' or 'a100-80'"]),
    ],
)
def test_mistakes_say_what_would_work(text: str, words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        Machine.parse(text)
    for word in [*words, text]:
        assert word in str(caught.value)


def test_a_machine_larger_than_any_is_refused() -> None:
    with pytest.raises(MeshwrightError, match="at most 1,000,000 are supported"):
        Machine(CHIPS["v5e"], (9999999, 9999999))


def test_only_a_torus_has_a_slice_shape() -> None:
    with pytest.raises(MeshwrightError, match="'h100:8' has no slice_shape"):
        _ = Machine.parse("h100:8").slice_shape


def test_a_machine_of_your_own_chip_works() -> None:
    chip = CHIPS["h100"].__class__(
        name="mine", platform="gpu", bf16_flops=1e12, fp8_flops=None, memory_bytes=10**9,
        memory_bandwidth=1e11, link_bandwidth=1e9, links=4, host_network_bandwidth=1e9,
        cores_per_chip=1, chips_per_host=4, device_kinds=("mine",), sources={"*": "ourselves"},
    )  # fmt: skip
    machine = Machine(chip, (2, 4))
    assert machine.num_devices == 8
    with pytest.raises(MeshwrightError, match="takes 2 sizes"):
        Machine(chip, (2, 2, 2))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h100:99999999999x8", "is too large; at most 1,000,000 devices are supported"),
        (f"v5e:{'9' * 5000}", "is too large"),
        ("h100:*", "'*' is not a shape; sizes are numbers joined by x, as in 'h100:8'"),
        ("h100:8*", "'8*' is not a shape"),
        ("2*h100:*", "'*' is not a shape"),
        ("x*h100:8", "'x' is not a number of slices; write 2*v5e:16x16"),
    ],
)
def test_sizes_that_cannot_be_say_why(text: str, says: str) -> None:
    with pytest.raises(MeshwrightError) as refused:
        Machine.parse(text)
    assert says in str(refused.value)
