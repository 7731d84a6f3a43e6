"""`meshwright COMMAND`: takes care of Ctrl-C, then imports what the command needs."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command: that of the command line, or in a program the one that is given."""
    if arguments is None:
        arguments = sys.argv[1:]
        signal.signal(signal.SIGINT, _stopped)  # at once; what follows takes milliseconds
        atexit.register(gc.freeze)  # a process that ends need not look for what could be freed
        from meshwright.interrupt import end_on_ctrl_c

        end_on_ctrl_c()
    if list(arguments) in (["--version"], ["-V"]):
        from meshwright import __version__

        print(f"meshwright {__version__}")
        return
    from meshwright.cli.commands import run

    run(list(arguments))


def _stopped(*_: object) -> None:
    os.write(2, b"stopped\n")
    os._exit(130)


if __name__ == "__main__":
    main()
