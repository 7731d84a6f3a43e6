"""Machines compared for a run: which, how many chips, how long, how much.

    found = compare(TrainConfig("llama-3.1-8b", batch=512, seq=8192), ["h100", "v5p"], Run(1e12))
    found.best.machine, found.best.days, found.best.cost

A machine with a size is taken as it is. A chip without one is tried in every size that can be
rented, each about twice the one before, and the size that answers the question is kept: the
cheapest that meets the deadline and the budget or, with a budget alone, the fastest within it. Of
each machine the fastest mesh counts.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.lazy import cached_property, without_collector
from meshwright.machines import CHIPS, Catalogue, Chip, Machine, Price, machine_sizes
from meshwright.models import model_config
from meshwright.planner import efficiency
from meshwright.planner.constraints import Constraints
from meshwright.planner.fastest import Bounds, fastest
from meshwright.planner.goodput import DAY, LongRun
from meshwright.planner.long_run import checkpoint_bytes, flops_per_token
from meshwright.planner.planner import estimated
from meshwright.planner.processes import in_processes
from meshwright.planner.result import Estimate
from meshwright.planner.stacks import like as stack_like
from meshwright.planner.workload import Workload
from meshwright.present import amount, duration_text
from meshwright.training import TrainConfig

ANY = "any"
MOST_CHIPS = 16384  # of one run: Llama 3 405B's
_NO_PRICE = "no price is known; give one with --catalogue FILE"
_ONE_GPU = Machine(CHIPS["h100"], (1, 1))  # where a number does not depend on the machine
HARDLY_MORE = 1.01  # times the cost
WORSE = 2  # sizes, one after the other, that are no better: then no larger one is tried


@dataclasses.dataclass(frozen=True)
class Run:
    """What is asked of machines."""

    tokens: float
    within: float = math.inf  # seconds
    budget: float = math.inf  # dollars
    long_run: LongRun = dataclasses.field(default_factory=LongRun)


@dataclasses.dataclass(frozen=True)
class Offer:
    """A run on one machine, with its fastest mesh."""

    machine: Machine
    estimate: Estimate
    tokens_per_second: float  # while steps are taken
    goodput: float  # of the time rented
    seconds: float  # of the whole run
    price: Price | None
    smaller: "Offer | None" = None  # the smallest size of the same chip that costs hardly more

    @property
    def days(self) -> float:
        return self.seconds / DAY

    @property
    def chip_hours(self) -> float:
        return self.machine.num_chips * self.seconds / 3600

    @property
    def cost(self) -> float | None:
        """Dollars: chips × hours × price."""
        return None if self.price is None else self.chip_hours * self.price.dollars


@dataclasses.dataclass(frozen=True)
class NoOffer:
    """A machine or chip that cannot answer, and why."""

    name: str
    why: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The machines that can do a run, the best first, and those that cannot."""

    config: TrainConfig
    run: Run
    offers: tuple[Offer, ...]
    refused: tuple[NoOffer, ...]
    like: str = ""  # the stack whose speed is planned; "": our own
    catalogue: str = ""  # the file of --catalogue
    unpriced: tuple[str, ...] = ()  # chips that `any` leaves out
    limits: Constraints = dataclasses.field(default_factory=Constraints)  # of the meshes

    @property
    def best(self) -> Offer:
        return self.offers[0]


def machines_named(names: Sequence[str], catalogue: Catalogue) -> list[Machine | Chip]:
    """Machines, and chips whose size is to be found; `any` is every chip that has a price."""
    found: list[Machine | Chip] = []
    for name in names:
        chip = catalogue.chip(name)
        if name == ANY:
            priced = map(catalogue.chip, catalogue.prices)
            found += [one for one in priced if one is not None]
        elif chip is not None:
            found.append(chip)
        else:
            found.append(Machine.parse(name, catalogue.own))
    if not found:
        raise MeshwrightError("no machine is named; give some, as in --on h100,v5p:4x4x4")
    return list(dict.fromkeys(found))


def without_price(names: Sequence[str], catalogue: Catalogue) -> tuple[str, ...]:
    """The chips that `any` leaves out, where it is among the names; a CPU is not rented by chip."""
    if ANY not in names:
        return ()
    machines = machines_named(names, catalogue)
    compared = {(one.chip if isinstance(one, Machine) else one).name for one in machines}
    chips = {**CHIPS, **catalogue.own}
    return tuple(
        name for name, chip in chips.items() if name not in compared and chip.platform != "cpu"
    )


@without_collector()
def compare(
    config: TrainConfig,
    machines: list[Machine | Chip],
    run: Run,
    limits: Constraints | None = None,
    *,
    catalogue: Catalogue | None = None,
    model: Any = None,
    like: str = "",
) -> Comparison:
    """Every machine for a run, the best first; `model` as in `Workload.of`, `like` as in `plan`."""
    ask = _Ask(
        config,
        model_config(config.model) if model is None else model,
        run,
        limits or Constraints(),
        catalogue or Catalogue(),
        like,
    )
    offers: list[Offer] = []
    refused: list[NoOffer] = []
    for found in in_processes(functools.partial(_answer, ask), machines):
        if isinstance(found, Offer):
            offers.append(found)
        else:
            refused.append(found)
    if not offers:
        raise MeshwrightError(_impossible(ask, machines, refused))
    # those without a price last, by their time
    offers.sort(key=lambda one: (one.cost is None, ask.order(one) if one.cost else one.seconds))
    return Comparison(
        config, run, tuple(offers), tuple(refused), like, ask.catalogue.file, limits=ask.limits
    )


def _answer(ask: "_Ask", machine: Machine | Chip) -> Offer | NoOffer:
    return ask.on(machine) if isinstance(machine, Machine) else ask.sized(machine)


@dataclasses.dataclass(frozen=True)
class Size:
    """The fastest mesh with so many chips and so large a batch."""

    machine: Machine
    batch: int
    estimate: Estimate
    tokens_per_second: float


def planned_sizes(
    config: TrainConfig,
    machine: Machine,
    limits: Constraints,
    model: Any = None,
    like: str = "",
    imbalance: float = 1.0,
    *,
    of_batch: Sequence[float] = (1,),
) -> list[Size]:
    """The fastest mesh on a quarter to four times as many chips, with these parts of the batch."""
    batches = {round(config.batch * part) for part in of_batch} - {0}
    configs = [dataclasses.replace(config, batch=batch) for batch in sorted(batches)]
    chips = machine.num_chips
    others = [one for one in machine_sizes(machine.chip, 4 * chips) if one.num_chips != chips]
    machines = sorted([machine, *others], key=lambda one: one.num_chips)
    pairs = [(each, one) for each in configs for one in machines if 4 * one.num_chips >= chips]

    def size(pair: tuple[TrainConfig, Machine]) -> Size | None:
        config, other = pair
        workload, limited = _workload(config, other, limits, model)
        workload = dataclasses.replace(workload, imbalance=imbalance)
        found = fastest(workload.running_like(like), limited)
        if found is None:
            return None
        one = estimated(found)
        return Size(other, config.batch, one, config.batch * config.seq / one.step_seconds)

    return [one for one in in_processes(size, pairs) if one is not None]


def _workload(
    config: TrainConfig, machine: Machine, limits: Constraints, model: Any
) -> tuple[Workload, Constraints]:
    workload = Workload.of(config, machine, model)
    workload.schedule.check(workload)
    return workload, workload.schedule.narrowed(workload, limits)


@dataclasses.dataclass(frozen=True)
class _Ask:
    """A question, and what does not depend on the machine."""

    config: TrainConfig
    model: Any
    run: Run
    limits: Constraints
    catalogue: Catalogue
    like: str = ""
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict)  # of Workload

    def price(self, chip: Chip) -> Price | None:
        return self.catalogue.prices.get(chip.name)

    @property
    def by_time(self) -> bool:
        """With a budget alone, the fastest is the best."""
        return self.run.budget < self.run.within == math.inf

    def order(self, offer: Offer) -> float:
        """What is to be least: seconds, dollars, or chip-hours where there is no price."""
        if self.by_time:
            return offer.seconds
        return offer.chip_hours if offer.cost is None else offer.cost

    def on(self, machine: Machine) -> Offer | NoOffer:
        """A machine as it is."""
        try:
            offer = self.offer(machine)
        except MeshwrightError as mistake:
            return NoOffer(str(machine), str(mistake))
        if offer is None:
            return NoOffer(str(machine), "fits on no mesh")
        if offer.seconds > self.run.within:
            return NoOffer(str(machine), f"too slow: {said(offer)}")
        if self.run.budget < math.inf and offer.cost is None:
            return NoOffer(str(machine), _NO_PRICE)
        if offer.cost is not None and offer.cost > self.run.budget:
            return NoOffer(str(machine), f"too expensive: {said(offer)}")
        return offer

    def sized(self, chip: Chip) -> Offer | NoOffer:
        """The size of a chip that answers the question."""
        price = self.price(chip)
        if self.run.budget < math.inf and price is None:
            return NoOffer(chip.name, _NO_PRICE)
        best: Offer | None = None
        passed: list[Offer] = []  # smaller sizes that were the best before
        bounds: Bounds = {}
        worse = 0
        try:
            for machine in machine_sizes(chip, MOST_CHIPS):
                an_hour = machine.num_chips * (price.dollars if price else 1.0)
                longest = min(self.run.within, self.run.budget / an_hour * 3600)
                if self.least_seconds(machine) > longest:
                    continue
                longest = math.nextafter(longest, math.inf)
                if best is not None:
                    better = self.order(best)
                    if not self.by_time:
                        better *= 3600 / an_hour
                    longest = min(longest, better)
                offer = self.offer(machine, longest, bounds)
                if offer is not None:
                    passed += [] if best is None else [best]
                    best, worse = offer, 0
                elif best is not None:
                    worse += 1
                    if worse == WORSE:
                        break
        except MeshwrightError as mistake:
            return NoOffer(chip.name, str(mistake))
        if best is None:
            return NoOffer(chip.name, f"no size up to {MOST_CHIPS:,} chips does it")
        most = HARDLY_MORE * self.order(best)
        near = [one for one in passed if self.order(one) <= most and not self.by_time]
        return dataclasses.replace(best, smaller=near[0] if near else None)

    def least_seconds(self, machine: Machine) -> float:
        """Of the whole run, if every chip did nothing but large matmuls."""
        chip, large = machine.chip, math.inf
        rate = chip.bf16_flops * efficiency.matmul(chip, large)
        if self.config.compute.matmul == "fp8":
            rate *= efficiency.fp8(chip, large)
        if self.like:
            rate *= stack_like(self.like, chip, self.config.compute.matmul, self.config.seq).matmul
        return self.run.tokens * self.flops_per_token / rate / machine.num_chips

    @cached_property
    def flops_per_token(self) -> float:
        return flops_per_token(self.workload(_ONE_GPU)[0])

    @cached_property
    def checkpoint(self) -> int:
        return checkpoint_bytes(self.workload(_ONE_GPU)[0])

    def workload(self, machine: Machine) -> tuple[Workload, Constraints]:
        key = "workload", machine.chip  # nothing that is checked depends on the number of chips
        if key not in self.memo:
            self.memo[key] = _workload(self.config, machine, self.limits, self.model)
        workload, limits = self.memo[key]
        return dataclasses.replace(workload, machine=machine, memo=self.memo), limits

    def offer(
        self, machine: Machine, below: float = math.inf, bounds: Bounds | None = None
    ) -> Offer | None:
        """The run on a machine; None if it does not fit or does not take less than so long."""
        goodput = self.run.long_run.goodput(machine.num_chips, self.checkpoint)
        tokens = self.config.batch * self.config.seq
        a_second = self.run.tokens / tokens / goodput  # of the run, for each of a step
        workload, limits = self.workload(machine)
        workload = workload.running_like(self.like)
        found = fastest(workload, limits, below / a_second, bounds)
        if found is None:
            return None
        seconds, price = a_second * found.seconds, self.price(machine.chip)
        rate = tokens / found.seconds
        return Offer(machine, estimated(found), rate, goodput, seconds, price)


def said(offer: Offer) -> str:
    """`"12d 03h and $1.20M on v5p:8x8x8"`."""
    cost = "" if offer.cost is None else f" and ${amount(offer.cost)}"
    return f"{duration_text(offer.seconds)}{cost} on {offer.machine}"


def _impossible(ask: _Ask, machines: list[Machine | Chip], refused: list[NoOffer]) -> str:
    """Why no machine can do a run, and what the nearest to it would take."""
    run = ask.run
    whys = "; ".join(f"{one.name}: {one.why}" for one in refused)
    if run.within == run.budget == math.inf:
        return whys
    limits = [f"within {duration_text(run.within)}"] * (run.within < math.inf)
    limits += [f"for ${amount(run.budget)}"] * (run.budget < math.inf)
    problem = f"no machine trains {amount(run.tokens)} tokens {' and '.join(limits)}"
    if run.budget < math.inf:
        ask = dataclasses.replace(ask, run=dataclasses.replace(run, budget=math.inf))
        answers = [_answer(ask, one) for one in machines]
        priced = [one for one in answers if isinstance(one, Offer) and one.cost is not None]
        if priced:
            return f"{problem}; the cheapest takes {said(min(priced, key=ask.order))}"
    shortest: Offer | None = None
    for one in machines:
        sizes = [one] if isinstance(one, Machine) else list(machine_sizes(one, MOST_CHIPS))
        with contextlib.suppress(MeshwrightError):  # what this machine is refused for
            for size in reversed(sizes):  # the largest first: few of the others are faster
                below = math.inf if shortest is None else shortest.seconds
                if ask.least_seconds(size) < below:
                    shortest = ask.offer(size, below) or shortest
    if shortest is None:
        return f"{problem}: {whys}"
    return f"{problem}; the shortest takes {said(shortest)}"
