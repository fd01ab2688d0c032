"""The study's measurements of a policy in a format, and the adapters that its runs start from."""

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from qerl_pl.engines import TransformersEngine, VLLMEngine
from studies.train_on_4_bits import pretrained
from studies.train_on_4_bits.starts import main as starts

ROW = {"question": "How many pens are {} and {}?", "answer": "{} + {} = <<{}+{}={}>>{} pens.\n#### {}"}


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve training rows and four test rows in GSM8K's format."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, count in (("train", 12), ("test", 4)):
        rows = [
            {
                "question": ROW["question"].format(number, 2),
                "answer": ROW["answer"].format(number, 2, number, 2, number + 2, number + 2, number + 2),
            }
            for number in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_solutions_have_no_annotations_and_end_in_a_box(gsm8k: Path) -> None:
    row = pretrained.read_rows(gsm8k / "test.jsonl")[3]
    assert row["answer"] == "3 + 2 = 5 pens.\n#### 5"
    assert pretrained.solutions([row], "tags") == [row]
    (boxed,) = pretrained.solutions([row], "boxed")
    assert boxed["prompt"][1] == {"role": "user", "content": "How many pens are 3 and 2?"}
    assert boxed["completion"][0]["content"] == "3 + 2 = 5 pens.\nThe answer is \\boxed{5}."


def test_a_policy_is_measured_and_compared(tiny_policy_dir: Path, gsm8k: Path, tmp_path: Path) -> None:
    rows = pretrained.read_rows(gsm8k / "test.jsonl")
    for style in ("tags", "boxed"):
        prompts = pretrained.prompts_of(rows, style, str(tiny_policy_dir))
        assert [prompt.text for prompt in prompts] == [row["question"] for row in rows]
    file = tmp_path / "samples.jsonl"
    settings = pretrained.LoraConfig(rank=4)
    policy = pretrained.Measurement(tiny_policy_dir, "none", settings, 4, "transformers", "float32")
    found = policy.accuracy(rows, "tags", 2, file)
    assert found["greedy"] == [False] * 4 and found["sampled"] == [0.0] * 4 and found["truncated"] == 1.0
    assert len(file.read_text().splitlines()) == 4 * 3 and not pretrained.sampled_completions(file, "tags")
    file.write_text(file.read_text().replace('"truncated": true', '"truncated": false'))
    assert [one["prompt"][1]["content"] for one in pretrained.sampled_completions(file, "tags")] == [
        row["question"] for row in rows
    ]
    both, (second,) = (
        policy.nats(pretrained.solutions(rows, "tags")),
        policy.nats(pretrained.solutions(rows[1:2], "tags")),
    )
    assert len(both) == 4 and both[1] == pytest.approx(second, abs=1e-5)
    assert all(2 < loss < 2 * math.log(policy.policy.base.config.vocab_size) for loss in both)


def test_vllm_shares_its_weights_where_marlin_covers_their_shapes(tmp_path: Path) -> None:
    for columns, backend in ((896, "marlin"), (576, "auto")):  # those of Qwen2.5-0.5B and SmolLM2-135M
        heads = columns // 64
        config = LlamaConfig(hidden_size=columns, num_attention_heads=heads, num_key_value_heads=1, head_dim=64)
        config.save_pretrained(tmp_path / str(columns))
        engine = pretrained.engine_of("vllm", tmp_path / str(columns))
        assert isinstance(engine, VLLMEngine)
        assert (engine.linear_backend, engine.share_weights) == (backend, backend == "marlin")
    assert isinstance(pretrained.engine_of("transformers", tmp_path), TransformersEngine)


def test_the_table_pairs_questions() -> None:
    first = {"greedy": [True, True, False, False], "sampled": [1.0, 0.5, 0.5, 0.0], "nats": [1.0, 2.0, 3.0, 4.0]}
    other = {"greedy": [True, False, False, False], "sampled": [0.5, 0.5, 0.0, 0.0], "nats": [1.5, 2.5, 3.5, 4.5]}
    lengths = {"tokens": 7.4, "truncated": 0.25}
    lines = pretrained.table({"A": first | lengths, "B": other | lengths}).splitlines()
    assert lines[2].startswith("| A | 0.500 [0.150, 0.850] |  | 0.500 [")
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells[1].startswith("0.250 [") and cells[2].startswith("-0.250 [") and cells[2].endswith(", 50%")
    assert cells[3].startswith("0.250 [") and cells[4].startswith("-0.250 [") and cells[4].endswith(", 50%")
    assert cells[5:] == ["3.0000", "0.5000 [0.5000, 0.5000]", "7", "25.0%"]


def test_starts_are_taught_measured_and_chosen(tiny_policy_dir: Path, gsm8k: Path, tmp_path: Path) -> None:
    common = ["--data", str(gsm8k), "--taught", "4", "--held-out", "3", "--steps", "2", "--every", "1", "--rank", "2"]
    common += ["--batch-size", "2", "--max-tokens", "4", "--engine", "transformers", "--dtype", "float32"]
    tested = ["--test-samples", "2", "--boxed-tokens", "6"]
    for kind, rounding, more in (("none", "0", []), ("nvfp4", "1", tested)):
        starts(["train", str(tiny_policy_dir), str(tmp_path), "--format", kind, "--rounding", rounding, *common, *more])
    before, after = (json.loads((tmp_path / "nvfp4-1" / f"{name}.json").read_text()) for name in ("before", "after"))
    assert (before["tokens"], after["tokens"]) == (6, 4)  # a random policy does not stop
    assert len(before["greedy"]) == len(after["greedy"]) == 4 and after["samples"] == 2
    assert pretrained.table({"before": before, "after": after}).count("\n") == 3
    assert not (tmp_path / "none-0" / "before.json").exists()
    taught = {
        split: len((tmp_path / "data" / f"{split}.jsonl").read_text().splitlines())
        for split in ("train", "held_out", "test")
    }
    assert taught == {"train": 5, "held_out": 3, "test": 4}
    weights = [load_file(tmp_path / base / "model.safetensors") for base in ("base-0", "base-1")]
    name = "model.layers.0.mlp.down_proj.weight"
    assert not weights[0][name].equal(weights[1][name])
    assert (
        weights[0][name]
        .abs()
        .sort()
        .values.flatten()
        .sort()
        .values.allclose(weights[1][name].abs().flatten().sort().values)
    )
    for folder, accuracies in (("none-0", [0.35, 0.5]), ("nvfp4-1", [0.2, 0.4])):
        file = tmp_path / folder / "start.json"
        found = json.loads(file.read_text())
        assert [step["step"] for step in found["steps"]] == [1, 2]
        for step, accuracy in zip(found["steps"], accuracies, strict=True):
            step["sampled"] = accuracy
        file.write_text(json.dumps(found))
    starts(["choose", str(tmp_path), "--out", str(tmp_path / "results")])
    chosen = json.loads((tmp_path / "results" / "starts.json").read_text())["results"]
    assert chosen["target"] == 0.4 and [start["chosen"] for start in chosen["starts"]] == [1, 2]
    for folder, step in (("none-0", 1), ("nvfp4-1", 2)):
        start, snapshot = (tmp_path / folder / name / "adapter_model.safetensors" for name in ("start", f"step={step}"))
        assert start.read_bytes() == snapshot.read_bytes()
    base, merged = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base-0", "none-0/merged"))
    adapter = load_file(tmp_path / "none-0" / "start" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name.removesuffix('weight')}lora_{factor}.weight"] for factor in "AB")
    scaling = 32.0 / 2  # alpha by rank
    assert merged[name].allclose(base[name] + scaling * b @ a, atol=1e-6) and not merged[name].equal(base[name])
    assert (tmp_path / "none-0" / "merged" / "tokenizer.json").is_file()
    again = tmp_path / "again"
    unmeasured = ["--unmeasured", "--every", "16"]  # steps between measurements do not matter
    starts(["train", str(tiny_policy_dir), str(again), "--format", "nvfp4", "--rounding", "1", *common, *unmeasured])
    rewritten = again / "nvfp4-1" / "start" / "adapter_model.safetensors"
    assert rewritten.read_bytes() == (tmp_path / "nvfp4-1" / "step=2" / "adapter_model.safetensors").read_bytes()
    assert not (again / "nvfp4-1" / "start.json").exists()
    starts(["train", str(tiny_policy_dir), str(again), "--format", "none", *common, "--first", "2", "--target", "0.1"])
    measured = json.loads((again / "none-0" / "start.json").read_text())
    assert [step["step"] for step in measured["steps"]] == [2]
    assert measured["chosen"] == 2 and measured["sampled_again"] == 0.0
    begun = again / "none-0" / "start" / "adapter_model.safetensors"
    assert begun.read_bytes() == (tmp_path / "none-0" / "step=2" / "adapter_model.safetensors").read_bytes()
    measured["sampled_again"] = 0.0625
    (again / "none-0" / "start.json").write_text(json.dumps(measured))
    starts(["choose", str(again), "--out", str(again / "results")])
    table = (again / "results" / "starts.md").read_text().splitlines()
    assert table[2] == "| none-0 | 2 | 0.000 | 0.000 | 0.062 | 0.000 |"


def start_row(kind: str, rounding: int, chosen: int, gpu: str, lr: float = 2e-4) -> dict[str, object]:
    """A row of the table that `starts choose` writes."""
    row = {"format": kind, "rounding": rounding, "taught": 4, "held_out": 3, "lr": lr, "chosen": chosen}
    return {**row, "environment": {"gpu": gpu}}


def test_chosen_starts_are_made_again_on_the_gpu_that_they_were_chosen_on(
    tiny_policy_dir: Path,
    gsm8k: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [start_row("none", 0, 9, "none"), start_row("none", 0, 1, "none", 1.5e-4), start_row("mxfp4", 0, 5, "GPU")]
    rows += [start_row("nvfp4", 1, 2, "none")]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"results": {"target": 0.1, "starts": rows}}))
    given: list[tuple[list[str], str]] = []

    def run(command: list[object], env: dict[str, str], **options: object) -> subprocess.CompletedProcess[bytes]:
        given.append(([str(word) for word in command[3:]], env["CUDA_VISIBLE_DEVICES"]))
        return subprocess.CompletedProcess([], int("--fail" in command))

    monkeypatch.setenv("QERL_COMMIT", "abc")  # or git is asked, by the patched function
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    folder = tmp_path / "starts"
    again = ["again", str(tiny_policy_dir), str(folder), str(table), "--data", str(gsm8k)]
    starts([*again, "--rank", "2", "--batch-size", "2", "--dtype", "float32"])
    monkeypatch.undo()
    assert sorted(gpu for _, gpu in given) == ["4", "6"]
    for words, _ in given:
        starts(words)
    for name, step in (("none-0", 1), ("nvfp4-1", 2)):
        snapshot, start = (folder / name / part / "adapter_model.safetensors" for part in (f"step={step}", "start"))
        assert start.read_bytes() == snapshot.read_bytes()
    assert ["--lr", "0.00015"] in [words[9:11] for words, _ in given]
    assert not (folder / "mxfp4-0").exists()  # of another GPU
    monkeypatch.setenv("QERL_COMMIT", "abc")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"nvfp4-1 failed: see .*nvfp4-1\.txt"):
        starts([*again, "--only", "nvfp4-1", "--fail"])
    with pytest.raises(SystemExit, match="has none-0, nvfp4-1 for none, not mxfp4-0, and rows of GPU, none; measure"):
        starts([*again, "--only", "nvfp4-1", "mxfp4-0"])
    with pytest.raises(SystemExit):
        starts(["choose", str(tmp_path), "--fail"])
    assert "unrecognized arguments: --fail" in capsys.readouterr().err
