"""`qerl fit --dry-run` says what a run needs by its config.json, and loads, starts and writes nothing."""

import json
import re
from pathlib import Path

import pages
import pytest
import torch

from qerl_pl.cli.main import main
from qerl_pl.engines import VLLMEngine
from qerl_pl.engines.base import EngineSpec
from qerl_pl.models.memory import GIB
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


@pytest.fixture
def qwen3_8b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Qwen3-8B's config.json alone; the working directory is empty, and no GPU is visible."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run loads and starts nothing")

    def launch(self: VLLMEngine, spec: EngineSpec) -> None:
        refuse()

    monkeypatch.setattr(VLLMEngine, "launch", launch)
    monkeypatch.setattr(Policy, "__init__", refuse)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "model"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """The printed rows by their first words, as cells; and what each choice of "auto" needs in the update."""
    assert main(["fit", "--dry-run", *words]) == 0
    out = capsys.readouterr().out
    assert not list(Path.cwd().iterdir())
    rows = [line.rsplit(maxsplit=2) for line in out.splitlines()]
    table = {row[0].strip(): row[1:] for row in rows if len(row) > 1}
    for line in out.splitlines():
        if line.startswith("  false"):
            table["auto"] = line.strip().split("; ")
    return table


def test_a_run_with_an_adapter_is_described_by_purpose(capsys: pytest.CaptureFixture[str], qwen3_8b: Path) -> None:
    words = ["-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b)]
    table = run(capsys, *words)
    linears = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)
    base = (linears * 4.5 / 8 + 2 * 2 * 151936 * 4096) / GIB
    assert table["base model"] == [f"{base:.2f}"] * 2
    assert table["keys and values"] == ["16.00", "0.00"]
    assert [float(cell) for cell in table["layer inputs and products"]] == [0, 0.25]  # of 16384 tokens, two layers'
    parts = [row for name, row in table.items() if all("." in cell for cell in row) and name not in ("in all", "auto")]
    sums = [sum(float(row[phase]) for row in parts) for phase in (0, 1)]
    assert len(parts) == 10 and [float(cell) for cell in table["in all"]] == pytest.approx(sums, abs=0.05)
    longest = [int(cell.replace(",", "")) if cell != "none" else 0 for cell in table["48 GiB"]]
    assert 0 < longest[0] == longest[1]  # the update decides
    assert table["16 GiB"][0] == "none" != table["16 GiB"][1]  # the cache does
    assert table["pinned on the CPU: layer"] == ["inputs", "4.62"]
    ways = {way.rpartition(" ")[0]: float(way.rpartition(" ")[2]) for way in table["auto"]}
    assert list(ways) == ["false", "selective", "true", "offload", "offload, mlp_tile_tokens 4096"]
    assert list(ways.values()) == sorted(ways.values(), reverse=True)
    assert ways["offload, mlp_tile_tokens 4096"] == float(table["in all"][1])
    assert ways["true"] - ways["offload"] == pytest.approx(34 / 36 * 4.5, abs=0.01)
    by_hand = run(capsys, *words, "--model.policy.mlp_tile_tokens=4096")
    assert [way.rpartition(" ")[0] for way in by_hand["auto"]] == [
        f"{mode}, mlp_tile_tokens 4096" for mode in ("false", "selective", "true", "offload")
    ]
    more = run(capsys, *words, "--model.policy.gradient_checkpointing", "true", "--model.policy.mlp_tile_tokens=auto")
    assert float(more["in all"][1]) == ways["true"] and "auto" not in more
    assert int(more["24 GiB"][1].replace(",", "")) < int(table["24 GiB"][1].replace(",", ""))
    assert "pinned on the CPU: layer" not in more


def test_targets_with_their_path_are_described_as_those_without(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path
) -> None:
    words = ["-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b), "--model.policy.lora.targets"]
    plain, qualified = (run(capsys, *words, f"[{target}]") for target in ("q_proj", "self_attn.q_proj"))
    assert qualified == plain
    assert plain["trained weights"] == [f"{(4 + 2) * 36 * 32 * 2 * 4096 / GIB + 2 * 36 * 32 * 2 * 1024 / GIB:.2f}"] * 2


def test_keys_and_values_in_fp8_are_counted_as_half(capsys: pytest.CaptureFixture[str], qwen3_8b: Path) -> None:
    words = ["-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b)]
    words += ["--rollout.engine.kv_cache_gib=null", "--rollout.engine.gpu_memory_utilization=0.9"]
    tables = [run(capsys, *words, f"--rollout.engine.kv_cache_dtype={dtype}") for dtype in ("auto", "fp8")]
    sequence = (256 + 640) * 2 * 36 * 1024 / GIB  # in fp8
    assert [float(table["keys and values"][0]) for table in tables] == pytest.approx([2 * sequence, sequence], abs=0.01)


@pytest.mark.parametrize(("quantization", "sequences"), [("nvfp4", [65]), ("nf4", [64, 65]), ("none", [64, 65])])
def test_merged_copies_are_counted_where_a_decode_step_takes_them(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path, quantization: str, sequences: list[int]
) -> None:
    words = ["-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b), "--rollout.engine.adapter=auto"]
    words.append(f"--model.policy.quantization={quantization}")
    tables = {n: run(capsys, *words, f"--rollout.engine.max_num_seqs={n}") for n in (64, 65)}
    assert [n for n, table in tables.items() if "engine: merged copies" in table] == sequences


def test_a_format_that_is_derived_from_nvfp4_is_planned_as_that(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planned_formats.py").write_text(
        "from qerl_pl.formats.fp4 import NVFP4Format\n\nclass Mine(NVFP4Format):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b)]
    tables = [run(capsys, *words, f"--model.policy.quantization={one}") for one in ("planned_formats.Mine", "nvfp4")]
    assert tables[0] == tables[1]


def test_in_16_bits_what_has_no_adapter_needs_no_merged_copy(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path
) -> None:
    words = ["-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b), "--rollout.engine.adapter=merged"]
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    found = {}
    for quantization in ("none", "nvfp4"):
        for targets in (("q_proj",), every):
            settings = [
                f"--model.policy.quantization={quantization}",
                f"--model.policy.lora.targets=[{','.join(targets)}]",
            ]
            found[quantization, len(targets)] = float(run(capsys, *words, *settings)["engine: merged copies"][0])
    whole = found["nvfp4", 7]
    assert found == {("none", 1): 1.69, ("none", 7): whole, ("nvfp4", 1): whole, ("nvfp4", 7): whole}  # q, k and v


def test_a_forward_pass_of_the_engine_is_as_large_as_it_is_set(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path
) -> None:
    """Of 128 prompts of 256 tokens: 2 bytes of gate, up and their product, and of four hidden states."""
    words = ["-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b), "--data.batch_size", "128"]
    sizes: list[int | None] = [2048, None, 65536]
    tables = [run(capsys, *words, f"--rollout.engine.max_num_batched_tokens={size or 'null'}") for size in sizes]
    found = [float(table["engine: prefill and logits"][0]) for table in tables]
    token = 2 * (3 * 12288 + 4 * 4096) / GIB
    expected = [(tokens - 2048) * token for tokens in (2048, 8192, 32768)]
    assert [size - found[0] for size in found] == pytest.approx(expected, abs=0.02)


def test_a_forward_pass_of_the_engine_is_twice_as_large_on_a_large_gpu(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b), "--data.batch_size", "128"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = []
    for gib in (48, 140):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gib=gib: (1, gib * GIB))
        found.append(float(run(capsys, *words)["engine: prefill and logits"][0]))
    assert found[1] - found[0] == pytest.approx(8192 * 2 * (3 * 12288 + 4 * 4096) / GIB, abs=0.02)


def test_without_cached_prefixes_every_completion_has_a_prompt(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path
) -> None:
    """16 prompts of 256 tokens in a forward pass, or twice as many for groups of two."""
    words = ["-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b), "--rollout.group_size=2"]
    tables = [run(capsys, *words, f"--rollout.engine.prefix_caching={cached}") for cached in ("true", "false")]
    once, twice = (float(table["engine: prefill and logits"][0]) for table in tables)
    assert twice - once == pytest.approx(4096 * 2 * (3 * 12288 + 4 * 4096) / GIB, abs=0.02)


def test_full_fine_tuning_and_eight_bit_states_are_counted(capsys: pytest.CaptureFixture[str], qwen3_8b: Path) -> None:
    full = ["-c", "gsm8k", "-c", "full_finetuning", "--model.policy.path", str(qwen3_8b)]
    weights = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288) + 2 * 151936 * 4096
    table = run(capsys, *full, "--model.optimizer=torch.optim.AdamW")
    assert table["trained weights"] == [f"{4 * weights / GIB:.2f}"] * 2
    assert table["optimizer states"] == [f"{8 * weights / GIB:.2f}"] * 2
    pytest.importorskip("bitsandbytes")
    eight = run(capsys, *full, "--model.optimizer=bitsandbytes.optim.AdamW8bit")
    assert float(eight["optimizer states"][0]) == pytest.approx(2.03 * weights / GIB, rel=0.01)


def test_the_toy_policy_and_supervised_fine_tuning_have_tables_too(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert float(run(capsys, "-c", "quickstart")["in all"][0]) < 3
    table = run(capsys, "-c", "sft", "--model.policy.path", str(qwen3_8b))
    assert "keys and values" not in table and table["in all"][0] != table["in all"][1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 40 * GIB))
    assert main(["fit", "--dry-run", "-c", "quickstart"]) == 0
    out = capsys.readouterr().out
    assert " 40 GiB" in out and "48 GiB" not in out and "no GPU" not in out


def test_the_adapter_that_a_run_starts_from_is_held_twice(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path, tiny_policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-c", "quickstart", "--model.policy.path", str(tiny_policy_dir)]
    assert "reference policy" not in run(capsys, *words)
    monkeypatch.undo()  # a policy may be made
    monkeypatch.chdir(qwen3_8b.parent / "work")
    config = PolicyConfig(path=str(tiny_policy_dir), quantization="none", lora=LoraConfig(rank=4))
    Policy(tiny_policy_dir, config, torch.device("cpu"), seed=1).save(qwen3_8b / "adapter")
    assert "reference policy" in run(capsys, *words, "--model.policy.adapter", str(qwen3_8b / "adapter"))


@pytest.mark.parametrize("command", ["test", "validate"])
def test_only_a_training_is_planned(capsys: pytest.CaptureFixture[str], qwen3_8b: Path, command: str) -> None:
    assert main([command, "--dry-run", "-c", "gsm8k", "--model.policy.path", str(qwen3_8b)]) == 2
    assert f"a training; got qerl {command}; say qerl fit --dry-run" in capsys.readouterr().err


def test_a_model_without_a_config_is_refused(capsys: pytest.CaptureFixture[str], qwen3_8b: Path) -> None:
    (qwen3_8b / "config.json").unlink()
    assert main(["fit", "--dry-run", "-c", "gsm8k", "--model.policy.path", str(qwen3_8b)]) == 2
    assert "a dry run reads the model's config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rollout.engine.init_args.kv_cache_gib 0.001", "cache must hold one sequence of 1280 tokens, at least 0.1"),
        ("--model.minibatches 3", "minibatches must divide the completions"),
        (
            "--rollout.sampling.max_tokens 50000 --rollout.engine.init_args.kv_cache_gib 9",
            "must fit the model's 40960 positions; got 50256",
        ),
    ],
)
def test_what_a_start_refuses_is_not_planned(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path, words: str, message: str
) -> None:
    settings = ["-c", "gsm8k", "--model.policy.path", str(qwen3_8b), "--rollout.sampling.max_tokens", "1024"]
    assert main(["fit", "--dry-run", *settings, *words.split()]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and "in all" not in shown.out


def test_a_small_card_needs_what_the_readme_says(capsys: pytest.CaptureFixture[str], qwen3_8b: Path) -> None:
    shown = re.search(
        r"NVFP4 .* 3B needs ([\d.]+) GiB, 7B ([\d.]+), 14B ([\d.]+)", (pages.ROOT / "README.md").read_text()
    )
    assert shown is not None
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {"3b": (2048, 11008, 36, 16, 2), "7b": (3584, 18944, 28, 28, 4), "14b": (5120, 13824, 48, 40, 8)}
    for (name, numbers), expected in zip(sizes.items(), shown.groups(), strict=True):
        config = {"model_type": "qwen2", "vocab_size": 151936 if name == "3b" else 152064}
        config |= {"tie_word_embeddings": name == "3b", **dict(zip(names, numbers, strict=True))}
        (qwen3_8b / "config.json").write_text(json.dumps(config))
        words = [word for file in ("gsm8k", f"qwen2.5_{name}", "small_card") for word in ("-c", file)]
        needed = max(map(float, run(capsys, *words, "--model.policy.path", str(qwen3_8b))["in all"]))
        assert f"{needed:.1f}" == expected, name


def test_the_page_shows_what_the_command_prints(qwen3_8b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    config = {"model_type": "qwen2", "vocab_size": 152064, "num_key_value_heads": 4, "tie_word_embeddings": False}
    config["max_position_embeddings"] = 32768
    (qwen3_8b / "config.json").write_text(json.dumps(config | sizes))
    assert main(["fit", "--dry-run", "-c", "gsm8k", "-c", "qwen2.5_7b", "--model.policy.path", str(qwen3_8b)]) == 0
    (shown,) = re.findall(r"```text\n(memory that .*?)```", (pages.ROOT / "docs" / "memory.md").read_text(), re.DOTALL)
    assert capsys.readouterr().out == shown


def test_a_supervised_step_is_of_a_batch_of_the_longest_conversations(
    capsys: pytest.CaptureFixture[str], qwen3_8b: Path
) -> None:
    words = ["-c", "sft", "--model.policy.path", str(qwen3_8b), "--model.micro_batch_tokens=null"]
    tables = [run(capsys, *words, f"--data.batch_size={size}") for size in (1, 4)]
    one, four = (float(table["layer inputs and products"][1]) for table in tables)
    assert 0 < four == pytest.approx(4 * one, rel=0.01)
