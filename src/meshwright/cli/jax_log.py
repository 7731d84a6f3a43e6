"""jax's errors about its plugins in one line each, without a traceback."""

import logging


def shorten_plugin_errors() -> None:
    """For an accelerator's plugin that is installed where there is no such accelerator."""
    logging.getLogger("jax._src.xla_bridge").addFilter(_in_one_line)


def _in_one_line(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        reason = str(record.exc_info[1]).strip().partition("\n")[0]
        message = record.getMessage().strip().partition("\n")[0]
        record.msg, record.args = "warning: %s: %s; it is not used", (message, reason)
        record.exc_info = record.exc_text = None
    return True
