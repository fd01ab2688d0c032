"""What is held out: one set, or several with names."""

import re
from collections.abc import Callable, Mapping, Sequence

from qerl_pl.datamodules.rows import Row, checked_rows
from qerl_pl.errors import UserError


def sets_by_name(
    named: Mapping[str, Sequence[Row]], single: Callable[[], Sequence[Row] | None], owner: str
) -> Mapping[str, Sequence[Row]] | None:
    """The sets of a data module; where there is only one its name is empty, for its metrics need none.

    Args:
        named: what the data module has by name.
        single: gives the one set where there are none; None: it has none either.
        owner: the data module's class.

    Raises:
        UserError: a name cannot be part of a metric's, or what is given are no rows.
    """
    if not isinstance(named, Mapping):
        raise UserError(f"{owner} must give its sets by name; found {named!r:.60}; return a dictionary of rows.")
    for name in named:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
            raise UserError(f"sets are named by letters, digits, and . + - _; found {name!r}; rename it.")
    sets = {name: checked_rows(rows, f"{owner}'s set {name}") for name, rows in named.items()}
    if len(sets) > 1:
        return sets
    rows = next(iter(sets.values())) if sets else single()
    return None if rows is None else {"": checked_rows(rows, f"{owner}.{single.__name__}")}
