"""The ladder of completions: where it begins, how it climbs, that it goes on; and both measurements on a CPU."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import context_bars
import context_ladder
import pages
import random_model

from qerl_pl.toy.tokenizer import build_tokenizer


def arguments(out: Path, **changes: Any) -> argparse.Namespace:
    given: dict[str, Any] = {
        "shape": "8b", "device": "cpu", "lengths": [1024, 4096, 16384, 65536], "rank": 32, "base": out / "base",
        "out": out, "cards": [16.0], "checkpointing": "offload", "tile": 4096, "steps": 2, "margin": 0.3,
        "limit": 60.0, "minutes": 5.0, "ways": list(context_ladder.WAYS), "repeats": 1, "snapshot": False,
        "eager": False, "kv_dtype": "auto", "state_bits": 32, "sampled": None, "group": 8,
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
    if len(tried) == 2:
        context_ladder.ladder(arguments(tmp_path, rank=16))  # what others were measured with does not count
        assert asked[-2:] == tried and asked[: len(tried) + 1] == [*tried, tried[-1]]


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "does not fit"),
        (
            "qerl: weights, cache and CUDA graphs must fit on the GPU; vLLM's start ran out of its memory",
            "does not fit",
        ),
        ("memory after the first update\nValueError: a mistake", "failed"),
        ("memory after the first update\n\nstopped after 60 s\n", "too slow"),
        ("", "failed"),
    ],
)
def test_a_mistake_is_not_told_as_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, outcome: str
) -> None:
    def run(command: list[str], stdout: Any, **_: Any) -> None:
        assert json.loads(command[-1])["length"] == 4096
        stdout.write(said)

    monkeypatch.setattr(context_ladder.subprocess, "run", run)
    args = arguments(tmp_path)
    found = context_ladder.step(args, 16.0, 4096)
    assert found["outcome"] == outcome and not found["fits"] and found["estimate_gib"] < 16
    if outcome == "failed":
        monkeypatch.setattr(context_ladder, "base_of", lambda args: None)
        monkeypatch.setattr(context_ladder, "step", lambda *_: found)
        with pytest.raises(SystemExit, match="a step of 16384 tokens on 16 GiB failed"):
            context_ladder.ladder(args)


def test_rows_by_name_run_in_their_order_are_written_at_once_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, float]] = []

    def step(args: argparse.Namespace, card: float, length: int) -> dict[str, Any]:
        written = tmp_path / "context_bars.md"
        assert (written.read_text().count("-k |") if written.is_file() else 0) <= len(asked)
        asked.append((args.shape, length, card))
        common = {"estimate_gib": 10.0, "kv_gib": 3 * context_ladder.sequence_gib(args, length) + 1e-9}
        if args.shape == "14b":
            return {"fits": False, "outcome": "failed", "reason": "see the log", **common}
        return {"fits": True, "seconds": 1.0, "peak_gib": {"rollout": 9.0, "update": 10.5}, **common}

    monkeypatch.setattr(context_ladder, "step", step)
    monkeypatch.setattr(context_ladder, "base_of", lambda args: None)
    names = {"device": "cuda", "base": tmp_path, "out": tmp_path, "sampled": None, "steps": 2, "eager": False}
    args = argparse.Namespace(**names, group=8, margin=0.3, limit=60.0, minutes=5.0, bars=["8b-20k", "14b-4k"])
    context_bars.measure(args)
    assert asked == [("8b", 20480, 30), ("14b", 4096, 23.6)]
    args.bars = ["7b-1k", "8b-20k", "14b-4k"]
    context_bars.measure(args)
    assert asked[2:] == [("7b", 1024, 11), ("14b", 4096, 23.6)]  # what failed runs again
    args.sampled = 256
    found = context_bars.measure(args)
    assert asked[4:] == [("7b", 1024, 11), ("8b", 20480, 30), ("14b", 4096, 23.6)] and found["7b-1k"]["at_once"] == 3
    rows = pages.rows((tmp_path / "context_bars.md").read_text())
    assert [row[0] for row in rows] == ["bar", "7b-1k", "14b-4k", "8b-20k"]
    assert rows[1][-4:] == ["1.0", "9.0 / 10.5", "10.0", "-4.8"] and rows[2][-4:] == ["failed", "–", "10.0", "–"]
    args.group = 2
    assert context_bars.measure(args)["7b-1k"]["at_once"] == 2
    args.minutes, args.sampled = -1.0, 128
    context_bars.measure(args)
    assert len(asked) == 10


def test_rows_by_name_are_those_of_the_page() -> None:
    section = pages.sections(pages.ROOT / "docs" / "memory.md")["Long completions, small cards"]
    shown = [row[:7] for row in pages.rows(section)[1:]]
    ours = [
        [bar.shape, f"{bar.length:,}", f"{bar.card:g}", str(bar.rank), str(bar.checkpointing).lower(), bar.kv_dtype]
        + [str(bar.state_bits)]
        for bar in context_bars.BARS.values()
    ]
    assert sorted(ours) == sorted([row[0].split()[0].lower(), *row[1:]] for row in shown)


def test_long_prompts_have_about_the_tokens_that_are_asked_for(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    data = context_ladder.LongPrompts(300, 2)
    data.tokenizer = str(tmp_path)
    data.setup("fit")
    (batch, *_) = data.train_dataloader()
    assert 290 <= len(batch.prompts[0].token_ids) <= 300


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
    monkeypatch.setattr(context_ladder, "policy_of", lambda *_: pytest.fail("all is known"))
    context_ladder.updates(arguments(tmp_path, shape="tiny", lengths=[32, 48]))
    again = json.loads((tmp_path / "context_update_tiny.json").read_text())["results"]["found"]
    assert again == found
