"""The table of what a format leaves of a policy's accuracy over several roundings."""

import json
from pathlib import Path
from typing import Any

import pages
import pytest

from studies.train_on_4_bits.format_accuracy import main


def write(folder: Path, name: str, greedy: int, sampled: float, nats: float, gpu: str = "NVIDIA H100") -> None:
    """A measurement of four questions, `greedy` of them right."""
    measured: dict[str, Any] = {"greedy": [place < greedy for place in range(4)], "sampled": [sampled] * 4}
    measured |= {"nats": [nats - 0.5, nats + 0.5] * 2, "tokens": 90.4 + greedy, "truncated": 0.25}
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(measured | {"environment": {"gpu": gpu, "commit": "abc"}}))


def test_formats_are_compared_with_16_bits_of_the_same_roundings(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    write(before, "none-0", 4, 0.5, 1.0)
    write(before, "none-2", 3, 0.5, 1.0)
    write(before, "nvfp4-0", 3, 0.25, 1.25)
    write(before, "nvfp4-2", 1, 0.5, 1.5)
    write(before, "nf4-2", 3, 0.25, 1.5)
    write(before, "nf4-10", 1, 0.75, 1.5, "NVIDIA H200")
    write(after, "none-0", 2, 0.5, 1.0)
    main([f"Before=={before}", f"After={after}", "--name", "formats", "--out", str(tmp_path)])
    text = (tmp_path / "formats.md").read_text()
    assert text.startswith("Before=:\n\n| format |") and "\n\nAfter:\n\n| format |" in text
    assert text.endswith("\n\nMeasured with gpu NVIDIA H100 and NVIDIA H200, commit abc.\n")
    table = pages.rows(text)
    assert table[0][2:6] == ["greedy accuracy", "less 16-bit [95 %]", "recovery", "sampled accuracy"]
    assert table[1] == ["16-bit", "2", "0.875", "", "", "0.500", "", "", "1.000", "", "94", "25.0%"]
    # Greedily -0.25 and -0.5: a standard error of 0.125, which Student's t of one degree multiplies by 12.706.
    greedy, sampled = ["-0.375 [-1.963, +1.213]", "57%"], ["-0.125 [-1.713, +1.463]", "75%"]
    nats = "+0.375 [-1.213, +1.963]"
    assert table[2] == ["NVFP4", "2", "0.500", *greedy, "0.375", *sampled, "1.375", nats, "92", "25.0%"]
    # NF4's means are of roundings 2 and 10, its differences of rounding 2, the only one in 16 bits.
    greedy, sampled = ["+0.000", "100%"], ["-0.250", "50%"]
    assert table[3] == ["NF4", "2", "0.500", *greedy, "0.500", *sampled, "1.500", "+0.500", "92", "25.0%"]
    assert table[4:8] == [
        ["greedy, sampled", "rounding 0", "rounding 2", "rounding 10"],
        ["16-bit", "1.000, 0.500", "0.750, 0.500", ""],
        ["NVFP4", "0.750, 0.250", "0.250, 0.500", ""],
        ["NF4", "", "0.750, 0.250", "0.250, 0.750"],
    ]
    results = json.loads((tmp_path / "formats.json").read_text())["results"]
    assert results["Before="]["nf4"]["10"] == pytest.approx(
        {"greedy": 0.25, "sampled": 0.75, "nats": 1.5, "tokens": 91.4, "truncated": 0.25}
    )


def test_formats_without_16_bits_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "nvfp4-0", 4, 0.5, 1.0)
    with pytest.raises(SystemExit, match=r"has no none-ROUNDING\.json: measure --format none"):
        main([f"Alone={tmp_path}", "--name", "formats", "--out", str(tmp_path)])
    assert not (tmp_path / "formats.md").exists()
