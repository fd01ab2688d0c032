"""Losses, corrections and advantages against what TRL's and verl's functions returned for the same batch.

`python -m studies.loss_parity` calls those functions and writes the batch and their results.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from studies.loss_parity.pieces import CORRECTIONS, OURS, Batch, from_lists, largest_difference

RECORDED = json.loads((Path(__file__).parents[1] / "loss_parity.json").read_text())["results"]
BATCH = Batch.from_json(RECORDED["batch"])
PIECES = RECORDED["pieces"]


@pytest.mark.parametrize("recorded", PIECES, ids=[f"{one['piece']}: {one['peer']}" for one in PIECES])
def test_results_are_those_of_the_other_package(recorded: dict[str, Any]) -> None:
    expected = {name: from_lists(values) for name, values in recorded["results"].items()}
    size, close = largest_difference(OURS[recorded["piece"]](BATCH), expected)
    assert close == (not recorded["differs"])
    assert size == pytest.approx(recorded["difference"], rel=1e-3, abs=1e-7)


def test_every_piece_is_compared() -> None:
    assert {one["piece"] for one in PIECES} == set(OURS)
    assert {one["peer"].split()[0] for one in PIECES} == {"TRL", "verl"} and len(PIECES) > 55


GRPO, BNPO = "GRPO with KL penalty k3", "BNPO"
CHANGES = {
    "DAPO, clip-higher": BNPO,
    "Dr. GRPO": BNPO,
    "two-sided clip, delta 1.5": BNPO,
    "advantages over the batch's standard deviation, in the loss": GRPO,
    "GSPO with token truncation": "GSPO",
    "GSPO with sequence truncation": "GSPO",
    "CISPO, both bounds": "CISPO",
    **{f"loss with {name}": GRPO for name in CORRECTIONS},
    **{f"loss of a token mean with {name}": BNPO for name in CORRECTIONS},
    "advantages, group, with unscored completions": "advantages, group",
    "advantages, rloo": "advantages, none",
    "entropy bonus of a token mean": BNPO,
}
"""Pieces with a setting that changes the loss of another."""


@pytest.mark.parametrize("piece", CHANGES)
def test_a_setting_changes_the_result_so_that_the_batch_can_tell(piece: str) -> None:
    found, without = OURS[piece](BATCH), OURS[CHANGES[piece]](BATCH)
    first = next(iter(found))
    assert not torch.allclose(found[first], without[first], 1e-3, 1e-3)


def test_each_correction_keeps_some_tokens_and_changes_some_weights() -> None:
    for name, correction in CORRECTIONS.items():
        found = OURS[name](BATCH)
        weights, kept = found["weights"][BATCH.mask], found["kept"][BATCH.mask]
        assert 0 < kept.sum() and (kept.sum() < len(kept)) == (correction.rejection is not None)
        assert ((weights == correction.cap).any() and (weights < correction.cap).any()) if correction.cap else True
