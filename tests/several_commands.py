"""`python several_commands.py COMMANDS OUT`: see `tests.processes.run_commands`."""

import contextlib
import io
import json
import resource
import signal
import sys
from pathlib import Path

import jax

from meshwright.cli.main import main

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
ended = []
for arguments in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    if arguments[0] == "[limit]":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(arguments[1]), hard))
        continue
    if arguments[0] == "[python]":
        exec(arguments[1])
        continue
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    ended.append((code, out.getvalue(), err.getvalue()))
Path(sys.argv[2]).write_text(json.dumps(ended))
