"""Placement is the same when the devices belong to several processes."""

import json
import subprocess
import sys

from tests.patience import PATIENCE_S
from tests.processes import free_port

PROGRAM = """
import json, sys
import jax
import numpy as np
process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import meshwright as mw
x = np.arange(64, dtype=np.float32).reshape(8, 8)
mesh = mw.mesh("dp=1,fsdp=-1,tp=4,sp=1")
by_name = mw.shard(x, "a b -> a@fsdp b@tp", mesh=mesh)
by_number = mw.shard(x, "a b -> a* b")
total = jax.jit(lambda a, b: (a + b).sum(), out_shardings=mw.sharding("-> *"))(by_name, by_number)
print(json.dumps({
    "machine": str(mw.Machine.here()),
    "mesh": dict(mesh.shape),
    "held": sorted((s.index[0].start or 0, s.index[1].start or 0) for s in by_name.addressable_shards),
    "same": all(bool((np.asarray(s.data) == x[s.index]).all()) for s in by_name.addressable_shards),
    "total": float(total),
}))
"""


def test_two_processes_of_four_devices_hold_their_own_shards() -> None:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    results = []
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err[-3000:]
        results.append(json.loads(out.strip().splitlines()[-1]))
    for result in results:
        assert result["machine"] == "cpu:8"
        assert result["mesh"] == {"dp": 1, "fsdp": 2, "tp": 4, "sp": 1}
        assert result["same"]
        assert result["total"] == 2 * sum(range(64))
    # fsdp is the slower axis: each process holds one half of the rows, cut in four
    assert [result["held"] for result in results] == [
        [[0, 0], [0, 2], [0, 4], [0, 6]],
        [[4, 0], [4, 2], [4, 4], [4, 6]],
    ]
