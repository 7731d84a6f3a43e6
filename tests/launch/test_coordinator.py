"""jax's private store does what ours promises, in the jax that is installed."""

import subprocess
import sys

from tests.patience import PATIENCE_S
from tests.processes import free_port

PROGRAM = """
import sys
import jax
from meshwright.launch import coordinator_store
assert coordinator_store() is None
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=1, process_id=0)
store = coordinator_store()
print(store.get("a/1"), store.get_all("a/"))
print(store.put_once("a/1", "first"), store.put_once("a/1", "second"), store.get("a/1"))
store.put("a/2", "third")
store.put("a/2", "fourth")
store.put("b/1", "elsewhere")
print(sorted(store.get_all("a/").items()))
"""


def test_text_is_kept_the_first_time_or_every_time() -> None:
    port = free_port()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, port], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "None {}",
        "first first first",
        "[('a/1', 'first'), ('a/2', 'fourth')]",
    ]
