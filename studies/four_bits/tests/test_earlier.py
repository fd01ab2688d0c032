"""The earlier study's page is that of its rows; its differences and gaps worked by hand."""

import json
from typing import Any

import pytest

from studies.four_bits.earlier import FOLDER, GREEDY, by_rounding, page, paired, sixths


def row(method: str, rounding: int, seed: int, accuracy: float, rewards: list[float | None]) -> dict[str, Any]:
    levels = {"policy": "qwen", "method": method, "rounding": rounding, "seed": seed}
    return {"levels": levels, "held_out": {GREEDY: [[0, 0.9], [192, accuracy]]}, "curves": {"reward": rewards}}


ROWS = [
    row("lora16", 0, 100, 0.30, [0.1] * 12),
    row("lora16", 0, 101, 0.40, [0.1] * 12),
    row("lora16", 1, 102, 0.50, [0.1] * 12),
    row("nvfp4_aqn", 1, 102, 0.45, [0.1] * 10 + [0.2, None]),  # another order; a rollout's reward was lost
    row("nvfp4_aqn", 0, 101, 0.42, [0.1] * 10 + [0.2, 0.2]),
    row("nvfp4_aqn", 0, 100, 0.26, [0.1] * 10 + [0.2, 0.2]),
    row("nvfp4_aqn", 2, 104, 0.99, [0.9] * 12),
]


def test_seeds_are_paired_and_averaged_within_a_rounding() -> None:
    assert by_rounding({(1, 5): 0.5, (0, 1): 0.1, (0, 2): 0.3}) == {0: pytest.approx(0.2), 1: 0.5}
    found = paired(ROWS, "qwen", "nvfp4_aqn", "lora16", GREEDY)
    assert found == {0: pytest.approx(-0.01), 1: pytest.approx(-0.05)}  # nothing to pair rounding 2 with


def test_gaps_are_of_each_sixth_of_the_rollouts() -> None:
    assert sixths(ROWS[:6]) == pytest.approx([0, 0, 0, 0, 0, 0.1])


def test_the_page_is_that_of_the_rows() -> None:
    rows = [json.loads(line) for line in (FOLDER / "earlier.jsonl").read_text().splitlines()]
    assert len(rows) == 110 and (FOLDER / "earlier.md").read_text() == page(rows)
