"""The one exception a user's mistake raises: the command line prints it as a single line and exits with 2."""


class UserError(ValueError):
    """Input that breaks a rule of this package.

    The message is one line that names the rule, what was found, and the remedy.
    """
