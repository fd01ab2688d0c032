"""The table of pass@k that is drawn from a study's saved adapters."""

import json
from pathlib import Path

from studies.train_on_4_bits.many_samples import main


def write(run: Path, **values: float) -> Path:
    """The report of an evaluation in a run's folder."""
    folder = run / "many_samples"
    folder.mkdir(parents=True)
    metrics = {name.replace("at", "@"): {"value": value, "low": 0.0, "high": 1.0} for name, value in values.items()}
    machine = {"processor": "NVIDIA H200" if "rounding=1" in run.name else "NVIDIA H100", "vllm": "0.25.1"}
    extra = {"cool": {"sampling": {"temperature": 0.6}}}
    report = {"sets": {"test": {"metrics": metrics}}, "machine": machine, "extra_sampling": extra}
    (folder / "evaluation.json").write_text(json.dumps(report))
    return folder


def test_differences_are_paired_by_rounding(tmp_path: Path) -> None:
    runs = {
        ("lora16", 0): 0.40,
        ("lora16", 1): 0.44,
        ("nvfp4_aqn", 0): 0.41,
        ("nvfp4_aqn", 1): 0.47,
        ("nvfp4_aqn", 2): 0.9,
    }
    folders = [
        write(
            tmp_path / f"seed={100 + 2 * rounding},rounding={rounding},policy=qwen,method={method}",
            accuracy=value,
            passat64=value + 0.3,
            cool_passat64=value + 0.2,
            length_mean=99.0,
        )
        for (method, rounding), value in runs.items()
    ]
    main(["lora16", "nvfp4_aqn", *map(str, folders), "--name", "many", "--commit", "abc", "--out", str(tmp_path)])
    text = (tmp_path / "many.md").read_text()
    assert text.endswith("\n\nMeasured with processor NVIDIA H100 and NVIDIA H200, vllm 0.25.1, commit abc.\n")
    lines = text.splitlines()[2:5]
    # Differences of 0.01 and 0.03: the mean of 0.02, the standard error of 0.01, and the quantile 12.706.
    assert [line.split(" | ") for line in lines] == [
        ["| qwen", "accuracy", "0.420", "0.440", "+0.020 [-0.107, +0.147]", "2 |"],
        ["| qwen", "pass@64", "0.720", "0.740", "+0.020 [-0.107, +0.147]", "2 |"],
        ["| qwen", "pass@64, temperature 0.6", "0.620", "0.640", "+0.020 [-0.107, +0.147]", "2 |"],
    ]
    results = json.loads((tmp_path / "many.json").read_text())["results"]
    assert results["policy=qwen,method=nvfp4_aqn"]["2"]["accuracy"] == 0.9
