"""Two processes save what one restores, and the other way round; a failure of one is known to both."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S
from tests.processes import free_port

pytestmark = pytest.mark.slow  # starting jax in several processes takes 10 to 30 s

PROGRAM = """
import json, sys, time, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp, numpy as np, optax
process, processes, port, folder, job = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8 // processes)
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=process)
from jax.sharding import NamedSharding, PartitionSpec as P
import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.launch import StoreAgreement

def state_on(mesh, step):
    def make():
        w = jax.random.normal(jax.random.key(step), (64, 48))
        params = {"w": w, "b": jnp.arange(16, dtype=jnp.bfloat16) / 7}
        return {
            "params": params,
            "optimizer": optax.adamw(1e-3).init(params),
            "step": jnp.int32(step),
            "key": jax.random.key(step),
        }
    def place(x):
        return NamedSharding(mesh, P(*["fsdp", "tp"][: x.ndim]))
    shape = jax.eval_shape(make)
    whole = jax.jit(make)()  # in every process the same, then each keeps its part
    def cut(x, s):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(x))
            return jax.random.wrap_key_data(jax.make_array_from_callback(data.shape, s, lambda i: data[i]))
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, s, lambda i: x[i])
    placed = jax.tree.map(cut, whole, jax.tree.map(place, shape))
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)), shape)
    return placed, targets

def same(a, b):
    def equal(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        return x.sharding == y.sharding and all(
            np.asarray(s.data).tobytes() == np.asarray(t.data).tobytes()
            for s, t in zip(x.addressable_shards, y.addressable_shards, strict=True)
        )
    return all(jax.tree.leaves(jax.tree.map(equal, a, b)))

def error_of(call, *arguments):
    try:
        call(*arguments)
    except mw.MeshwrightError as error:
        return {"error": str(error)}
    return {"error": None}
"""

SAVE = """
mesh = mw.mesh("fsdp=4,tp=2")
checkpoints = Checkpoints(folder, keep_last=None)
found = {}
if job == "save in two":
    checkpoints.save(1, state_on(mesh, 1)[0], {"by": processes})
    checkpoints.wait()
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if process == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    checkpoints.save(2, state_on(mesh, 2)[0], {})
    found["full"] = error_of(checkpoints.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.save(3, state_on(mesh, 3)[0], {"by": processes}, True)
    checkpoints.save(7, state_on(mesh, 7)[0], {}, True)
    checkpoints.confirm(3)
    from pathlib import Path
    found["aside"] = checkpoints.set_aside_after(3, Path(folder, "none")) is not None
    found["first"] = StoreAgreement("test").from_first(f"from process {process}")
    found["healthy"] = checkpoints.healthy()
    found["steps"] = checkpoints.steps()
    apart = Checkpoints(folder + f"/apart{process}")
    found["apart"] = error_of(apart.save, 1, state_on(mesh, 1)[0], {})
    found["alone"] = error_of(checkpoints.save, 4, {"x": jnp.ones(3)}, {})
    found["steps differ"] = error_of(checkpoints.save, 5 + process, state_on(mesh, 1)[0], {})
else:
    for step in (5, 6):
        checkpoints.save(step, state_on(mesh, step)[0], {"by": processes})
    checkpoints.wait()
checkpoints.close()
print(json.dumps(found))
"""

RESTORE = """
checkpoints = Checkpoints(folder)
found = {"same": []}
for step in json.loads(job):
    for mesh in (mw.mesh("fsdp=4,tp=2"), mw.mesh("fsdp=8,tp=1"), mw.mesh("fsdp=2,tp=4")):
        expected, targets = state_on(mesh, step)
        if step == 6:
            found["lost"] = error_of(checkpoints.restore, 6, targets)
            break
        found["same"].append(same(checkpoints.restore(step, targets), expected))
        found["by"] = checkpoints.meta(step)["by"]
print(json.dumps(found))
"""


def run(program: str, processes: int, folder: Path, job: str) -> list[dict[str, Any]]:
    port = free_port()
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM + program,
                str(i),
                str(processes),
                port,
                str(folder),
                job,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    results = []
    for process in started:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err[-3000:]
        assert "absl" not in err
        assert "orbax" not in err
        results.append(json.loads(out.strip().splitlines()[-1]))
    return results


def test_two_save_and_one_restores(tmp_path: Path) -> None:
    for process, found in enumerate(run(SAVE, 2, tmp_path, "save in two")):
        assert found["aside"] is (process == 0)
        assert found["first"] == "from process 0"
        assert found["healthy"] == [3]
        assert found["full"]["error"].startswith("process 1: step 2 was not saved")
        assert "File too large" in found["full"]["error"]
        assert found["steps"] == [1, 3]
        assert "must be on a disk that all processes share" in found["apart"]["error"]
        assert "'x' is on this process only" in found["alone"]["error"]
        assert (
            "process 0 is at saving step 5, process 1 at saving step 6"
            in found["steps differ"]["error"]
        )
    [found] = run(RESTORE, 1, tmp_path, "[1, 3]")
    assert found == {"same": [True] * 6, "by": 2}


def test_one_saves_and_two_restore(tmp_path: Path) -> None:
    run(SAVE, 1, tmp_path, "save in one")
    lose_the_last_rows(tmp_path / "step-00000006")
    for found in run(RESTORE, 2, tmp_path, "[5, 6]"):
        assert found["same"] == [True] * 3
        assert found["by"] == 1
        # process 1 alone has the rows that are lost
        assert "process 1: " in found["lost"]["error"]
        assert "'params/w' cannot be read" in found["lost"]["error"]


def lose_the_last_rows(step: Path) -> None:
    import dataclasses

    import tensorstore as ts

    from meshwright.checkpoint.record import list_files, read_record, write_record

    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/arrays/"}).result()
    assert b"params.w/3.1" in store.list().result()
    store.delete_range(ts.KvStore.KeyRange(b"params.w/3.1", b"params.w/3.1\0")).result()
    write_record(step, dataclasses.replace(read_record(step), files=list_files(step)))
