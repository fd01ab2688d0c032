"""The one exception a user's mistake raises: the command line prints it as a single line and exits with 2."""

from collections.abc import Mapping


class UserError(ValueError):
    """Input that breaks a rule of this package.

    The message is one line that names the rule, what was found, and the remedy.
    """


def require_at_least(least: int, values: Mapping[str, int | None]) -> None:
    """Refuse settings that are too small.

    Args:
        least: The smallest that is allowed.
        values: What was set, by name; None was left out.

    Raises:
        UserError: One is smaller.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}; found {value}; set it to {least} or more")
