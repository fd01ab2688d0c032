"""The ladder of completions: where it begins, how it climbs, that it goes on; and both measurements on a CPU."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import context_ladder
import random_model


def arguments(out: Path, **changes: Any) -> argparse.Namespace:
    given: dict[str, Any] = {
        "shape": "8b", "device": "cpu", "lengths": [1024, 4096, 16384, 65536], "rank": 32, "base": out / "base",
        "out": out, "cards": [16.0], "checkpointing": "offload", "tile": 4096, "steps": 2, "margin": 0.3,
        "limit": 60.0, "minutes": 5.0, "ways": list(context_ladder.WAYS), "repeats": 1, "snapshot": False,
        "eager": False,
    }  # fmt: skip
    return argparse.Namespace(**given | changes)


@pytest.mark.parametrize(
    ("fits_up_to", "tried"),
    [(16384, [16384, 65536]), (65536, [16384, 65536]), (4096, [16384, 4096]), (0, [16384, 4096, 1024])],
)
def test_lengths_go_up_from_the_estimate_and_down_if_it_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits_up_to: int, tried: list[int]
) -> None:
    """16 GiB: 37 thousand tokens are estimated to fit."""
    asked: list[int] = []

    def step(args: argparse.Namespace, card: float, length: int) -> dict[str, Any]:
        asked.append(length)
        measured = {"seconds": 1.0, "peak_gib": {"update": 15.0}}
        fits = length <= fits_up_to
        return {"fits": fits, **(measured if fits else {}), "estimate_gib": 15.5, "kv_gib": 1.0}

    monkeypatch.setattr(context_ladder, "step", step)
    monkeypatch.setattr(context_ladder, "base_of", lambda args: None)
    args = arguments(tmp_path)
    context_ladder.ladder(args)
    assert asked == tried
    path = tmp_path / "context_ladder_8b.json"
    found = json.loads(path.read_text())["results"]
    assert set(found["16"]) == {str(length) for length in tried}
    context_ladder.ladder(args)  # all is known
    assert asked == tried
    del found["16"][str(tried[-1])]  # as if it had been cut off
    path.write_text(json.dumps({"results": found}))
    context_ladder.ladder(args)
    assert asked == [*tried, tried[-1]]


def test_the_cache_is_of_eight_completions_or_of_what_the_card_has_room_for(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    sequence = context_ladder.sequence_gib(args, 4096)
    assert context_ladder.kv_for(args, 80.0, 4096) == 8 * sequence
    some = context_ladder.kv_for(args, 12.0, 4096)
    assert sequence < some < 8 * sequence
    assert context_ladder.kv_for(args, 8.0, 4096) == 0 and not context_ladder.fits(args, 8.0, 4096)


def test_an_update_is_measured_in_every_way_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(random_model.SHAPES, "tiny", (128, 128, 2, 4, 2, 512))
    context_ladder.updates(arguments(tmp_path, shape="tiny", lengths=[32, 48]))
    found = json.loads((tmp_path / "context_update_tiny.json").read_text())["results"]["found"]
    assert list(found) == list(context_ladder.WAYS)
    losses = {one["loss"] for way in found.values() for one in [way["48"]]}
    assert len(losses) == 1 and all(way["32"]["estimate_gib"] > 0 for way in found.values())
    assert (tmp_path / "context_update_tiny.md").read_text().count("| 48 |") == 4
