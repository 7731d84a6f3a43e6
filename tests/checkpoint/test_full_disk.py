"""A disk that fills up while saving: said once, nothing lost, and saving continues when there is space."""

import asyncio
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath  # type: ignore[import-untyped]
from tests.patience import PATIENCE_S

from meshwright.checkpoint import orbax_arrays

PROGRAM = """
import json, os, resource, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
import numpy as np
from meshwright.errors import MeshwrightError
from meshwright.checkpoint import Checkpoints
folder, limited = sys.argv[1], sys.argv[2] == "limited"
checkpoints = Checkpoints(folder)
small = {"w": jax.random.normal(jax.random.key(0), (64, 1024))}
big = {"w": jax.random.normal(jax.random.key(0), (4096, 1024))}
checkpoints.save(1, small, {}, wait=True)
if limited:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
errors = []
checkpoints.save(2, big, {})  # fails in the background
try:
    checkpoints.save(3, small, {})
except MeshwrightError as error:
    errors.append(str(error))
steps = [checkpoints.steps()]
left = sorted(os.listdir(folder))
try:
    checkpoints.save(2, big, {}, wait=True)
except MeshwrightError as error:
    errors.append(str(error))
checkpoints.wait()  # said once
checkpoints.save(3, small, {})
checkpoints.close()
steps.append(checkpoints.steps())
target = {"w": jax.ShapeDtypeStruct((64, 1024), np.float32, sharding=small["w"].sharding)}
same = all(bool((checkpoints.restore(s, target)["w"] == small["w"]).all()) for s in (1, 3))
print(json.dumps({"errors": errors, "steps": steps, "left": left, "same": same}))
"""


def check(command: list[str], said: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert len(found["errors"]) == 2
    for error in found["errors"]:
        assert error.startswith("step 2 was not saved: ")
        assert said in error
        assert error.endswith("complete checkpoints there: 1")
    assert found["steps"] == [[1], [1, 3]]
    assert found["left"] == ["step-00000001"]
    assert found["same"]


def test_a_file_system_without_space_loses_nothing(tmp_path: Path) -> None:
    """3 MB of memory as a disk, mounted in a namespace of the program's own."""
    mount = f"mount -t tmpfs -o size=3m none {tmp_path}"
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*inside, mount], capture_output=True).returncode
    ):
        pytest.skip("this machine lets nobody mount a small disk")
    command = f'{mount} && exec "$0" -c "$1" {tmp_path} full'
    check(
        [*inside, command, sys.executable, PROGRAM],
        f"the disk of {tmp_path} is full (0.00 GB free, up to 0.02 GB",
    )


def test_futures_that_orbax_gave_up_are_not_printed_and_others_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As asyncio tells of them: a text, and the traceback of the error nobody asked for."""
    from orbax.checkpoint._src.path import async_path

    orbax_arrays._orbax()
    gone = epath.Path("/nowhere/at/all")
    for write in (lambda: asyncio.run(async_path.write_text(gone, "x")), lambda: gone.read_text()):
        try:
            write()
        except OSError as error:
            told = (type(error), error, error.__traceback__)
            logging.getLogger("asyncio").error(
                "Future exception was never retrieved", exc_info=told
            )
    assert len(caplog.records) == 1
    assert "read_text" in caplog.text


def test_a_limit_on_file_sizes_loses_nothing(tmp_path: Path) -> None:
    check([sys.executable, "-c", PROGRAM, str(tmp_path), "limited"], "File too large")
