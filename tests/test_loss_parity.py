"""Losses, corrections and advantages against what TRL's and verl's functions returned for the same batch.

`python -m benchmarks.loss_parity` calls those functions and writes the batch and their results.
"""

import json
from typing import Any

import pytest
import torch
from pages import ROOT

from benchmarks.loss_parity.pieces import OURS, Batch, from_lists, largest_difference

RECORDED = json.loads((ROOT / "benchmarks" / "results" / "loss_parity.json").read_text())["results"]
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
    assert {one["peer"].split()[0] for one in PIECES} == {"TRL", "verl"} and len(PIECES) > 60


def test_the_batch_tells_the_pieces_apart() -> None:
    """Every setting changes something: no bound is without tokens on both sides."""
    found = [OURS[piece](BATCH) for piece in OURS]
    for name in ("gradient", "weights", "advantages", "kl"):
        of_name = [results[name] for results in found if name in results]
        assert len(of_name) > 2
    kept = [results["kept"] for results in found if "kept" in results]
    assert sum(0 < one.sum() < BATCH.mask.sum() for one in kept) == 3
    same = {"two-sided clip, delta 1.5": "dual clip, delta 1.5", "DPPO, Binary-TV": "DPPO, Binary-TV, gradient"}
    pieces = [piece for piece in OURS if piece not in same.values() and "defaults of both" not in piece]
    for number, piece in enumerate(pieces):
        for other in pieces[:number]:
            mine, others = OURS[piece](BATCH), OURS[other](BATCH)
            if mine.keys() == others.keys() and "coefficient" not in mine:
                assert any(not torch.allclose(mine[name], others[name], 1e-4, 1e-4) for name in mine), (piece, other)
