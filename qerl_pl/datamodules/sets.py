"""What is held out: one set, or several with names."""

import re
from collections.abc import Callable, Mapping, Sequence

from qerl_pl.datamodules.rows import Row
from qerl_pl.errors import UserError


def sets_by_name(
    named: Mapping[str, Sequence[Row]], single: Callable[[], Sequence[Row] | None]
) -> Mapping[str, Sequence[Row]] | None:
    """The sets of a data module; where there is only one its name is empty, for its metrics need none.

    Args:
        named: what the data module has by name.
        single: gives the one set where there are none; None: it has none either.

    Raises:
        UserError: a name cannot be part of a metric's.
    """
    for name in named:
        if not re.fullmatch(r"[\w.+-]+", name):
            raise UserError(f"sets are named by letters, digits, and . + - _; found {name!r}; rename it.")
    if len(named) > 1:
        return named
    rows = next(iter(named.values())) if named else single()
    return None if rows is None else {"": rows}
