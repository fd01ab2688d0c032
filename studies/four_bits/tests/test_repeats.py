"""Digests of a small training, and what repeats.md says of the rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from fit_helpers import configuration, fit_here

from studies.four_bits import repeats

STUDY = Path(__file__).parents[1]
MEANS = ("reward", "entropy", "sampler_entropy", "without_signal", "length", "grad_norm", "mismatch")


def rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (STUDY / file).read_text().splitlines()]


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> int | None:
    """The first mean over three rollouts in which curves differ; none where they are the same."""
    points = zip(*(one["curves"][name] for name in MEANS), strict=True)
    others = zip(*(other["curves"][name] for name in MEANS), strict=True)
    return next((index for index, pair in enumerate(zip(points, others, strict=True)) if pair[0] != pair[1]), None)


def test_a_repeated_training_has_the_same_digests(tiny_policy_dir: Path, tmp_path: Path) -> None:
    runs = tmp_path / "one", tmp_path / "other"
    for run in runs:
        settings = configuration(tiny_policy_dir, run, summary=False)
        assert not fit_here(settings, "--trainer.max_steps=8", f"--trainer.callbacks+={repeats.__name__}.Digests")
    assert repeats.compare(*runs) == "2 common rollouts, all the same"
    row = repeats.lines(runs[1])[2]
    assert list(row)[3:] == [f"gradients of step {number}" for number in (1, 2, 3, 4)]
    assert {len(row[part]) > 3 for part in list(row)[1:]} == {True}
    assert row["gradients of step 1"] != row["gradients of step 2"]
    row["weights"]["norm"], row["experience"]["tokens"] = "1", "2"
    with (runs[1] / repeats.FILE).open("a") as file:
        file.write(json.dumps(row) + "\n")  # as of a rollout that a resumed run repeats
    assert repeats.compare(runs[1], runs[0]) == (
        "2 common rollouts; the first that differs is 2: experience tokens, weights norm"
    )


@pytest.mark.parametrize("seed", range(200, 208))
def test_methods_agree_until_the_noise_begins(seed: int) -> None:
    """At rollout 13 of 128: in the fifth mean of three."""
    methods = {
        row["levels"]["method"]: row
        for row in rows("study.jsonl")
        if (row["levels"]["seed"], row["levels"]["order"], row["levels"]["rollouts"]) == (seed, 0, 128)
    }
    assert first_difference(methods["nvfp4"], methods["nvfp4_aqn"]) == 4


def test_trainings_are_the_same_but_for_the_first() -> None:
    last = {row["run"]: row for row in rows("study.jsonl")}
    found = {
        (row["levels"]["method"], row["levels"]["order"], row["where"]["commit"]): first_difference(
            row, last[row["run"]]
        )
        for row in rows("repeats.jsonl")
    }
    assert found == {
        ("lora16", 1, "fa656bd7"): 1,
        ("nvfp4_aqn", 1, "fa656bd7"): 0,
        ("lora16", 1, "7261dbc7"): None,
        ("nvfp4_aqn", 1, "7261dbc7"): None,
        ("lora16", 2, "fa656bd7"): 2,
        ("nvfp4_aqn", 2, "fa656bd7"): 1,
    }
