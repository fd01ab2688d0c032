"""`qerl completions`: a run's completions as one HTML file, which needs no server."""

import json
from pathlib import Path
from typing import Any

from qerl_pl.errors import UserError
from qerl_pl.runtime.files import atomic_write

MOST = 20_000
"""Completions of a page: with more of them, rollouts are left out evenly, for a browser holds them all."""
TEMPLATE = Path(__file__).with_suffix(".html")


def write_completions(run: Path, dst: Path | None) -> None:
    """Write the page and print where it is.

    Args:
        run: The run's folder, or its completions.jsonl.
        dst: File to write; by default completions.html beside completions.jsonl. An older one is replaced.

    Raises:
        UserError: The run has logged no completions.
    """
    source = run if run.is_file() else run / "completions.jsonl"
    records = _records(source)
    versions = sorted({record["version"] for record in records})
    every = -(-len(records) // MOST)
    kept = set(versions[::every])
    records = [record for record in records if record["version"] in kept]
    about = f"{source}: {len(records)} completions of {len(kept)} rollouts"
    if every > 1:
        about += f", one of each {every} of {len(versions)}"
    # In a script element "</script>" and "<!--" would end the data.
    data = json.dumps({"about": about, "records": records}).replace("<", "\\u003c")
    dst = source.with_suffix(".html") if dst is None else dst
    atomic_write(dst, TEMPLATE.read_text(encoding="utf-8").replace("DATA", data, 1).encode())
    print(f"wrote {about} to {dst}")


def _records(source: Path) -> list[dict[str, Any]]:
    """The lines of completions.jsonl, but one that a kill cut off."""
    if not source.is_file():
        raise UserError(
            f"completions reads what a run logs to completions.jsonl; {source} is not there; train with "
            "--completions.jsonl true"
        )
    records = []
    for line in source.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    if not records:
        raise UserError(f"completions needs a rollout; {source} has none yet; wait for the first")
    return records
