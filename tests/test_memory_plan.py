"""What a run needs, estimated: against measured peaks, against tensors counted on a CPU, and against sums by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import live_bytes_of_update, untrained_policy
from pages import ROOT
from qerl_kernels import flash_attention_4, logprob
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from qerl_pl.errors import UserError
from qerl_pl.formats.base import QUANTIZED
from qerl_pl.models import memory_plan
from qerl_pl.models.families import DELTA_NET, PROJECTIONS
from qerl_pl.models.memory import GIB, check_length
from qerl_pl.models.memory_plan import (
    CONTEXT,
    MicroBatch,
    RunPlan,
    activation_bytes,
    run_memory,
    saved_bytes,
    working_bytes,
)
from qerl_pl.models.shape import BITS, Shape

RESULTS = ROOT / "benchmarks" / "results"
QWEN = Shape(3584, 18944, 28, 28, 3584, 512, 152064, False, False)
"""Qwen2.5-7B's."""
QWEN_32B = Shape(5120, 27648, 64, 40, 5120, 1024, 152064, False, False)
PROMPT = 42
"""Tokens of an arithmetic prompt in the toy tokenizer, 41 to 43."""
MODES = {"true": True, "selective": "selective", "false": False}


def record(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())["results"]


def within(estimate: float, measured: float, share: float = 0.07) -> None:
    assert abs(estimate / measured - 1) <= share, (estimate, measured)


# Records of 5861749 and before (rl_step_*, update_speed, ranks_*) were measured before the norm, the activation and the
# rotation were single operations, which saved more: of them only what is held between steps is compared.


@pytest.fixture(autouse=True)
def by_flash_attention_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records are of PyTorch's flash attention."""
    monkeypatch.setattr(flash_attention_4, "available", lambda *_: False)


@pytest.mark.parametrize(("name", "shape"), [("7b", QWEN), ("32b", QWEN_32B)])
def test_what_is_held_between_steps_is_what_was_measured(name: str, shape: Shape) -> None:
    median = record(f"rl_step_{name}_nvfp4_1.json")["median"]
    held = run_memory(RunPlan(shape, MicroBatch(4432, 8, rank=32), kv_cache_gib=2.0)).rollout
    for purpose, tag in (("base model", "base"), ("trained weights", "adapter"), ("optimizer states", "optimizer")):
        within(held[purpose] / GIB, median[f"memory/{tag}_gib"], 0.005)
    two = run_memory(RunPlan(shape, MicroBatch(4432, 8, rank=32), shares_weights=False)).rollout
    assert two["base model, the engine's copy"] == two["base model"]


@pytest.mark.parametrize("part", ["nvfp4", "mxfp4", "nf4", "none", "full"])
def test_formats_hold_what_was_measured_and_their_activations_peak_where_they_did(part: str) -> None:
    """32 completions of 256 tokens in three micro-batches, of 11, 11 and 10."""
    step = record("formats_7b.json")[part]["steps"][1]  # the first has no optimizer states before it
    full, quantization = part == "full", "none" if part == "full" else part
    batch = MicroBatch(11 * (256 + PROMPT), 11, rank=0 if full else 32, full_finetuning=full, train_norms=full)
    state = 2.03125 if full else 8.0
    plan = RunPlan(QWEN, batch, 3, quantization, state_bytes=state, kv_cache_gib=8.0, shares_weights=part != "none")
    held = run_memory(plan).rollout
    base = held["base model"] + held.get("base model, the engine's copy", 0)
    within(base / GIB, step["memory/base_gib"], 0.005)
    within(held["trained weights"] / GIB, step["memory/adapter_gib"], 0.005)
    within(held["optimizer states"] / GIB, step["memory/optimizer_gib"], 0.005)
    within(activation_bytes(QWEN, batch) / GIB, step["memory/activations_gib"], 0.05)


@pytest.mark.parametrize(
    ("name", "mode", "sequences"),
    [
        ("step_against_trl", "true", 8),
        ("step_against_trl", "selective", 8),
        ("step_against_trl_kept", "false", 4),
    ],
)
def test_the_peak_of_a_run_is_what_the_driver_counted(name: str, mode: str, sequences: int) -> None:
    """4 prompts of 256 tokens, 8 completions of 512 each, the engine asleep in the update."""
    measured = record(f"{name}.json")["found"][f"qerl_pl, NVFP4, gradient_checkpointing {mode}"]["peak_gib"]
    batch = MicroBatch(768 * sequences, sequences, checkpointing=MODES[mode], rank=32)
    plan = RunPlan(QWEN, batch, 32 // sequences, kv_cache_gib=2.0, prompt_tokens=4 * 256, max_num_seqs=32)
    within(run_memory(plan).peak / GIB, measured)


@pytest.mark.parametrize("number", [0, 3, 4])
def test_the_peaks_of_long_completions_are_what_the_driver_counted(number: int) -> None:
    """16 prompts of 128 tokens, 8 completions of 2048 each: 4 bits, merged for rollouts, and fused; 16 bits fused."""
    measured = record("step_against_unsloth.json")["found"][number]
    sequences, kind = measured["sequences"], {"ours-nvfp4": "nvfp4", "ours-16": "none"}[measured["part"]]
    batch = MicroBatch(2176 * sequences, sequences, checkpointing=MODES[measured["gradient_checkpointing"]], rank=32)
    plan = RunPlan(
        QWEN, batch, 128 // sequences, kind, kv_cache_gib=measured["phases"][0]["memory/kv_cache_gib"],
        merges=measured["adapter"] == "auto", prompt_tokens=16 * 128, prefill_tokens=16384, max_num_seqs=128,
    )  # fmt: skip
    found = run_memory(plan)
    for phase, name in ((found.rollout, "rollout"), (found.update, "update")):
        within(sum(phase.values()) / GIB, measured["peak_gib"][name], 0.08)


def shape_of_qwen3_5_27b() -> Shape:
    return Shape.of(
        Qwen3_5TextConfig(
            hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
            num_key_value_heads=4, head_dim=256, linear_num_value_heads=48, vocab_size=248320,
        )
    )  # fmt: skip


def test_the_peaks_of_a_run_of_qwen3_5_27b_are_what_the_driver_counted() -> None:
    """16 prompts of 128 tokens, 8 completions of 1024 each; every completion's prompt is computed."""
    row = re.search(
        r"^\| 27b \| 16 x 8 x 1024 .*\| ([\d.]+) / ([\d.]+) \|", (RESULTS / "delta_nets.md").read_text(), re.M
    )
    assert row is not None
    batch = MicroBatch(7 * 1152, 7, checkpointing=True, rank=32)
    plan = RunPlan(
        shape_of_qwen3_5_27b(), batch, 19, kv_cache_gib=32.0, prompt_tokens=128 * 128, prefill_tokens=16384,
        max_num_seqs=128, targets=(*PROJECTIONS, *DELTA_NET),
    )  # fmt: skip
    found = run_memory(plan)
    for phase, measured in zip((found.rollout, found.update), row.groups(), strict=True):
        within(sum(phase.values()) / GIB, float(measured))


def test_the_engine_s_gated_delta_nets_are_counted() -> None:
    """Elements of a token, by hand: q, k and v [2 x 2048 + 6144] thrice, z and four results [6144], products of two
    tokens [48 x 64] thrice, a state [128 x 6144] for 64 tokens, and four hidden states."""
    plans = (RunPlan(shape_of_qwen3_5_27b(), MicroBatch(64), 1, prompt_tokens=tokens) for tokens in (1024, 2048))
    first, second = (run_memory(plan).rollout["engine: prefill and logits"] for plan in plans)
    assert (second - first) / 1024 == 2 * (3 * 10240 + 5 * 6144 + 3 * 48 * 64 + 2 * 6144 + 4 * 5120)


def update_memory(plan: RunPlan) -> float:
    """Bytes of PyTorch's tensors at the peak of an update: CUDA's context is not among them."""
    return sum(size for name, size in run_memory(plan).update.items() if name != CONTEXT)


@pytest.mark.parametrize(("way", "mode"), [("nvfp4", True), ("selective", "selective"), ("no_checkpointing", False)])
def test_an_update_without_an_engine_is_what_was_measured(way: str, mode: Any) -> None:
    """6 sequences of 1024 tokens; the first table of the page, and of it PyTorch's peak."""
    row = re.search(rf"^\| {way} \| 6144 .*\| ([\d.]+) \|$", (RESULTS / "update_recompute.md").read_text(), re.M)
    assert row is not None
    plan = RunPlan(QWEN, MicroBatch(6144, 6, checkpointing=mode, rank=32), engine=False)
    within(update_memory(plan) / GIB, float(row[1]), 0.02)


def test_an_update_of_one_long_completion_is_what_was_measured() -> None:
    """Of Qwen3-8B's shape."""
    shape = Shape(4096, 12288, 36, 32, 4096, 1024, 151936, False, True)
    ways = {"true": (True, None), "true, tiles": (True, 4096)}
    ways |= {"offload": ("offload", None), "offload, tiles": ("offload", 4096)}  # type: ignore[dict-item]
    found = record("context_update_8b.json")["found"]
    assert "true" in found
    for way, lengths in found.items():
        mode, tile = ways[way]
        for length, one in lengths.items():
            batch = MicroBatch(int(length), 1, checkpointing=mode, mlp_tile_tokens=tile, rank=32)
            share = 0.02 if way == "true" else 0.07
            within(update_memory(RunPlan(shape, batch, engine=False)) / GIB, one["peak_gib"], share)


# By hand --------------------------------------------------------------------------------------------------------------


def test_what_an_update_saves_and_works_with_is_counted_by_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In hidden states of a token, of 2 bytes: queries 1, keys 1/7, MLP 37/7."""
    keys, inner, token = 512 / 3584, 18944 / 3584, 2 * 3584 * 1000
    batch = MicroBatch(1000)
    assert saved_bytes(QWEN, batch) == 28 * token
    assert saved_bytes(QWEN, replace(batch, checkpointing="offload")) == 2 * token
    products = 28 * (1 + 3 + 2 * keys + 2 * inner) * token  # the input; o, q and attention, k and v, gate and up
    sums = 28 * 4 * 28 * 1000  # float32, each head's
    assert saved_bytes(QWEN, replace(batch, checkpointing="selective")) == pytest.approx(products + sums)
    precise = replace(batch, checkpointing="selective", dtype=torch.float32)  # not by flash attention
    assert saved_bytes(QWEN, precise) == pytest.approx(2 * (products - 28 * token))
    small = 1000 * (4 * 28 + 8)  # of attention a log-sum-exp a head, of each norm a factor
    layer = 6 + 2 * keys + 3 * inner
    assert saved_bytes(QWEN, replace(batch, checkpointing=False)) == pytest.approx(28 * (layer * token + small))
    # Of the layer's: norms' results, the MLP's side of the residual, q, k, v and attention's result; gate, up, and the
    # gradients of both and of their product; that of the layer's result.
    mlp = (5 + 2 * keys + 5 * inner + 1) * token + small
    assert working_bytes(QWEN, replace(batch, tokens=10_000))["MLP"] == pytest.approx(10 * mlp)
    # With few tokens a dense weight is more than the gradient that is not there yet when it is.
    assert working_bytes(QWEN, batch)["MLP"] == pytest.approx(mlp - inner * token + 2 * 3584 * 18944)
    # Five partial sums in float32 for one short sequence of 28 heads, one for eight.
    sums = [working_bytes(QWEN, replace(batch, sequences=count))["attention"] for count in (1, 8)]
    assert sums[0] - sums[1] == 4 * 3584 * (5 * 1128 - 2024)
    # A long one has groups of 12, 12 and 4 heads: eleven sums of twelve, copies of twelve, and keys and values in
    # float32; whole, it has five sums of 28 heads, and keys' and values' gradients for every head.
    long = replace(batch, tokens=20480)
    of_groups = 4 * 11 * (20480 + 128) * 12 * 128 + 20480 * (2 * 7 * 12 * 128 + 2 * 4 * 512)
    whole = 4 * 5 * 1128 * 3584 + 1000 * 2 * 2 * (3584 + 512)
    dense = 2 * 3584 * 18944
    rest = working_bytes(QWEN, batch)["attention"] - whole - dense
    assert working_bytes(QWEN, long)["attention"] == of_groups + 20.48 * rest + dense
    # By FlashAttention 4 all gradients are summed in float32, with two numbers for each head, and the sums converted.
    monkeypatch.setattr(flash_attention_4, "available", lambda device, head_size: head_size == 128)
    of_version_4 = 4 * (20480 + 128) * (3584 + 2 * 512 + 2 * 28) + 20480 * 2 * 2 * 512
    assert working_bytes(QWEN, long)["attention"] == of_version_4 + 20.48 * rest + dense
    tiled = replace(batch, mlp_tile_tokens=100)
    assert working_bytes(QWEN, tiled)["MLP"] == pytest.approx(
        (5 + 2 * keys + 2) * token + small + (5 * inner + 4) * token / 10 + 2 * 3584 * 18944
    )
    assert working_bytes(QWEN, replace(tiled, mlp_tile_tokens=1000)) == working_bytes(QWEN, batch)
    mixture = replace(QWEN, experts=64, top_k=4)  # is never in tiles
    assert working_bytes(mixture, tiled) == working_bytes(mixture, batch)
    assert working_bytes(QWEN, batch)["logits"] == 12 * 3584 * 1000 + 2 * 152064 * 1000
    longest = MicroBatch(131072, mlp_tile_tokens=4096, checkpointing="offload")
    assert working_bytes(QWEN, longest)["logits"] == 12 * 3584 * 131072 + logprob.CHUNK_BYTES
    assert activation_bytes(QWEN, longest) < 0.5 * activation_bytes(QWEN, replace(longest, checkpointing=True))


def test_phases_of_a_run_hold_what_they_should() -> None:
    plan = RunPlan(QWEN, MicroBatch(8192, 8, rank=32), micro_batches=4, kv_cache_gib=3.0)
    memory = run_memory(plan)
    assert memory.rollout["keys and values"] == 3 * GIB and "keys and values" not in memory.update
    assert run_memory(replace(plan, sleeps=False)).update["keys and values"] == 3 * GIB
    adapter = 28 * 32 * 90112
    assert memory.update["gradients"] == 4 * adapter and "gradients" not in memory.rollout
    assert run_memory(replace(plan, micro_batches=1)).update["gradients"] == 0
    assert memory.peak == max(sum(memory.rollout.values()), sum(memory.update.values()))
    rows = memory.table()
    assert rows[-1][0] == "in all" and rows[-1][1] * GIB == pytest.approx(sum(memory.rollout.values()))
    tiny = run_memory(replace(plan, batch=MicroBatch(10, rank=32)))
    assert tiny.update["optimizer step"] == 4 * adapter and "working memory of the update" not in tiny.update
    offload = run_memory(replace(plan, batch=replace(plan.batch, checkpointing="offload")))
    assert offload.cpu == {"layer inputs": 29 * 2**26} and memory.cpu == {}
    alone = run_memory(replace(plan, engine=False))
    assert not [name for name in alone.rollout if "engine" in name or "keys" in name]
    full = run_memory(replace(plan, batch=MicroBatch(8192, full_finetuning=True), quantization="none", reference=True))
    started = run_memory(replace(plan, reference=True))  # of the adapter that it started from, in float32
    assert started.rollout["reference policy"] == started.update["reference policy"] == 4 * adapter
    assert full.rollout["trained weights"] == 2 * full.rollout["base model"] == 2 * full.rollout["reference policy"]


def test_fused_targets_count_as_their_parts_with_one_a_and_unknown_ones_are_refused() -> None:
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert QWEN.adapter_weights(8, names) == QWEN.adapter_weights(8) - 28 * 8 * 3 * 3584 == 28 * 8 * (90112 - 3 * 3584)
    assert (
        QWEN.adapter_weights(8, ("q_proj",))
        == 28 * 8 * 7168
        == QWEN.engine_adapter_weights(8, ("q_proj",))
        - 28
        * (
            8 * 1024  # rows of k and v
        )
    )
    with pytest.raises(UserError, match="names lm_head"):
        QWEN.adapter_weights(8, ("lm_head",))


def test_targets_with_their_path_count_the_linears_that_they_name() -> None:
    """Rank 8, of 28 layers: q 3584 + 3584, k 3584 + 512, down 18944 + 3584."""
    q_proj, k_proj, down_proj = 8 * 7168, 8 * 4096, 8 * 22528
    assert QWEN.adapter_weights(8, ("self_attn.q_proj",)) == 28 * q_proj
    assert QWEN.adapter_weights(8, ("q_proj", "self_attn.q_proj", "self_attn.k_proj")) == 28 * (q_proj + k_proj)
    one_layer = ("self_attn.q_proj", "layers.1.mlp.down_proj")  # not layers.11
    assert QWEN.adapter_weights(8, one_layer) == 28 * q_proj + down_proj
    # Over the rows of k and v, too.
    assert QWEN.engine_adapter_weights(8, one_layer) == 28 * (q_proj + 8 * 1024) + down_proj
    assert QWEN.adapter_weights(8, ("model.layers.27.self_attn.qkv_proj",)) == q_proj + 2 * 8 * 512
    for target in ("mlp.q_proj", "layers.28.self_attn.q_proj", "attn.q_proj"):
        with pytest.raises(UserError, match=f"targets names {target}: leave"):
            QWEN.adapter_weights(8, (target,))


def test_an_unquantized_base_has_the_bits_of_its_dtype() -> None:
    assert set(BITS) == set(QUANTIZED)
    weights = QWEN.linear_weights + QWEN.embedding_weights
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        assert QWEN.base_bytes("none", dtype) == size * weights


def test_a_cache_needs_vllms_reserved_block_beside_its_longest_sequence() -> None:
    """Llama 3.1 8B: 131,072 bytes a token, 2048 blocks of 16 tokens in 4 GiB, of which vLLM gives away 2047."""
    with pytest.raises(UserError, match=r"one sequence of 32768 tokens, at least 4\.004 GiB; got kv_cache_gib 4:"):
        check_length(32768, 32768, 4.0, lambda tokens: 131072 * tokens)
    check_length(32736, 32736, 4.0, lambda tokens: 131072 * tokens)


@pytest.mark.parametrize(
    ("config", "full", "window"),
    [
        (Gemma2Config(num_hidden_layers=6, sliding_window=500), 3, 500),  # every other layer
        (Gemma3TextConfig(num_hidden_layers=13, sliding_window=100), 2, 100),  # the sixth and the twelfth are full
        (GptOssConfig(num_hidden_layers=4, sliding_window=128), 2, 128),
        (MistralConfig(num_hidden_layers=3, sliding_window=64), 0, 64),
        (MistralConfig(num_hidden_layers=3, sliding_window=None), 3, 0),
        (Qwen2Config(num_hidden_layers=3), 3, 0),
        (Qwen2Config(num_hidden_layers=6, use_sliding_window=True, max_window_layers=4, sliding_window=64), 4, 64),
        (Phi3Config(num_hidden_layers=2, sliding_window=64), 0, 64),
        (LlamaConfig(num_hidden_layers=2), 2, 0),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_cache_is_refused_that_does_not_hold_a_windows_tokens_either(
    config: PretrainedConfig, full: int, window: int
) -> None:
    """vLLM needs more, by the tokens of its forward passes, and says so itself."""
    shape, layers = Shape.of(config), config.num_hidden_layers
    token = 2 * 2 * shape.kv_dim
    for tokens in (40, 1000):
        held = full * tokens + (layers - full) * min(window, tokens)
        assert shape.sequence_kv_bytes(tokens, torch.bfloat16) == held * token
    enough = (full * 1032 + (layers - full) * window) * token / GIB
    check_length(1000, 1000, enough, lambda tokens: shape.sequence_kv_bytes(tokens, torch.bfloat16))
    with pytest.raises(UserError, match="one sequence of 1000 tokens, at least"):
        check_length(1000, 1000, 0.999 * enough, lambda tokens: shape.sequence_kv_bytes(tokens, torch.bfloat16))


def test_windows_hold_their_tokens_and_those_of_the_passes_under_way() -> None:
    full = replace(QWEN, kv_dim=3584)  # so that keys and values bound the longest completion
    shape, of_layer = replace(full, window=1000, window_layers=20), 2 * 3584 * 2  # of 28 layers
    batch = MicroBatch(1, rank=32, checkpointing="offload")
    plan = RunPlan(shape, batch, kv_cache_gib=0.0, prefill_tokens=500)
    assert plan.sequence_kv_bytes(1400) == 1400 * 28 * of_layer
    assert plan.sequence_kv_bytes(10_000) == (8 * 10_000 + 20 * 1500) * of_layer
    assert shape.sequence_kv_bytes(10_000, torch.bfloat16) == (8 * 10_000 + 20 * 1000) * of_layer
    longest = [memory_plan.longest_completion(replace(plan, shape=one), 100, 12) for one in (full, shape)]
    assert longest[0] < longest[1]


def test_the_longest_completion_fits_and_a_longer_one_does_not() -> None:
    plan = RunPlan(QWEN, MicroBatch(1, mlp_tile_tokens=4096, rank=32), kv_cache_gib=1.0)
    found = [memory_plan.longest_completion(plan, 100, gib) for gib in (6, 12, 24, 48)]
    assert found[0] == 0 < found[1] < found[2] < found[3]

    def peak(length: int) -> float:
        cache = max(1.0, (length + 100) * 57344 / GIB)
        return run_memory(replace(plan, batch=replace(plan.batch, tokens=length + 100), kv_cache_gib=cache)).peak

    assert peak(found[2]) <= 24 * GIB < peak(found[2] + 1)
    rollout_bound = replace(
        plan, shape=replace(QWEN, kv_dim=3584), batch=replace(plan.batch, checkpointing="offload"), kv_cache_gib=0.0
    )
    halved = replace(plan, kv_dtype=torch.float8_e4m3fn)
    assert (plan.sequence_kv_bytes(3), halved.sequence_kv_bytes(3)) == (3 * 57344, 3 * 28672)
    many = replace(rollout_bound, kv_dtype=torch.float8_e4m3fn)
    assert memory_plan.longest_completion(many, 100, 12) > 1.5 * memory_plan.longest_completion(rollout_bound, 100, 12)
    offload = replace(plan, batch=replace(plan.batch, checkpointing="offload"))
    assert memory_plan.longest_completion(offload, 100, 24) > 1.4 * found[2]


def test_a_batch_of_the_longest_completions_fits() -> None:
    """An engine that caches a batch, and micro-batches of several sequences."""
    plan = RunPlan(QWEN, MicroBatch(1, rank=32), kv_cache_gib=0.0, engine_is_dense=True, max_num_seqs=64)

    def peak(length: int) -> float:
        batch = replace(plan.batch, tokens=2 * (length + 100), sequences=2)
        cache = 64 * plan.sequence_kv_bytes(length + 100) / GIB
        return run_memory(replace(plan, batch=batch, kv_cache_gib=cache)).peak

    found = memory_plan.longest_completion(plan, 100, 48, sequences=2)
    assert peak(found) <= 48 * GIB < peak(found + 1)


# Tensors counted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [None, 128])
@pytest.mark.parametrize("mode", [True, "selective", False])
def test_a_counted_update_needs_what_is_estimated(
    tmp_path: Path, mode: Any, tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, whose plain norms, rotation and activation save more: the activation's result, norms in float32."""
    tokens = 2048
    monkeypatch.setattr(memory_plan, "SMS", 1)
    config = Qwen2Config(  # the MLP is the widest part
        vocab_size=64, hidden_size=64, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    policy = untrained_policy(config, tmp_path, gradient_checkpointing=mode, mlp_tile_tokens=tile)
    live = live_bytes_of_update(policy, 1, tokens)
    shape = Shape.of(policy.base.config)
    assert shape == Shape(64, 512, 6, 4, 64, 64, 64, False, False)
    batch = MicroBatch(tokens, 1, torch.float32, mode, tile, rank=2)
    estimate = activation_bytes(shape, batch)
    # silu(gate) is saved besides, and gives its gradient besides: one more tensor in the MLP; plain norms save their
    # inputs' product with the inverse; rotation and the padded attention hold a few more.
    layers = 6 if mode is False else 1
    wide = 4 * 512 * (tokens if tile is None else tile)
    more = (layers if tile is None else 1) * wide + layers * 8 * 4 * 64 * tokens
    assert estimate * 0.95 < live.peak < (estimate + more) * 1.1


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("mode", [True, False])
def test_scores_with_a_soft_cap_are_counted(tmp_path: Path, mode: Any, sequences: int) -> None:
    """Gemma 2's attention in plain PyTorch; here they are nearly all that an update needs."""
    config = Gemma2Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    policy = untrained_policy(config, tmp_path, gradient_checkpointing=mode)
    length = 512
    live = live_bytes_of_update(policy, sequences, length)
    shape, batch = Shape.of(policy.base.config), MicroBatch(length * sequences, sequences, torch.float32, mode, rank=2)
    within(activation_bytes(shape, batch), live.peak, 0.05)
    assert not Shape.of(Gemma2Config(attn_logit_softcapping=None)).soft_capped
    # In 16 bits the weights are saved once more, in that precision.
    low = replace(batch, dtype=torch.bfloat16, checkpointing=False)
    scores = 3 * 8 * length * length * sequences
    assert saved_bytes(shape, low) - saved_bytes(replace(shape, soft_capped=False), low) == 10 * scores


def test_inputs_of_norms_of_outputs_are_counted(tmp_path: Path) -> None:
    """Two more tensors of hidden states in each layer of Gemma 3 than in one of Qwen 3, whose heads have norms too."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512}
    shapes, peaks, tokens = [], [], 512
    for config in (Qwen3Config(**sizes), Gemma3TextConfig(**sizes)):
        policy = untrained_policy(config, tmp_path / config.model_type)
        shapes.append(Shape.of(policy.base.config))
        peaks.append(live_bytes_of_update(policy, 1, tokens).peak)
    batch = MicroBatch(tokens, 1, torch.float32, False, rank=2)
    without, counted = (saved_bytes(shape, batch) for shape in shapes)
    assert peaks[1] - peaks[0] >= counted - without == 4 * 2 * 4 * 128 * tokens
    selective = replace(batch, checkpointing="selective")  # which saves the product of the last linear, too
    assert saved_bytes(shapes[1], selective) - saved_bytes(shapes[0], selective) == 4 * 4 * 128 * tokens


def test_tiles_add_up_the_gradients_of_three_whole_weights() -> None:
    batch = MicroBatch(4096, dtype=torch.bfloat16, mlp_tile_tokens=1024)
    whole, adapter = (working_bytes(QWEN, replace(batch, full_finetuning=full))["MLP"] for full in (True, False))
    largest = max(rows * columns for rows, columns in QWEN.linears.values())
    assert whole - adapter == largest * (2 + 6 * 4)
