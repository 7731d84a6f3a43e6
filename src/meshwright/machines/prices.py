"""List prices: what one chip costs for an hour on demand, each with its source and date.

    >>> PRICES["h100"][0].dollars
    6.88

Prices change: `meshwright plan --catalogue FILE` takes yours. Where several clouds rent the same
chip in the same hosts, the lowest of those known here counts.
"""

import dataclasses

from meshwright.machines.cloud_names import INSTANCES


@dataclasses.dataclass(frozen=True)
class Price:
    """What one chip costs for an hour."""

    dollars: float
    instance: str  # rented as
    region: str
    date: str  # of the source
    source: str


_EC2 = "aws.amazon.com/ec2/pricing/on-demand, as price lists in public repositories quote it"
_AWS_JUNE_2025 = f"{_EC2}; p5, p5en: since the price cut of June 2025"
_AZURE = "azure.microsoft.com/pricing/details/virtual-machines/linux, quoted likewise"
_TPU = "cloud.google.com/tpu/pricing"
_GPU = "cloud.google.com/compute/vm-instance-pricing"
_UNCONFIRMED = "; unconfirmed: quoted by others, the page itself was not read"

# instance: (dollars an hour, region, date, source). AWS and the H100 of Azure agree in several
# independent price lists of 2026; Google's are quoted by at least two
_INSTANCES = {
    "p4d.24xlarge": (21.957642, "US East", "2026-03", _AWS_JUNE_2025),
    "p4de.24xlarge": (27.44705, "US East", "2026-03", _AWS_JUNE_2025),
    "p5.48xlarge": (55.04, "US East", "2026-03", _AWS_JUNE_2025),
    "p5en.48xlarge": (63.296, "US East", "2026-03", _AWS_JUNE_2025),
    "p6-b200.48xlarge": (113.9328, "US East", "2026-03", _EC2),
    "g5.48xlarge": (16.288, "US East", "2026-03", _EC2),
    "g6.48xlarge": (13.3504, "US East", "2026-03", _EC2),
    "g6e.48xlarge": (30.13118, "US East", "2026-03", _EC2),
    "g7e.48xlarge": (33.14432, "US East", "2026-03", _EC2),
    "Standard_ND96isr_H100_v5": (98.32, "US East", "2026-08", _AZURE),
    "Standard_ND96asr_v4": (27.197, "US East", "2026-08", _AZURE),
    "Standard_ND96amsr_A100_v4": (32.77, "US East", "2025", _AZURE + _UNCONFIRMED),
    "a3-highgpu-8g": (87.83, "US", "2026", _GPU + _UNCONFIRMED),
}
# chip: the same of one chip of a TPU
_TPUS = {
    "v4": (3.22, "US", "2025", _TPU + _UNCONFIRMED),
    "v5e": (1.20, "US", "2025", _TPU + _UNCONFIRMED),
    "v5p": (4.20, "US", "2025", _TPU + _UNCONFIRMED),
    "v6e": (2.70, "US", "2025", _TPU + _UNCONFIRMED),
}


def _all() -> dict[str, tuple[Price, ...]]:
    found: dict[str, list[Price]] = {
        chip: [Price(dollars, f"TPU {chip}", *rest)] for chip, (dollars, *rest) in _TPUS.items()
    }
    for instance, (dollars, *rest) in _INSTANCES.items():
        chip, chips = INSTANCES[instance.lower()]
        found.setdefault(chip, []).append(Price(dollars / chips, instance, *rest))
    return {chip: tuple(sorted(prices, key=lambda one: one.dollars))
            for chip, prices in found.items()}  # fmt: skip


PRICES = _all()
"""By chip, every price known, the lowest first."""
