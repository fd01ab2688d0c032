"""Real data, where it lies beside the project; none of it is part of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

DATA = Path(os.environ.get("QERL_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
"""gsm8k/train.jsonl and test.jsonl as openai/gsm8k has them, math500.jsonl as HuggingFaceH4/MATH-500."""

needs_data = pytest.mark.skipif(not (DATA / "math500.jsonl").is_file(), reason="needs GSM8K and MATH-500")


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
