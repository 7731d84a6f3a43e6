"""A deployment under load: replicas, and how long clients wait for a first and a next token.

    load = Load(rate=20, prompt=1000, output=200, first_token=0.5, per_token=0.05)
    offers = deployments(TrainConfig("llama-3.1-8b"), [CHIPS["h100"], CHIPS["l40s"]], load)
    offers.best.replicas, offers.best.waits.first_token(99)

Requests arrive at random (Poisson), with prompts and answers of uniform lengths. The engine's own
scheduler (serving/scheduler.py) decides what each step computes; how long a step takes is what the
schedule of the engine counts. So a queue is simulated, not assumed: chunks of prompts delay decode
tokens, and pages run out, as in the engine.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence

from meshwright.errors import MeshwrightError
from meshwright.lazy import without_collector
from meshwright.machines import Catalogue, Chip, Machine, Price, machine_sizes
from meshwright.models import encodes_prompts, model_config, override
from meshwright.planner.constraints import Constraints
from meshwright.planner.machines_compared import NoOffer
from meshwright.planner.planner import engine_setting
from meshwright.planner.processes import in_processes
from meshwright.planner.result import Estimate
from meshwright.planner.schedules.engine_time import Costs
from meshwright.planner.search import allowed_meshes
from meshwright.planner.serving import search_serving
from meshwright.planner.simulation import Limits, Request, Simulator, Waits
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Choice, Workload
from meshwright.present import seconds_text
from meshwright.serving import EngineConfig
from meshwright.training import AUTO, TrainConfig

BATCHES = (32, 128, 256)  # max_batch of an engine, where none is given
SMALLER = (16, 8, 4, 2, 1)  # where the memory is too small for those
MOST_CHIPS = 8  # of a replica
_NAMED = 64  # up to which one is proposed
_TRIED = 200  # requests of a simulation while a rate is looked for
_SHOWN = 1000  # of the one whose times are shown
_ROUNDS = 5  # of bisection: the rate is within 3% of the highest
_GROWTHS = 8  # by an eighth, of replicas that a longer simulation finds too few


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests, and how long a client may wait at a percentile. Times are in seconds."""

    rate: float  # requests a second
    prompt: int  # tokens, on average
    output: int
    first_token: float = 0.5
    per_token: float = 0.05
    percentile: float = 99.0
    spread: float = 0.75  # lengths are uniform from 1 - spread to 1 + spread of the average

    def __post_init__(self) -> None:
        for name in ("rate", "prompt", "output", "first_token", "per_token"):
            if not 0 < getattr(self, name) < math.inf:
                raise MeshwrightError(f"{name}={getattr(self, name)} must be a number above 0")
        if not 0 < self.percentile < 100:
            raise MeshwrightError(f"percentile={self.percentile} must be between 0 and 100")

    @property
    def limits(self) -> Limits:
        return Limits(self.first_token, self.per_token, self.percentile)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return sum(math.ceil((1 + self.spread) * size) for size in (self.prompt, self.output))

    def requests(self, rate: float, count: int) -> Iterator[Request]:
        """When each comes, and the tokens of its prompt and answer; the same at every call."""
        drawn, now = random.Random(0), 0.0
        for _ in range(count):
            now += drawn.expovariate(rate) if rate < math.inf else 0.0
            prompt, output = (
                max(1, round(size * drawn.uniform(1 - self.spread, 1 + self.spread)))
                for size in (self.prompt, self.output)
            )
            yield now, prompt, output


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Replicas of an engine that serve a load."""

    machine: Machine  # of one replica
    estimate: Estimate
    max_batch: int
    highest_rate: float  # requests a second of one replica, with the waits that are allowed
    replicas: int
    waits: Waits  # of one replica with its part of the load
    price: Price | None

    @property
    def chips(self) -> int:
        return self.replicas * self.machine.num_chips

    @property
    def dollars_per_hour(self) -> float | None:
        return None if self.price is None else self.chips * self.price.dollars

    def dollars_per_million(self, load: Load) -> float | None:
        """Dollars for a million tokens of answers."""
        hourly = self.dollars_per_hour
        return None if hourly is None else hourly / (load.rate * load.output * 3600) * 1e6


@dataclasses.dataclass(frozen=True)
class Deployments:
    """The deployments for a load, the cheapest first, and machines that cannot serve it."""

    model: str
    load: Load
    found: tuple[Deployment, ...]
    refused: tuple[NoOffer, ...]
    unpriced: tuple[str, ...] = ()  # chips that `any` leaves out
    dtype: str = AUTO  # of weights and cache, as `meshwright serve` takes it

    @property
    def best(self) -> Deployment:
        return self.found[0]


@without_collector()
def deployments(
    config: TrainConfig,
    machines: Sequence[Machine | Chip],
    load: Load,
    limits: Constraints | None = None,
    *,
    catalogue: Catalogue | None = None,
    batches: Sequence[int] | None = None,
    weights: str | None = None,
    cache: str | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> Deployments:
    """The cheapest deployment of each machine or chip, the cheapest first.

    A machine with a size is one replica. Of a chip, replicas of 1 to 8 chips are tried, with each
    of the `batches` (by default BATCHES, or the largest of SMALLER that fits) as an engine's
    max_batch. By price; where none is known, by the number of chips. `weights` and `cache` are an
    engine's. `progress` is called with the number of machines that are done.
    """
    catalogue, limits = catalogue or Catalogue(), limits or Constraints()
    fixed = {
        name: None if value is None else engine_setting("serve", name, value)
        for name, value in {"weights": weights, "cache": cache}.items()
    }
    limits = dataclasses.replace(limits, fixed={**limits.fixed, **fixed})
    config = dataclasses.replace(config, seq=load.longest)
    _check_model(config)

    def answer(one: Machine | Chip) -> Deployment | NoOffer:
        sizes = [one] if isinstance(one, Machine) else list(machine_sizes(one, MOST_CHIPS))
        name = str(one) if isinstance(one, Machine) else one.name
        fitting = [machine for machine in sizes if _has_mesh(config, machine, limits)]
        if not fitting:
            return NoOffer(name, _no_mesh(config, sizes, limits))
        price = catalogue.prices.get(sizes[0].chip.name)
        tried = [
            each for machine in fitting for each in _replicas(config, machine, limits, batches)
        ]
        best, why = _cheapest([each for each in tried if isinstance(each, _Replica)], load, price)
        if best is not None:
            return best
        # the last machine is the largest, and its last batch the smallest that was tried
        return NoOffer(name, why or str(tried[-1]))

    found: list[Deployment] = []
    refused: list[NoOffer] = []
    for done, each in enumerate(in_processes(answer, machines), 1):
        if isinstance(each, Deployment):
            found.append(each)
        else:
            refused.append(each)
        progress(done)
    if not found:
        raise MeshwrightError(
            f"no machine serves {load.rate:g} requests a second as asked: "
            + "; ".join(f"{one.name}: {one.why}" for one in refused)
        )
    offers = tuple(sorted(found, key=_order))
    return Deployments(config.model, load, offers, tuple(refused), dtype=config.compute.dtype)


def _check_model(config: TrainConfig) -> None:
    """Raise if an engine would not serve such requests, or not as it is simulated."""
    model = override(model_config(config.model), config.override, config.seq)
    if encodes_prompts(model):
        raise MeshwrightError(
            f"{config.model} reads prompts with an encoder, and only decoders are simulated under "
            "a load; leave --requests out to plan one replica"
        )
    if config.seq > model.max_seq:
        raise MeshwrightError(
            f"the longest prompt and its answer have {config.seq:,} tokens, and {config.model} "
            f"has {model.max_seq:,} positions; ask for shorter ones"
        )


def _order(one: Deployment) -> tuple[bool, float, int, int]:
    hourly = one.dollars_per_hour
    return hourly is None, hourly or 0.0, one.chips, one.max_batch


def replay(config: TrainConfig, machine: Machine, requests: Sequence[Request]) -> Waits:
    """What clients of one replica would see of requests whose times and lengths are known.

    Each is the second it comes, and the tokens of its prompt and answer; config.batch is max_batch.
    """
    longest = max(prompt + output for _, prompt, output in requests)
    replica = _replica(dataclasses.replace(config, seq=longest), machine, Constraints())
    if isinstance(replica, str):
        raise MeshwrightError(f"{machine} does not serve {config.model}: {replica}")
    return replica.simulate(requests)


def _replicas(
    config: TrainConfig,
    machine: Machine,
    limits: Constraints,
    batches: Sequence[int] | None,
) -> "list[_Replica | str]":
    """Engines on a machine, one for each batch."""

    def replica(batch: int) -> "_Replica | str":
        return _replica(dataclasses.replace(config, batch=batch), machine, limits)

    replicas = [replica(batch) for batch in batches or BATCHES]
    if batches is None and all(isinstance(one, str) for one in replicas):
        for batch in SMALLER:
            replicas.append(replica(batch))
            if isinstance(replicas[-1], _Replica):
                break
    return replicas


def _replica(config: TrainConfig, machine: Machine, limits: Constraints) -> "_Replica | str":
    """An engine on a machine; in a sentence, why there can be none."""
    engine = EngineConfig(max_batch=config.batch, max_length=config.seq)
    workload = Workload.of(config, machine, engine=engine)
    ranked, refused = search_serving(workload, limits, "latency")
    weights = limits.fixed.get("weights")
    single = [one for one in ranked if one.choice.size("dp") == 1 and one.choice.weights == weights]
    if not single:
        whys = [one for one in refused if one.choice.size("dp") == 1]
        nearest = min(whys, key=lambda one: one.memory.total if one.memory else math.inf)
        return f"no mesh fits: {nearest.why} with a batch of {config.batch}"
    return _Replica(workload, single[0])


def _has_mesh(config: TrainConfig, machine: Machine, limits: Constraints) -> bool:
    """Whether a mesh of one replica is within the limits."""
    workload = Workload.of(config, machine, engine=EngineConfig())
    return any(mesh.size("dp") == 1 for mesh in allowed_meshes(workload, limits))


def _no_mesh(config: TrainConfig, sizes: Sequence[Machine], limits: Constraints) -> str:
    """Why no mesh of one replica is within the limits, on none of these machines."""
    for limit in limits.limits:
        alone, axis = Constraints((limit,)), limit[0]
        if axis == "dp" and not alone.allows(Choice.of()):
            return f"a replica has dp=1, and how many are needed is planned; leave '{alone}' out"
        if axis not in ("dp", "tp", "ep") and not alone.allows(Choice.of()):
            return f"an engine splits a model over tp and ep alone; leave '{alone}' out"
    chip, devices = sizes[-1].chip, sizes[-1].num_devices
    why = f"replicas of at most {MOST_CHIPS} chips are tried, and none has '{limits}'"
    if len(sizes) == 1:
        why = f"a replica has dp=1, so that tp is {devices} here, or tp·ep, and not '{limits}'"
    others = (one for one in machine_sizes(chip, _NAMED) if _has_mesh(config, one, limits))
    other = next(others, None)
    instead = "" if other is None else f", or give a machine that it fits: --on {other}"
    return f"{why}; leave it out{instead}"


def _cheapest(
    tried: list["_Replica"], load: Load, price: Price | None
) -> tuple[Deployment | None, str]:
    """The deployment with fewest chips, and of those the smallest batch; or why there is none.

    In the order of what a replica could serve at most, until no other can be better.
    """

    def fewest(one: _Replica) -> int:
        rate = one.costs.highest_rate(load.prompt, load.output)
        return one.machine.num_chips * math.ceil(load.rate / rate)

    best, why = None, ""
    for one in sorted(tried, key=lambda one: (fewest(one), one.engine.max_batch)):
        below = math.inf if best is None else best.chips / one.machine.num_chips
        if fewest(one) >= below * one.machine.num_chips:
            break
        highest = one.highest_rate(load, below)
        if math.ceil(load.rate / highest) >= below:
            continue
        alone = one.waits(load, 1e-3, _TRIED)
        if not alone.meet(load.limits):
            first, each = alone.first_token(load.percentile), alone.per_token(load.percentile)
            why = (
                f"a request that is alone waits {seconds_text(first)} for its first token and "
                f"{seconds_text(each)} for each further one"
            )
            continue
        answer = one.deployment(load, price, highest, below)
        if answer is None:
            continue
        if not answer.waits.meet(load.limits):
            first, each = (
                of(load.percentile) for of in (answer.waits.first_token, answer.waits.per_token)
            )
            why = (
                f"with {answer.replicas:,} replicas, p{load.percentile:g} is still "
                f"{seconds_text(first)} to the first token and {seconds_text(each)} between tokens"
            )
            continue
        best = answer
    return best, why


class _Replica:
    """One engine, whose steps take as long as its schedule counts."""

    def __init__(self, workload: Workload, estimate: Estimate) -> None:
        assert workload.engine is not None
        self.engine, self.machine, self.estimate = workload.engine, workload.machine, estimate
        self.costs = Costs(lambda batch: StepModel(workload.resized(batch), estimate.choice))
        assert estimate.serving is not None
        most = estimate.serving.largest_batch
        pages = 1 + most * -(-workload.seq // self.engine.page_size)
        self.simulator = Simulator(self.engine, pages, self.costs)

    def deployment(
        self, load: Load, price: Price | None, highest: float, below: float
    ) -> Deployment | None:
        """So many of them that clients wait no longer than allowed, where that can be.

        `highest`: requests a second of one. None if that takes `below` replicas or more.
        """
        replicas = math.ceil(load.rate / highest)
        for growths in range(_GROWTHS + 1):  # the longer simulation meets rarer bursts
            requests = list(load.requests(load.rate / replicas, _SHOWN))
            limits = load.limits if growths < _GROWTHS else None  # the last is shown in any case
            waits = self.simulator.simulate(requests, limits)
            if waits is not None and (limits is None or waits.meet(limits)):
                batch = self.engine.max_batch
                shown = self.machine, self.estimate, batch, highest, replicas, waits, price
                return Deployment(*shown)
            replicas += math.ceil(replicas / 8)
            if replicas >= below:
                break
            highest = load.rate / replicas
        return None

    def highest_rate(self, load: Load, below: float = math.inf) -> float:
        """Requests a second with the waits that are allowed, by bisection.

        Not to the end where that takes `below` replicas or more.
        """

        def meets(rate: float) -> bool:
            waits = self.simulator.simulate(list(load.requests(rate, _TRIED)), load.limits)
            return waits is not None and waits.meet(load.limits)

        low, high = 0.0, _TRIED / self.waits(load, math.inf, _TRIED).seconds
        if meets(high):
            return high
        for _ in range(_ROUNDS):
            if load.rate / high >= below:
                return high
            middle = (low + high) / 2
            low, high = (middle, high) if meets(middle) else (low, middle)
        return low or high / 2

    def waits(self, load: Load, rate: float, count: int) -> Waits:
        """Simulate so many requests."""
        return self.simulate(list(load.requests(rate, count)))

    def simulate(self, requests: Sequence[Request]) -> Waits:
        """Requests in the order they come."""
        waits = self.simulator.simulate(requests)
        assert waits is not None  # without limits
        return waits
