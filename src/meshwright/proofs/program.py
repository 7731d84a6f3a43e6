"""Plan and prove any jax function: plain, jitted, a step of Flax NNX or of Equinox.

The function is traced here with the shardings of its arguments, whose mesh need not have devices.
jax.export makes a program of it that another process compiles: for simulated CPUs as far as XLA's
partitioner, which is the plan, and with the machine's own compiler, which is the proof.
"""

import contextlib
import dataclasses
import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.audits import Audit, audit
from meshwright.errors import MeshwrightError
from meshwright.machines import Machine, check_slice
from meshwright.planner import ProgramPlan, plan_partitioned
from meshwright.present import bytes_text, count, mesh_text, table_text
from meshwright.proofs.compare import Comparison, compare_program, comparison_table
from meshwright.proofs.proof import Progress, Proof, proved
from meshwright.proofs.target import check_extra

_PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}


@dataclasses.dataclass(frozen=True, repr=False)
class ProgramProof(Proof):
    """What a machine's compiler made of a program, beside its plan."""

    plan: ProgramPlan | None = None

    @functools.cached_property
    def audit(self) -> Audit | None:
        """Every collective of the compiled program, with its source; None if it has none."""
        return None if self.footprint is None else audit(self.text, self.mesh or None)

    @property
    def compared(self) -> tuple[Comparison, ...]:
        """Memory and traffic, planned and compiled."""
        return () if self.plan is None else compare_program(self.plan, self, self.audit)

    def __str__(self) -> str:
        """The verdict, plan beside compiler, time, and every collective."""
        parts = [repr(self)]
        if self.footprint is not None:
            kinds = ((kind, size) for kind, size in self.footprint.kinds.items() if size)
            parts.append(", ".join(f"{kind} {bytes_text(size)}" for kind, size in kinds))
        if self.compared:
            parts += ["", table_text(*comparison_table(self.compared))]
        if self.plan is not None:
            parts += ["", table_text(*self.plan.time_table)]
        return "\n".join([*parts, "", str(self.audit)] if self.audit is not None else parts)


def plan_program(
    function: Callable[..., Any],
    args: Sequence[Any],
    on: Machine | str,
    *,
    cache: Path | bool = True,
    progress: Progress | None = None,
) -> ProgramPlan:
    """What a function of these arguments would hold, send and take on a machine."""
    machine = Machine.parse(on)
    return _planned(_traced(function, args, machine), machine, cache, progress)


def _planned(
    traced: "_Traced", machine: Machine, cache: Path | bool, progress: Progress | None
) -> ProgramPlan:
    simulated = Machine.parse(f"cpu:{machine.num_devices}")
    check_extra(simulated)
    proof = _compiled(traced, simulated, True, cache, progress)
    assert proof.sizes is not None
    return plan_partitioned(proof.text, traced.name, machine, traced.mesh, proof.sizes)


def prove_program(
    function: Callable[..., Any],
    args: Sequence[Any],
    on: Machine | str,
    *,
    cache: Path | bool = True,
    progress: Progress | None = None,
) -> ProgramProof:
    """Compile a function of these arguments for a machine; a program that fits not is a proof too.

    The arguments' shardings say what lies where; what the function donates is donated.
    """
    machine = Machine.parse(on)
    check_slice(machine.chip, machine.shape, machine.slices, str(machine))
    check_extra(machine)
    traced = _traced(function, args, machine)
    planned = None
    with contextlib.suppress(MeshwrightError):  # of a kernel that only the machine has
        planned = _planned(traced, machine, cache, None)
    made = _compiled(traced, machine, False, cache, progress)
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(Proof)}
    return ProgramProof(**fields, plan=planned)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function of flat arrays, and what is known of them."""

    name: str
    function: Any  # jitted
    arrays: tuple[Any, ...]
    mesh: Mapping[str, int]
    axis_types: str
    specs: tuple[PartitionSpec, ...]
    donated: tuple[int, ...]


def _traced(function: Any, args: Sequence[Any], machine: Machine) -> _Traced:
    """The function with its arguments' arrays in a list; everything else of them is fixed."""
    if not isinstance(args, tuple | list):
        raise MeshwrightError(
            f"args is {type(args).__name__}; give the function's arguments as a tuple, (x,) if "
            "there is one"
        )
    name = getattr(function, "__name__", None) or type(function).__name__
    leaves, tree = jax.tree.flatten(tuple(args))
    arrays = tuple(leaf for leaf in leaves if _is_array(leaf))
    mesh = _mesh_of(arrays)
    _check_mesh(name, mesh, machine)
    specs = tuple(leaf.sharding.spec if _named(leaf) else PartitionSpec() for leaf in arrays)
    abstract = tuple(_abstract(leaf, spec, mesh) for leaf, spec in zip(arrays, specs, strict=True))

    def flat(*values: Any) -> list[Any]:
        given = iter(values)
        rebuilt = jax.tree.unflatten(
            tree, [next(given) if _is_array(leaf) else leaf for leaf in leaves]
        )
        result = function(*rebuilt)
        # what is changed in place, as the parameters of NNX are, is a result as well
        known = {id(value) for value in values}
        outputs = jax.tree.leaves((result, rebuilt))
        return [leaf for leaf in outputs if _is_array(leaf) and id(leaf) not in known]

    flat.__name__ = name
    with _inside(mesh):
        donated = _donated(jax.jit(flat).trace(*abstract).jaxpr)
    types = {str(kind) for kind in mesh.axis_types} if mesh is not None else set()
    explicit = types == {str(AxisType.Explicit)}
    return _Traced(
        name, jax.jit(flat), abstract, {} if mesh is None else dict(mesh.shape),
        "explicit" if explicit else "auto", specs, donated,
    )  # fmt: skip


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _mesh_of(arrays: Sequence[Any]) -> Any:
    """The one mesh of the arguments' shardings, or the current one; None if there is none."""
    found = [leaf.sharding.mesh for leaf in arrays if _named(leaf)]
    sizes = {tuple(mesh.shape.items()) for mesh in found}
    if len(sizes) > 1:
        listed = " and ".join(f"'{mesh_text(dict(shape))}'" for shape in sorted(sizes))
        raise MeshwrightError(f"the arguments lie on different meshes, {listed}; give them one")
    if found:
        return found[0]
    current = jax.sharding.get_abstract_mesh()
    return None if current.empty else current


def _named(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and bool(sharding.mesh.axis_names)


def _abstract(leaf: Any, spec: PartitionSpec, mesh: Any) -> jax.ShapeDtypeStruct:
    """As the program is traced: on the arguments' mesh, whether its devices are here or not."""
    if mesh is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    own = leaf.sharding if _named(leaf) else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own)


def _check_mesh(name: str, mesh: Any, machine: Machine) -> None:
    has = count(machine.num_devices, "device")
    if mesh is None and machine.num_devices > 1:
        raise MeshwrightError(
            f"no argument of {name} has a sharding, so it runs on one device, and '{machine}' has "
            f"{has}; give jax.ShapeDtypeStructs with a NamedSharding on "
            f"mw.mesh('fsdp={machine.num_devices}', '{machine}').abstract_mesh"
        )
    if mesh is not None and mesh.size != machine.num_devices:
        raise MeshwrightError(
            f"the arguments of {name} lie on mesh '{mesh_text(dict(mesh.shape))}', which needs "
            f"{count(mesh.size, 'device')}, and '{machine}' has {has}"
        )


@contextlib.contextmanager
def _inside(mesh: Any) -> Iterator[None]:
    """The arguments' mesh is the current one, so that bare PartitionSpecs are understood."""
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
        yield


def _donated(jaxpr: Any) -> tuple[int, ...]:
    """Arguments that a jitted function inside takes over."""
    numbers = {id(variable): i for i, variable in enumerate(jaxpr.jaxpr.invars)}
    return tuple(
        sorted(
            {
                numbers[id(variable)]
                for one in jaxpr.jaxpr.eqns
                for variable, given in zip(
                    one.invars, one.params.get("donated_invars", ()), strict=False
                )
                if given and id(variable) in numbers
            }
        )
    )


def _compiled(
    traced: _Traced, machine: Machine, partitioned: bool, cache: Path | bool,
    progress: Progress | None,
) -> Proof:  # fmt: skip
    """The program, exported and compiled by another process."""
    import jax.export

    platform = _PLATFORMS[machine.chip.platform]
    try:
        with _inside(traced.arrays[0].sharding.mesh if traced.mesh else None):
            exported = jax.export.export(traced.function, platforms=(platform,))(*traced.arrays)
    except (NotImplementedError, ValueError) as reason:
        if "lowering" not in str(reason) and "platform" not in str(reason):
            raise
        raise MeshwrightError(
            f"{traced.name} has an operation that is not known for {platform}: "
            f"{str(reason).splitlines()[0]}"
        ) from None
    mesh = mesh_text(traced.mesh) if traced.mesh else ""
    request: dict[str, Any] = {
        "program": hashlib.sha256(exported.mlir_module_serialized).hexdigest(),
        "mesh": mesh,
        "axis_types": traced.axis_types,
        "specs": [[_entry(axes) for axes in spec] for spec in traced.specs],
        "donated": list(traced.donated),
        "partitioned": partitioned,
    }
    # without the function that makes its derivative, which no other process can have
    program = pickle.dumps(dataclasses.replace(exported, _get_vjp=None))
    return proved(request, machine, mesh, cache, progress, {"program.pickle": program})


def _entry(axes: Any) -> Any:
    return list(axes) if isinstance(axes, tuple) else axes
