"""Warnings of what one rank alone has met."""

import logging

from torch import distributed


def warn_of_this_rank(log: logging.Logger, message: str, *arguments: object) -> None:
    """Log a warning that a user reads whichever rank has it, named with the rank where there are several.

    The command line keeps away what ranks above 0 log up to warnings, for the first one says the same.

    Args:
        log: What logs it.
        message: With places for the arguments.
        arguments: Those.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        message, arguments = f"rank %d: {message}", (distributed.get_rank(), *arguments)
    if log.getEffectiveLevel() <= logging.WARNING:  # `warning` would also ask what `logging.disable` keeps away
        log.handle(log.makeRecord(log.name, logging.WARNING, __file__, 0, message, arguments, None))
