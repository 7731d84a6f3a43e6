"""The catalogue of chips: every figure once, with its source.

    >>> CHIPS["v5p"].bf16_flops
    459000000000000.0
    >>> CHIPS["v5p"].source("memory_bytes")
    'Google Cloud, TPU v5p, docs.cloud.google.com/tpu/docs/v5p'

Figures are per chip and dense (no sparsity). Bandwidths are bytes per second in one direction.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.present import GIB

MIB = 2**20
TERA = 1e12
# of a GPU's memory, what jax's allocator gives out when asked for 0.95 (train asks): 132.8 of 140.4
# GiB, measured on an H200
USABLE_SHARE = 0.945


FIGURES = (  # of a chip, that people look up
    "bf16_flops", "fp8_flops", "memory_bytes", "memory_bandwidth", "link_bandwidth", "links",
    "host_network_bandwidth", "host_link_bandwidth", "host_memory_bytes", "cores_per_chip",
    "chips_per_host",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip; `sources` has the source of each figure ("*": all others)."""

    name: str
    platform: Literal["tpu", "gpu", "cpu"]
    bf16_flops: float
    fp8_flops: float | None  # None: no fp8 units
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float  # of one link, one direction
    links: int
    host_network_bandwidth: float | None  # of one host, one direction; None: not published
    cores_per_chip: int  # cores that jax shows as devices of their own; a megacore pair is one
    chips_per_host: int
    device_kinds: tuple[str, ...]  # what jax calls it
    sources: Mapping[str, str] = dataclasses.field(compare=False, repr=False)
    torus_dims: int = 0  # 2 or 3 on TPUs
    ring: int = 0  # on 2-D tori: the size at which the links along a dim close into a ring
    host_box: tuple[int, int, int] = (1, 1, 1)  # chips of one host, along x, y, z
    single_host_shapes: tuple[tuple[int, ...], ...] = ()  # slices that are one larger host
    aliases: tuple[str, ...] = ()
    usable_gib: float | None = None  # of a device, what its compiler gives out; None: a share
    host_link_bandwidth: float | None = None  # to the host's memory, one direction; None: not known
    host_memory_bytes: int | None = None  # of one host; None: not known
    like: str = ""  # of a user's own chip: the one of the catalogue that it is as efficient as

    def __hash__(self) -> int:
        return hash(self.name)  # a search asks for it tens of thousands of times

    @property
    def kind(self) -> str:
        """The name under which what was measured and which slices there are is looked up."""
        return self.like or self.name

    @property
    def usable_bytes(self) -> int:
        """Memory of one device that programs can use, in bytes."""
        if self.usable_gib is not None:
            return int(self.usable_gib * GIB)
        return int(USABLE_SHARE * self.memory_bytes / self.cores_per_chip)

    @property
    def flops_per_byte(self) -> float:
        """FLOP/s for each byte/s to a neighbour; all of a GPU's links lead to the one switch."""
        links = self.links if self.platform == "gpu" else 1
        return self.bf16_flops / (self.link_bandwidth * links)

    def source(self, figure: str) -> str:
        """Where one figure comes from."""
        if figure not in {field.name for field in dataclasses.fields(self)}:
            names = [field.name for field in dataclasses.fields(self)]
            raise MeshwrightError(
                f"{figure!r} is not a figure of a chip{did_you_mean(figure, names)}"
            )
        if figure not in self.sources and figure.startswith("host_") and not getattr(self, figure):
            return _NOT_KNOWN
        return self.sources.get(figure, self.sources["*"])

    def wraps(self, shape: tuple[int, int, int]) -> tuple[bool, bool, bool]:
        """Along which of x, y, z the links of a slice of this shape close into a ring.

        3-D tori close on every dim once the slice is built of whole 4x4x4 cubes, 2-D tori along a
        dim as long as the pod.
        """
        if self.torus_dims == 3:
            whole = all(size % 4 == 0 for size in shape)
            return (whole, whole, whole)
        return (shape[0] == self.ring, shape[1] == self.ring, False)


_SCALING_BOOK = "How to Scale Your Model, TPU tables, jax-ml.github.io/scaling-book/tpus"
_HOST_LINK = "How to Scale Your Model, jax-ml.github.io/scaling-book/tpus (v6e: twice)"
_SCALING_BOOK_GPU = "How to Scale Your Model, GPU tables, jax-ml.github.io/scaling-book/gpus"
_CACM_2020 = (
    "Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 2020, "
    "doi.org/10.1145/3360307"
)
_ISCA_2023 = "Jouppi et al., TPU v4, ISCA 2023, Table 4, arxiv.org/abs/2304.01433"
_TPU_INFO = "jax, jax/_src/pallas/mosaic/tpu_info.py"
_MACHINE_TYPES = "Google Cloud, TPU machine types, docs.cloud.google.com/compute/docs/tpus"
_G2 = "Google Cloud, g2-standard-96, docs.cloud.google.com/compute/docs/gpus"
_MAXTEXT = "MaxText, accelerator_to_spec_map.py"
_NOT_PUBLISHED = "not published"
_NOT_KNOWN = "not known"
_COMPILER = "the TPU compiler's own limit (libtpu 0.0.42)"


def _google(page: str) -> str:
    return f"Google Cloud, TPU {page}, docs.cloud.google.com/tpu/docs/{page}"


def _nvidia(page: str) -> str:
    return f"NVIDIA datasheet, nvidia.com/en-us/data-center/{page}"


def _sources(default: str, **figures: str) -> Mapping[str, str]:
    return {"*": default, **figures}


def _amd(page: str) -> str:
    return f"AMD data sheet, amd.com/en/products/accelerators/instinct/{page}"


def _aws(family: str) -> str:
    return f"AWS, aws.amazon.com/ec2/instance-types/{family}"


_SMI = "memory.total of nvidia-smi"
_ADA = "NVIDIA Ada GPU architecture white paper, Appendix A (dense, FP32 accumulate)"
_BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU architecture white paper (dense, FP32 accumulate)"
_CHASSIS = "assumed: eight to a server, one 100 Gb/s port"
_PCIE = "PCI-SIG, the raw rate of 16 lanes"
_DGX_BASEPOD = "NVIDIA DGX BasePOD, docs.nvidia.com/dgx-basepod (DGX H100 and H200)"
_HOPPER_HOST = {
    "host_link_bandwidth": f"MLPerf inference v3.1, v4.1: H100, H200 (PCIe Gen5 x16); {_PCIE}",
    "host_memory_bytes": _DGX_BASEPOD,
}
_A100_HOST = dict.fromkeys(
    ("host_link_bandwidth", "host_memory_bytes"),
    f"MLPerf training v1.0, Inspur NF5488A5 (PCIe Gen4, 1 TB); {_PCIE}",
)
_B200_HOST = dict.fromkeys(
    ("host_link_bandwidth", "host_memory_bytes"),
    f"NVIDIA DGX B200 user guide, docs.nvidia.com/dgx (PCIe Gen5 CPUs, 2 TB); {_PCIE}",
)


# fmt: off
_CATALOGUE = (
    Chip(
        name="v2", platform="tpu", bf16_flops=46 * TERA, fp8_flops=None, memory_bytes=16 * GIB,
        memory_bandwidth=700e9, link_bandwidth=62e9, links=4, host_network_bandwidth=None,
        cores_per_chip=2, chips_per_host=4, device_kinds=("TPU v2",), torus_dims=2, ring=16,
        host_box=(2, 2, 1), usable_gib=7.48,
        sources=_sources(
            _CACM_2020, bf16_flops=_TPU_INFO, fp8_flops=_TPU_INFO, memory_bytes=_google("v2"),
            chips_per_host=_google("v2"), cores_per_chip=_google("v2"),
            host_network_bandwidth=_NOT_PUBLISHED, usable_gib=_COMPILER,
        ),
    ),
    Chip(
        name="v3", platform="tpu", bf16_flops=123 * TERA, fp8_flops=None, memory_bytes=32 * GIB,
        memory_bandwidth=900e9, link_bandwidth=70e9, links=4, host_network_bandwidth=None,
        cores_per_chip=2, chips_per_host=4, device_kinds=("TPU v3",), torus_dims=2, ring=32,
        host_box=(2, 2, 1), usable_gib=15.48,
        sources=_sources(
            _google("v3"), link_bandwidth=_ISCA_2023, links=_ISCA_2023, fp8_flops=_TPU_INFO,
            host_network_bandwidth=_NOT_PUBLISHED, usable_gib=_COMPILER,
        ),
    ),
    Chip(
        name="v4", platform="tpu", bf16_flops=275 * TERA, fp8_flops=None, memory_bytes=32 * GIB,
        memory_bandwidth=1.2e12, link_bandwidth=45e9, links=6, host_network_bandwidth=25e9,
        cores_per_chip=1, chips_per_host=4, device_kinds=("TPU v4",), torus_dims=3,
        host_box=(2, 2, 1), usable_gib=30.75,
        host_link_bandwidth=16e9, host_memory_bytes=407 * 10**9,
        sources=_sources(
            _google("v4"), fp8_flops=_TPU_INFO, link_bandwidth=_SCALING_BOOK, links=_ISCA_2023,
            host_network_bandwidth=f"{_SCALING_BOOK} (6.25e9 per chip, not named for v4)",
            cores_per_chip=_SCALING_BOOK, chips_per_host=_SCALING_BOOK, usable_gib=_COMPILER,
            host_link_bandwidth=_SCALING_BOOK, host_memory_bytes=_MACHINE_TYPES,
        ),
    ),
    Chip(
        name="v5e", platform="tpu", bf16_flops=197 * TERA, fp8_flops=None, memory_bytes=16 * GIB,
        memory_bandwidth=819e9, link_bandwidth=45e9, links=4, host_network_bandwidth=12.5e9,
        cores_per_chip=1, chips_per_host=4, device_kinds=("TPU v5 lite", "TPU v5e"), torus_dims=2,
        ring=16, host_box=(2, 2, 1), single_host_shapes=((2, 4),), aliases=("v5litepod",),
        usable_gib=15.75, host_link_bandwidth=16e9, host_memory_bytes=192 * 10**9,
        sources=_sources(
            _google("v5e"), fp8_flops=_TPU_INFO, link_bandwidth=_SCALING_BOOK,
            host_network_bandwidth=f"{_google('v5e')} (2 x 100 Gb/s per 8 chips, halved)",
            usable_gib=_COMPILER, host_link_bandwidth=_HOST_LINK,
        ),
    ),
    Chip(
        name="v5p", platform="tpu", bf16_flops=459 * TERA, fp8_flops=459 * TERA,
        memory_bytes=95 * GIB, memory_bandwidth=2.765e12, link_bandwidth=90e9, links=6,
        host_network_bandwidth=25e9, cores_per_chip=1, chips_per_host=4,
        device_kinds=("TPU v5", "TPU v5p"), torus_dims=3, host_box=(2, 2, 1), usable_gib=95.74,
        host_link_bandwidth=16e9, host_memory_bytes=448 * 10**9,
        sources=_sources(
            _google("v5p"), link_bandwidth=_SCALING_BOOK, cores_per_chip=_SCALING_BOOK,
            host_network_bandwidth=_MACHINE_TYPES, usable_gib=_COMPILER,
            host_link_bandwidth=_HOST_LINK,
        ),
    ),
    Chip(
        name="v6e", platform="tpu", bf16_flops=918 * TERA, fp8_flops=918 * TERA,
        memory_bytes=32 * GIB, memory_bandwidth=1.638e12, link_bandwidth=90e9, links=4,
        host_network_bandwidth=50e9, cores_per_chip=1, chips_per_host=4,
        device_kinds=("TPU v6 lite", "TPU v6e"), torus_dims=2, ring=16, host_box=(2, 2, 1),
        single_host_shapes=((2, 4),), aliases=("trillium",), usable_gib=31.25,
        host_link_bandwidth=32e9, host_memory_bytes=720 * 10**9,
        sources=_sources(
            _google("v6e"), fp8_flops=_google("tpu7x"), memory_bytes=_google("tpu7x"),
            memory_bandwidth=_google("tpu7x"), link_bandwidth=_SCALING_BOOK,
            host_network_bandwidth=_MACHINE_TYPES, usable_gib=_COMPILER,
            host_link_bandwidth=_SCALING_BOOK, host_memory_bytes=_MACHINE_TYPES,
        ),
    ),
    Chip(
        name="7x", platform="tpu", bf16_flops=2307 * TERA, fp8_flops=4614 * TERA,
        memory_bytes=192 * GIB, memory_bandwidth=7.38e12, link_bandwidth=90e9, links=6,
        host_network_bandwidth=50e9, cores_per_chip=2, chips_per_host=4, device_kinds=("TPU7x",),
        torus_dims=3, host_box=(2, 2, 1), aliases=("tpu7x", "v7x", "ironwood"), usable_gib=94.75,
        host_memory_bytes=960 * 10**9,
        sources=_sources(
            _google("tpu7x"), link_bandwidth=_SCALING_BOOK, links=f"{_MAXTEXT} (3-D topologies)",
            host_network_bandwidth=_MACHINE_TYPES, chips_per_host=_MACHINE_TYPES,
            usable_gib=_COMPILER, host_memory_bytes=_MACHINE_TYPES,
        ),
    ),
    Chip(
        name="a100-40", platform="gpu", bf16_flops=312 * TERA, fp8_flops=None,
        memory_bytes=40_960 * MIB, memory_bandwidth=1.555e12, link_bandwidth=25e9, links=12,
        host_network_bandwidth=200e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA A100-SXM4-40GB",), aliases=("a100-40gb",),
        host_link_bandwidth=32e9, host_memory_bytes=10**12,
        sources=_sources(
            _nvidia("a100"), memory_bytes=_SMI, link_bandwidth=_SCALING_BOOK_GPU,
            links=_SCALING_BOOK_GPU, host_network_bandwidth=_nvidia("dgx-a100"),
            chips_per_host=_SCALING_BOOK_GPU,
            **_A100_HOST,
        ),
    ),
    Chip(
        name="a100-80", platform="gpu", bf16_flops=312 * TERA, fp8_flops=None,
        memory_bytes=81_920 * MIB, memory_bandwidth=2.039e12, link_bandwidth=25e9, links=12,
        host_network_bandwidth=200e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA A100-SXM4-80GB",), aliases=("a100-80gb",),
        host_link_bandwidth=32e9, host_memory_bytes=10**12,
        sources=_sources(
            _nvidia("a100"), memory_bytes=_SMI, link_bandwidth=_SCALING_BOOK_GPU,
            links=_SCALING_BOOK_GPU, host_network_bandwidth=_nvidia("dgx-a100"),
            chips_per_host=_SCALING_BOOK_GPU,
            **_A100_HOST,
        ),
    ),
    Chip(
        name="h100", platform="gpu", bf16_flops=989.5 * TERA, fp8_flops=1979 * TERA,
        memory_bytes=81_559 * MIB, memory_bandwidth=3.35e12, link_bandwidth=25e9, links=18,
        host_network_bandwidth=400e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA H100 80GB HBM3",),
        host_link_bandwidth=64e9, host_memory_bytes=2 * 10**12,
        sources=_sources(
            f"{_nvidia('h100')} (SXM; sparse figures halved)", memory_bytes=_SMI,
            link_bandwidth=_SCALING_BOOK_GPU, links=_SCALING_BOOK_GPU,
            host_network_bandwidth=_SCALING_BOOK_GPU, chips_per_host=_SCALING_BOOK_GPU,
            **_HOPPER_HOST,
        ),
    ),
    Chip(
        name="h200", platform="gpu", bf16_flops=989.5 * TERA, fp8_flops=1979 * TERA,
        memory_bytes=143_771 * MIB, memory_bandwidth=4.8e12, link_bandwidth=25e9, links=18,
        host_network_bandwidth=400e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA H200",),
        host_link_bandwidth=64e9, host_memory_bytes=2 * 10**12,
        sources=_sources(
            f"{_nvidia('h200')} (SXM; sparse figures halved)", memory_bytes=f"{_SMI}, measured",
            link_bandwidth=_SCALING_BOOK_GPU, links=_SCALING_BOOK_GPU,
            host_network_bandwidth=_SCALING_BOOK_GPU,
            chips_per_host="MLPerf inference v4.1, system H200-SXM-141GBx8",
            **_HOPPER_HOST,
        ),
    ),
    Chip(
        name="b200", platform="gpu", bf16_flops=2250 * TERA, fp8_flops=4500 * TERA,
        memory_bytes=183_359 * MIB, memory_bandwidth=8e12, link_bandwidth=50e9, links=18,
        host_network_bandwidth=400e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA B200",),
        host_link_bandwidth=64e9, host_memory_bytes=2 * 10**12,
        sources=_sources(
            f"{_nvidia('dgx-b200')} (eighth of a system; sparse figures halved)",
            memory_bytes=_SMI, link_bandwidth=_SCALING_BOOK_GPU, links=_SCALING_BOOK_GPU,
            host_network_bandwidth=_SCALING_BOOK_GPU, chips_per_host=_SCALING_BOOK_GPU,
            **_B200_HOST,
        ),
    ),
    Chip(  # its link is PCIe 4 x16: there is no NVLink
        name="l4", platform="gpu", bf16_flops=121 * TERA, fp8_flops=242.5 * TERA,
        memory_bytes=23_034 * MIB, memory_bandwidth=300e9, link_bandwidth=32e9, links=1,
        host_network_bandwidth=12.5e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA L4",),
        host_link_bandwidth=32e9, host_memory_bytes=384 * GIB,
        sources=_sources(
            f"{_nvidia('l4')} (sparse figures halved)", memory_bytes=_SMI,
            host_network_bandwidth=_G2, chips_per_host=_G2,
            host_memory_bytes=_G2,
        ),
    ),
    Chip(
        name="b300", platform="gpu", bf16_flops=2250 * TERA, fp8_flops=4500 * TERA,
        memory_bytes=275_040 * MIB, memory_bandwidth=8e12, link_bandwidth=50e9, links=18,
        host_network_bandwidth=800e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA B300 SXM6 AC",),
        host_link_bandwidth=64e9, host_memory_bytes=4 * 10**12,
        sources=_sources(
            f"{_nvidia('dgx-b300')} (eighth of a system; sparse figures halved)",
            memory_bytes=_SMI, host_link_bandwidth=_PCIE, host_memory_bytes=_aws("p6"),
        ),
    ),
    Chip(  # "host": the 72 GPUs that NVLink joins; a server of it has 4
        name="gb200", platform="gpu", bf16_flops=2500 * TERA, fp8_flops=5000 * TERA,
        memory_bytes=189_471 * MIB, memory_bandwidth=8e12, link_bandwidth=50e9, links=18,
        host_network_bandwidth=72 * 50e9, cores_per_chip=1, chips_per_host=72,
        device_kinds=("NVIDIA GB200",), aliases=("gb200-nvl72",),
        host_link_bandwidth=225e9, host_memory_bytes=17 * 10**12,
        sources=_sources(
            f"{_nvidia('gb200-nvl72')} (72nd of a rack; sparse figures halved)",
            memory_bytes=_SMI, host_link_bandwidth="NVLink-C2C, 900 GB/s for two GPUs, both ways",
            host_network_bandwidth="Azure, ND-GB200-v6: 4 x 400 Gb/s for 4 GPUs, "
            "learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/nd-gb200-v6-series",
        ),
    ),
    Chip(  # as gb200
        name="gb300", platform="gpu", bf16_flops=2500 * TERA, fp8_flops=5000 * TERA,
        memory_bytes=284_208 * MIB, memory_bandwidth=8e12, link_bandwidth=50e9, links=18,
        host_network_bandwidth=72 * 100e9, cores_per_chip=1, chips_per_host=72,
        device_kinds=("NVIDIA GB300",), aliases=("gb300-nvl72",),
        host_link_bandwidth=225e9, host_memory_bytes=17 * 10**12,
        sources=_sources(
            f"{_nvidia('gb300-nvl72')} (72nd of a rack; sparse figures halved; 800 Gb/s a GPU)",
            memory_bytes=_SMI, host_link_bandwidth="NVLink-C2C, 900 GB/s for two GPUs, both ways",
        ),
    ),
    Chip(  # each GPU has a link to each of the seven others
        name="mi300x", platform="gpu", bf16_flops=1307.4 * TERA, fp8_flops=2614.9 * TERA,
        memory_bytes=192 * GIB, memory_bandwidth=5.3e12, link_bandwidth=64e9, links=7,
        host_network_bandwidth=400e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("AMD Instinct MI300X",),
        host_link_bandwidth=64e9, host_memory_bytes=1850 * GIB,
        sources=_sources(
            _amd("mi300/mi300x.html"), host_link_bandwidth=_PCIE,
            host_network_bandwidth="Azure, ND-MI300X-v5: 8 x 400 Gb/s",
            host_memory_bytes="Azure, ND-MI300X-v5",
        ),
    ),
    Chip(
        name="mi355x", platform="gpu", bf16_flops=2516.6 * TERA, fp8_flops=5033.2 * TERA,
        memory_bytes=288 * 10**9, memory_bandwidth=8e12, link_bandwidth=76.8e9, links=7,
        host_network_bandwidth=400e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("AMD Instinct MI355X",), host_link_bandwidth=64e9,
        sources=_sources(
            _amd("mi350/mi355x.html"), host_link_bandwidth=_PCIE,
            host_network_bandwidth="assumed: 8 x 400 Gb/s, as MI300X",
        ),
    ),
    Chip(  # without bridges between pairs of cards
        name="h100-pcie", platform="gpu", bf16_flops=756 * TERA, fp8_flops=1513 * TERA,
        memory_bytes=81_559 * MIB, memory_bandwidth=2.0e12, link_bandwidth=64e9, links=1,
        host_network_bandwidth=12.5e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA H100 PCIe",), host_link_bandwidth=64e9,
        sources=_sources(
            f"{_nvidia('h100')} (PCIe, first data sheet; sparse figures halved)",
            memory_bytes=_SMI, host_network_bandwidth=_CHASSIS, chips_per_host=_CHASSIS,
        ),
    ),
    Chip(
        name="l40s", platform="gpu", bf16_flops=362 * TERA, fp8_flops=733 * TERA,
        memory_bytes=46_068 * MIB, memory_bandwidth=864e9, link_bandwidth=32e9, links=1,
        host_network_bandwidth=50e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA L40S",), host_link_bandwidth=32e9, host_memory_bytes=1536 * GIB,
        sources=_sources(
            _nvidia("l40s"), memory_bytes=_SMI, host_network_bandwidth=_aws("g6e"),
            chips_per_host=_aws("g6e"), host_memory_bytes=_aws("g6e"),
        ),
    ),
    Chip(
        name="a10g", platform="gpu", bf16_flops=70 * TERA, fp8_flops=None,
        memory_bytes=23_028 * MIB, memory_bandwidth=600e9, link_bandwidth=32e9, links=1,
        host_network_bandwidth=12.5e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA A10G",), host_link_bandwidth=32e9, host_memory_bytes=768 * GIB,
        sources=_sources(
            "NVIDIA and AWS, A10G data sheet, d1.awsstatic.com/product-marketing/ec2 (dense)",
            memory_bytes=_SMI, host_network_bandwidth=_aws("g5"), chips_per_host=_aws("g5"),
            host_memory_bytes=_aws("g5"),
        ),
    ),
    Chip(
        name="rtx-4090", platform="gpu", bf16_flops=165.2 * TERA, fp8_flops=330.3 * TERA,
        memory_bytes=24_564 * MIB, memory_bandwidth=1.008e12, link_bandwidth=32e9, links=1,
        host_network_bandwidth=12.5e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA GeForce RTX 4090",), aliases=("rtx4090", "4090"),
        host_link_bandwidth=32e9,
        sources=_sources(
            _ADA, memory_bytes=_SMI, host_network_bandwidth=_CHASSIS, chips_per_host=_CHASSIS,
        ),
    ),
    Chip(
        name="rtx-5090", platform="gpu", bf16_flops=209.5 * TERA, fp8_flops=419 * TERA,
        memory_bytes=32_607 * MIB, memory_bandwidth=1.792e12, link_bandwidth=64e9, links=1,
        host_network_bandwidth=12.5e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA GeForce RTX 5090",), aliases=("rtx5090", "5090"),
        host_link_bandwidth=64e9,
        sources=_sources(
            _BLACKWELL_RTX, memory_bytes=_SMI, host_network_bandwidth=_CHASSIS,
            chips_per_host=_CHASSIS,
        ),
    ),
    Chip(
        name="rtx-pro-6000", platform="gpu", bf16_flops=503.8 * TERA, fp8_flops=1007.6 * TERA,
        memory_bytes=97_887 * MIB, memory_bandwidth=1.597e12, link_bandwidth=64e9, links=1,
        host_network_bandwidth=200e9, cores_per_chip=1, chips_per_host=8,
        device_kinds=("NVIDIA RTX PRO 6000 Blackwell Server Edition",), aliases=("rtxpro6000",),
        host_link_bandwidth=64e9, host_memory_bytes=2048 * GIB,
        sources=_sources(
            f"{_BLACKWELL_RTX}; Server Edition", memory_bytes=_SMI,
            host_network_bandwidth=_aws("g7e"), chips_per_host=_aws("g7e"),
            host_memory_bytes=_aws("g7e"),
        ),
    ),
    Chip(
        name="cpu", platform="cpu", bf16_flops=0.1 * TERA, fp8_flops=None, memory_bytes=4 * GIB,
        memory_bandwidth=20e9, link_bandwidth=10e9, links=1, host_network_bandwidth=1.25e9,
        cores_per_chip=1, chips_per_host=1, device_kinds=("cpu",),
        sources=_sources("nominal: gives simulated devices numbers, measures nothing"),
    ),
)
# fmt: on


def _hosted(chip: str, name: str, aliases: tuple[str, ...], network: float, source: str) -> Chip:
    """A chip of the catalogue in hosts with another network, whose memory is not known."""
    base = next(one for one in _CATALOGUE if one.name == chip)
    sources = {**base.sources, "host_network_bandwidth": source}
    del sources["host_memory_bytes"]
    return dataclasses.replace(
        base, name=name, aliases=aliases, host_network_bandwidth=network, sources=sources,
        host_memory_bytes=None,
    )  # fmt: skip


_GOOGLE_GPUS = "Google Cloud, networking and GPU machines, cloud.google.com/compute/docs/gpus"
_TORCHTITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (Grand Teton)"
# what jax calls these GPUs does not say which hosts they are in: `here` takes those above
_HOSTED = (
    _hosted("h100", "a3-high", ("a3-highgpu-8g",), 100e9, f"{_GOOGLE_GPUS} (4 x 200 Gb/s)"),
    _hosted("h100", "a3-mega", ("a3-megagpu-8g",), 200e9, f"{_GOOGLE_GPUS} (8 x 200 Gb/s)"),
    _hosted("a100-40", "a2-high", (), 12.5e9, f"{_GOOGLE_GPUS} (100 Gb/s)"),
    _hosted("a100-80", "a2-ultra", (), 12.5e9, f"{_GOOGLE_GPUS} (100 Gb/s)"),
    _hosted("a100-40", "p4d", (), 50e9, f"{_aws('p4')} (4 x 100 Gb/s)"),
    _hosted("a100-80", "p4de", (), 50e9, f"{_aws('p4')} (4 x 100 Gb/s)"),
    dataclasses.replace(
        _hosted("h100", "h100-500w", ("grand-teton",), 400e9, _TORCHTITAN),
        memory_bytes=97_321 * MIB,
        memory_bandwidth=2.4e12,
        sources={
            "*": _TORCHTITAN,
            "bf16_flops": f"{_nvidia('h100')} (SXM; at 700 W)",
            "host_link_bandwidth": _HOPPER_HOST["host_link_bandwidth"],
        },
    ),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (*_CATALOGUE, *_HOSTED)})
_BY_NAME = {name: chip for chip in CHIPS.values() for name in (chip.name, *chip.aliases)}


def find_chip(name: str) -> Chip | None:
    """The chip of that name or alias, whatever its case."""
    return _BY_NAME.get(name.strip().lower())
