"""The benchmarks of the ops measure everything they name, and nothing where a test fails."""

import json
from collections import Counter
from pathlib import Path

import bench_decode_gemm
import bench_tiles
import pytest
import torch
from qerl_kernels import decode_gemm_schedule, select_backend

pytestmark = pytest.mark.nightly

RESULTS = Path(bench_tiles.__file__).parents[1] / "results"


@pytest.fixture
def torch_again():
    yield
    select_backend("torch")


def gate(folder, verdict):
    path = folder / "test_gate.py"
    path.write_text(f"def test_gate():\n    assert {verdict}\n")
    return (str(path),)


def test_the_decode_gemm_has_its_tables(tmp_path, torch_again):
    assert bench_decode_gemm.run(tmp_path / "out", bench_decode_gemm.TINY, gate(tmp_path, True), commit="abc") == 0
    results = json.loads((tmp_path / "out/decode_gemm.json").read_text())
    layers, linears = (rows for rows in results.values() if isinstance(rows, list))
    assert results["environment"]["commit"] == "abc" and len(layers) == 2 and len(linears) == 4 * 2
    assert all(row["ours"]["p50_us"] > 0 and row["ours_base"]["p50_us"] > 0 for row in layers + linears)
    assert (tmp_path / "out/decode_gemm.md").read_text().count("| gate_up 256x64 |") == 2
    assert bench_decode_gemm.run(tmp_path / "red", bench_decode_gemm.TINY, gate(tmp_path, False)) == 1
    assert not (tmp_path / "red").exists()


def test_16_bits_are_timed_on_weights_that_rotate_like_the_others():
    product = bench_tiles.references((64, 32, (0,)), bench_decode_gemm.TINY)["bf16"]
    x = torch.randn(3, 32).bfloat16()
    assert not torch.equal(product(None, x), product(None, x))


@pytest.mark.parametrize("record", ["tiles_d61e23a", "tiles_3b_89d575a"])
def test_the_kernels_tiles_are_the_fastest_measured_within_3_percent_over_a_layer(record):
    names = {decode_gemm_schedule.Tile(**tile): name for name, tile in bench_tiles.TILES.items()}
    chosen, fastest = Counter(), Counter()
    for row in json.loads((RESULTS / f"{record}.json").read_text())["rows"]:
        tile = decode_gemm_schedule.best_tile(row["tokens"], row["rows"], row["columns"])
        chosen[row["shape"], row["tokens"]] += row[names[tile]]
        fastest[row["shape"], row["tokens"]] += min(row[name] for name in bench_tiles.TILES if row.get(name))
    assert len(fastest) > 5 and all(chosen[key] <= 1.03 * fastest[key] for key in fastest)


def test_few_tiles_are_chosen_that_are_fast_for_every_weight(monkeypatch):
    monkeypatch.setattr(bench_tiles, "TILES", {name: {"tokens": 64} for name in ("a", "b", "c")})
    times = [
        (64, {"a": 10.0, "b": 10.2, "c": 12.0}),  # a is the fastest, b within 3 %
        (128, {"a": 15.0, "b": 13.0, "c": 12.9}),
        (192, {"a": "wrong", "b": 20.0, "c": 25.0}),
        (256, {"a": 30.0, "b": None, "c": 29.9}),  # only c and a
    ]
    rows = [{"rows": 128, "columns": 64, "tokens": tokens} | found for tokens, found in times]
    assert bench_tiles.chosen(rows)["tiles"].keys() == {"b", "a"}
    assert bench_tiles.chosen(rows)["weights"] == [[128, 64, [[64, "a"], [192, "b"], [256, "a"]]]]
    again = rows[1] | {"c": 10.0}  # of another model with the same weight: b is 14 % slower than the mean, 11.45
    assert bench_tiles.chosen([*rows, again])["weights"] == [[128, 64, [[64, "a"], [128, "c"], [192, "b"], [256, "c"]]]]
