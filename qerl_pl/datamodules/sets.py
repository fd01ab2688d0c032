"""What is held out: one set, or several with names."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qerl_pl.datamodules.rows import Row, checked_rows, read_table
from qerl_pl.errors import UserError, require_at_least

_MARK = "####"
_THOUSANDS = re.compile(r"[-+$]*\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?\s*%?")
"""One number whose thousands are told apart; other commas tell answers apart."""


@dataclass(frozen=True)
class TableConfig:
    """A table of questions and answers to validate and test on.

    Args:
        path: Hub name, a JSONL or parquet file, or a folder with one such file a split.
        split: Split of it; a single file is taken as it is.
        subset: Configuration of the hub's data set; local files have none.
        question: Column of the question.
        answer: Column of the answer; of one with a #### what follows the last counts.
        limit: Take the first so many rows; null takes all.
    """

    path: str
    split: str = "test"
    subset: str | None = None
    question: str = "question"
    answer: str = "answer"
    limit: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, {"a set's limit": self.limit})

    def rows(self, name: str) -> list[Row]:
        """Its rows, called after the set's name.

        Raises:
            UserError: It cannot be read, lacks a column, or an answer is empty.
        """
        table = read_table(self.path, self.split, (self.question, self.answer), self.subset)[: self.limit]
        rows = []
        for index, row in enumerate(table):
            _, mark, rest = str(row[self.answer]).rpartition(_MARK)
            reference = rest.strip()
            if mark and _THOUSANDS.fullmatch(reference):
                reference = reference.replace(",", "")
            if not reference:
                raise UserError(f"an answer must not be empty; row {index + 1} of {self.path} has none; correct it.")
            rows.append(Row(f"{name}-{index}", str(row[self.question]), reference))
        return rows


def require_prompts(stage: str, sets: Mapping[str, Sequence[object]], val_size: int) -> None:
    """Refuse to measure nothing: Lightning would end as if all were well.

    Raises:
        UserError: No set has a prompt.
    """
    if not any(sets.values()):
        others = ", and there is no test set" if stage == "test" else ""
        raise UserError(
            f"to {stage} takes prompts that are held out; found none, for data.val_size is {val_size}{others}; "
            "raise it, or name sets by data.sets"
        )


def check_sizes(total: int, held_out: int, batch_size: int) -> None:
    """Refuse a training set that leaves nothing to train on, or less than a batch.

    Args:
        total: prompts in all, or rows, of which some may yet prove too long.
        held_out: how many of them validation takes.
        batch_size: prompts a training batch.

    Raises:
        UserError: too few are left.
    """
    if held_out >= total:
        raise UserError(
            f"val_size must leave prompts to train on; got val_size={held_out} of {total} prompts; lower it."
        )
    if total - held_out < batch_size:
        which = f" ({held_out} of {total} are held out for validation by val_size)" if held_out else ""
        raise UserError(
            f"batch_size must not exceed the training set; got batch_size={batch_size} for {total - held_out} "
            f"prompts{which}; lower {'one of them' if held_out else 'it'}."
        )


def sets_by_name(
    named: Mapping[str, Sequence[Row]],
    single: Callable[[], Sequence[Row] | None],
    owner: str,
    keep_name: bool = False,
) -> Mapping[str, Sequence[Row]] | None:
    """The sets of a data module; where there is only one its name is empty, for its metrics need none.

    Args:
        named: what the data module has by name.
        single: gives the one set where there are none; None: it has none either.
        owner: the data module's class.
        keep_name: whether one set alone keeps its name.

    Raises:
        UserError: a name cannot be part of a metric's, or what is given are no rows.
    """
    if not isinstance(named, Mapping):
        raise UserError(f"{owner} must give its sets by name; found {named!r:.60}; return a dictionary of rows.")
    for name in named:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
            raise UserError(f"sets are named by letters, digits, and . + - _; found {name!r}; rename it.")
    sets = {name: checked_rows(rows, f"{owner}'s set {name}") for name, rows in named.items()}
    if len(sets) > 1 or (sets and keep_name):
        return sets
    rows = next(iter(sets.values())) if sets else single()
    return None if rows is None else {"": checked_rows(rows, f"{owner}.{single.__name__}")}
