"""The page of environments: its own environment runs as it is written."""

import json
import re
from pathlib import Path

import pages
import pytest
from fit_helpers import fit
from test_environment_runs import game

PAGE = pages.ROOT / "docs" / "environments.md"


def test_the_environment_of_the_page_is_short_and_trains_as_it_is_written(
    game_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = pages.fences(PAGE, "python")
    title = re.match(r"# (\w+\.py)\n", block)
    assert title is not None and len([line for line in block.splitlines()[1:] if line.strip()]) <= 15
    (tmp_path / title[1]).write_text(block)
    named = [re.search(r"factory: ([^\s,}]+)", text) for text in pages.fences(PAGE, "yaml")]
    config = game(game_policy_dir, tmp_path / "run")
    (rollout,) = (one for one in config["trainer"]["callbacks"] if one["class_path"].endswith("RolloutCallback"))
    rollout["init_args"]["environment"]["factory"] = str(tmp_path / named[0][1])  # type: ignore[index]
    config["trainer"]["max_steps"] = 4
    status, output = fit(config)
    assert status == 0, output
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        answers = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        distance = 100 if not answers else 0 if answers[-1] == "found" else int(answers[-1].removesuffix(" away"))
        assert row["rewards"]["environment"] == pytest.approx(1 / (1 + distance))
    assert any(row["messages"][1]["content"].endswith("away") for row in rows if len(row["messages"]) > 1)
