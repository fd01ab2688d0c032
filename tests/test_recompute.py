"""What the backward pass recomputes: the choice by memory, and what happens where there is too little."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from qerl_kernels import select_backend
from rank_helpers import on_ranks
from test_update_ranks import ragged
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen2Config, Qwen2ForCausalLM

from qerl_pl.algorithm import DAPO
from qerl_pl.formats.norm import use_float32_norms
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.memory import pending_state_bytes
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.modules.update import PolicyUpdate
from qerl_pl.policy import activation_checkpointing
from qerl_pl.policy.activation_checkpointing import ActivationCheckpointing, MemorySettings, candidate_settings
from qerl_pl.policy.full_finetuning import use_master_weights
from qerl_pl.policy.lora import LoraSpec
from qerl_pl.policy.lora_adapter import LoraAdapter
from qerl_pl.policy.packed_layers import GatedMLP, use_gated_mlps
from qerl_pl.policy.packing import partition_micro_batches
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.runtime.random_state import deterministic

CPU = torch.device("cpu")


def make(folder: Path, checkpointing: Any, dropout: float = 0.0) -> Policy:
    lora = LoraConfig(rank=4, dropout=dropout)
    config = PolicyConfig(
        path=str(folder), quantization="none", dtype="float32", lora=lora, gradient_checkpointing=checkpointing
    )
    return Policy(folder, config, CPU, seed=1)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "partition"),
    [
        ([5, 5, 5], None, [[0, 1, 2]]),
        ([], 4, [[]]),
        ([9], 4, [[0]]),
        ([1, 9, 2], 4, [[1], [0, 2]]),
        ([6, 5, 4, 3, 2], 10, [[0, 2], [1, 3, 4]]),  # evenly it were 11 and 9
        ([4] * 9, 16, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),  # in order it were 16, 16 and 4
    ],
)
def test_sequences_are_partitioned_into_few_and_even_micro_batches(
    lengths: list[int], max_tokens: int | None, partition: list[list[int]]
) -> None:
    assert partition_micro_batches(lengths, max_tokens) == partition


def test_micro_batches_hold_each_sequence_once_and_no_more_tokens_than_allowed() -> None:
    draw = torch.Generator().manual_seed(0)
    for rows in range(1, 60):
        lengths = torch.randint(1, 100, (rows,), generator=draw).tolist()
        micro_batches = partition_micro_batches(lengths, 150)
        sizes = [sum(lengths[index] for index in micro_batch) for micro_batch in micro_batches]
        assert sorted(sum(micro_batches, [])) == list(range(rows)) and max(sizes) <= 150
        assert sizes == sorted(sizes, reverse=True) and len(micro_batches) <= 1 + sum(lengths) / 75


@pytest.mark.parametrize(("free", "mode"), [(10**12, False), (2 * 10**9, False), (None, False), (1, "offload")])
def test_auto_takes_the_fastest_that_fits_the_rank_with_least_memory(
    tiny_policy_dir: Path, free: int | None, mode: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(activation_checkpointing, "free_bytes", lambda device: free)
    checkpointing = make(tiny_policy_dir, "auto").checkpointing
    assert checkpointing.mode is True and checkpointing.state() is None
    with caplog.at_level(logging.INFO):
        checkpointing.choose_mode(1000, SINGLE_PROCESS)
    assert checkpointing.mode == mode and checkpointing.state() == str(mode).lower()
    assert caplog.text.count("gradient_checkpointing auto takes") == 1
    checkpointing.choose_mode(10**9, SINGLE_PROCESS)  # once only
    assert checkpointing.mode == mode


def model_of_7b() -> Qwen2ForCausalLM:
    """In the shape of Qwen2.5-7B, frozen, without memory of its own."""
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        return Qwen2ForCausalLM(config).to(torch.bfloat16).requires_grad_(False)


def of_7b(tiles: Any = None, has_dropout: bool = False) -> ActivationCheckpointing:
    with torch.device("meta"):
        model = model_of_7b()
        use_gated_mlps(model)
    return ActivationCheckpointing(model, "auto", has_dropout, torch.bfloat16, tiles)


@pytest.mark.parametrize(
    ("gpu", "cpu", "mode", "tile"),
    [
        (7.9, 4.0, True, None),
        (7.8, 4.0, "offload", None),
        (4.5, 4.0, "offload", None),
        (4.4, 4.0, "offload", 4096),
        (2.9, 4.0, "offload", 4096),
        (1.0, 4.0, "offload", 4096),  # the least there is
        (7.8, 3.8, True, 4096),
        (6.2, 3.8, True, 4096),
        (6.1, 3.8, True, 4096),
    ],
)
def test_auto_goes_on_to_offload_and_to_tiles(
    gpu: float, cpu: float, mode: Any, tile: int | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A micro-batch of 16,384 tokens at 7B, in units of 1.1 * 16384 bytes, by tensors of a layer of 3584 and 18944:

    saved: 28 inputs of 7168 bytes, 200,704; by offload two, 14,336. The MLP's backward pass: its layer's saved tensors
    151,672, gradients 82,944. Attention's: 38,008 - 21,504 saved, gradients 45,056, five partial sums 71,680 and those
    of 128 rows 560, a weight 8,288: 142,088. In tiles the MLP needs less than attention. So `true` needs 435,320,
    7.85 GB; `offload` 248,952, 4.49 GB; in tiles `true` 342,792, 6.18 GB; and `offload` 156,424, 2.82 GB. On the CPU
    offload takes 29 times 4 blocks of 32 MiB, 3.89 GB.
    """
    monkeypatch.setattr(activation_checkpointing, "free_bytes", lambda device: int(gpu * 1e9))
    monkeypatch.setattr(activation_checkpointing, "free_cpu_bytes", lambda: int(cpu * 1e9))
    chosen = of_7b("auto")
    with caplog.at_level(logging.INFO):
        chosen.choose_mode(16384, SINGLE_PROCESS)
    assert chosen.settings == MemorySettings(mode, tile) and tiles_of(chosen) == {tile}
    name = str(mode).lower() + ("" if tile is None else ", mlp_tile_tokens 4096")
    assert chosen.state() == name and f"auto takes {name}: a micro-batch of 16384 tokens" in caplog.text
    resumed = of_7b("auto")
    resumed.load(name)
    monkeypatch.setattr(activation_checkpointing, "free_bytes", lambda device: 10**12)
    resumed.choose_mode(16384, SINGLE_PROCESS)
    assert resumed.settings == chosen.settings and tiles_of(resumed) == {tile}


def tiles_of(checkpointing: ActivationCheckpointing) -> set[int | None]:
    modules = checkpointing._base.modules()
    return {module.tile_tokens for module in modules if isinstance(module, GatedMLP)}


def test_auto_takes_no_tiles_where_they_would_change_results_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpointing, "free_bytes", lambda device: 1)
    for tiles, has_dropout, tokens in ((None, False, 16384), ("auto", True, 16384), ("auto", False, 4096)):
        checkpointing = of_7b(tiles, has_dropout)
        checkpointing.choose_mode(tokens, SINGLE_PROCESS)
        assert checkpointing.settings == MemorySettings("offload") and checkpointing._next_settings() is None
    by_hand = of_7b(512)
    by_hand.choose_mode(16384, SINGLE_PROCESS)
    assert (
        by_hand.settings == MemorySettings("offload", 512)
        and by_hand.state() == "offload"
        and tiles_of(by_hand) == {512}
    )
    assert candidate_settings(True, "auto", True) == (MemorySettings(True),)  # what is set by hand stays


def test_memory_that_runs_out_goes_on_as_far_as_there_is_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_cpu, expected in (
        (10**12, ["selective", True, "offload", ("offload", 4096)]),
        (1, ["selective", True, (True, 4096)]),
    ):
        monkeypatch.setattr(activation_checkpointing, "free_bytes", lambda device: 10**12)
        monkeypatch.setattr(activation_checkpointing, "free_cpu_bytes", lambda size=on_cpu: size)
        checkpointing = of_7b("auto")
        checkpointing.choose_mode(16384, SINGLE_PROCESS)
        taken = [checkpointing.settings]
        while (settings := checkpointing._next_settings()) is not None:
            checkpointing._fall_back(settings, "for a test")
            taken.append(checkpointing.settings)
        assert taken == [
            MemorySettings(False),
            *(MemorySettings(*one) if isinstance(one, tuple) else MemorySettings(one) for one in expected),
        ]


def test_scores_with_a_soft_cap_are_those_of_sequences_and_not_of_a_micro_batch() -> None:
    """8 heads, 8 sequences of 2048 tokens against one of 16,384: 16 bytes each of 8 times as many scores, times 1.1."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Gemma2Config(num_hidden_layers=2, vocab_size=64))
    own = ActivationCheckpointing(model, "auto", False, torch.bfloat16)
    one, eight = (own.needed_bytes(MemorySettings(True), 16384, longest) for longest in (None, 2048))
    assert one - eight == pytest.approx(1.1 * 16 * 8 * 7 / 8 * 16384**2, rel=0.02)


def test_what_is_yet_to_come_is_counted_once_and_at_its_size() -> None:
    """7,615,616,512 weights that all train, in GiB: their gradients 28.37; AdamW's moments 56.74, 8-bit ones' 14.41.

    Always there, times 1.1: of the vocabulary's 152064 * 3584 numbers 2 bytes, their gradients of 2 and of 4 bytes,
    4.06; with an adapter the MLP's dense weight, 3584 * 18944 numbers of 2 bytes, 0.13, and attention's partial sums of
    128 rows, 0.01. An adapter of rank 32 has 28 * 32 * 90112 numbers: their gradients 0.30, their moments 0.60.
    """
    with torch.device("meta"):
        model = model_of_7b()
        use_float32_norms(model)
        use_master_weights(model)
        adapted = model_of_7b()
        LoraAdapter(adapted, LoraSpec(rank=32), False, "")
    full = ActivationCheckpointing(model, "auto", False, torch.bfloat16)
    lora = ActivationCheckpointing(adapted, "auto", False, torch.bfloat16)

    def fixed(checkpointing: ActivationCheckpointing) -> float:
        return checkpointing.needed_bytes(MemorySettings(True), 0) / 2**30

    assert fixed(lora) == pytest.approx(1.1 * 0.135 + 0.30 + 0.60, abs=0.01)
    assert fixed(full) == pytest.approx(1.1 * 4.06 + 28.37 + 56.74, abs=0.02)
    full.set_state_bytes(lambda: 2.03125)
    assert fixed(full) == pytest.approx(1.1 * 4.06 + 28.37 + 14.41, abs=0.02)
    full.set_state_bytes(lambda: 0.0)  # a checkpoint has brought them
    assert fixed(full) == pytest.approx(1.1 * 4.06 + 28.37, abs=0.02)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    assert fixed(full) == pytest.approx(1.1 * 4.06, abs=0.02)
    full.load("true")
    full.set_state_bytes(lambda: 8.0)  # it is chosen
    assert fixed(full) == pytest.approx(1.1 * 4.06, abs=0.02)


def test_a_state_that_a_checkpoint_has_brought_is_not_to_come() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.AdamW([weight])
    assert pending_state_bytes(optimizer, torch.optim.AdamW, CPU) == 8
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert pending_state_bytes(optimizer, torch.optim.AdamW, CPU) == 0


def test_ranks_choose_alike_and_all_follow_the_one_that_had_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [of_7b().needed_bytes(MemorySettings(mode), 6144) for mode in activation_checkpointing.MODES]
    monkeypatch.setattr(activation_checkpointing, "free_bytes", lambda device: needs[1])

    def work(ranks: Communicator) -> tuple[Any, Any, Any]:
        own = of_7b()
        own.choose_mode(6144 if ranks.rank else 50, ranks)
        chosen = own.mode
        if ranks.rank:
            own._fall_back(MemorySettings(True), "for a test")
        own.synchronize_mode(ranks)
        return chosen, own.mode, own.state()

    assert on_ranks(2, work) == [("selective", True, "true")] * 2


def test_a_choice_is_taken_over_and_a_configuration_stays(tiny_policy_dir: Path) -> None:
    chosen = make(tiny_policy_dir, "auto").checkpointing
    chosen.load("selective")
    chosen.choose_mode(10**12, SINGLE_PROCESS)
    assert chosen.mode == "selective" and chosen.state() == "selective"
    set_by_hand = make(tiny_policy_dir, True).checkpointing
    set_by_hand.load("selective")
    assert set_by_hand.mode is True and set_by_hand.state() is None
    for state in (None, "false"):
        other = make(tiny_policy_dir, "auto").checkpointing
        other.load(state)
        assert (other.mode, other.chosen) == ((True, False) if state is None else (False, True))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.nightly), 0.5])
def test_memory_that_runs_out_costs_a_step_down_and_no_bit(
    tiny_policy_dir: Path, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    experience = replace(ragged(8), truncated=torch.zeros(8, dtype=torch.bool))
    update = PolicyUpdate(DAPO(), 2, 1, 30, 0.5, 0.0, seed=0)

    def learn(checkpointing: Any, fail_at: list[int]) -> tuple[list[Tensor], Policy]:
        policy = make(tiny_policy_dir, checkpointing, dropout)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1.0)
        # In the middle of a backward pass: the last layer has its gradients, the first not yet.
        first = policy.base.get_decoder().layers[0]
        calls = []

        def fail(module: Any, inputs: Any, output: Any) -> None:
            def on_gradient(gradient: Tensor) -> None:
                calls.append(1)
                if len(calls) in fail_at:
                    raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

            tensor = output if isinstance(output, Tensor) else output[0]
            if tensor.requires_grad:
                tensor.register_hook(on_gradient)

        first.register_forward_hook(fail)
        schedule = LambdaLR(optimizer, lambda _: 1.0)
        update.run(policy, experience, optimizer, schedule, lambda loss: loss.backward())  # type: ignore[arg-type]
        return [parameter.detach() for parameter in trained], policy

    monkeypatch.setattr(activation_checkpointing, "free_bytes", lambda device: 10**12)
    expected, _ = learn(False, [])
    for failures in (1, 2, 3):  # the second micro-batch, and again when it is repeated
        result, policy = learn("auto", [2, 3, 4][:failures])
        assert policy.checkpointing.mode == activation_checkpointing.MODES[failures]
        assert all(torch.equal(one, other) for one, other in zip(result, expected, strict=True))
    for requested, fail_at in ((False, [2]), ("auto", [2, 3, 4, 5])):
        with pytest.raises(torch.OutOfMemoryError):
            learn(requested, fail_at)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("quantization", ["nvfp4", "none"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_modes_give_the_same_bits_on_a_gpu(
    tiny_policy_dir: Path, tmp_path: Path, quantization: str, dropout: float
) -> None:
    folder = tmp_path / "base"
    quantize_checkpoint(tiny_policy_dir, folder)
    folder = folder if quantization == "nvfp4" else tiny_policy_dir
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(200, 1000, (12,), generator=draw)
    tokens = torch.randint(5, 300, (12, int(lengths.max())), generator=draw)
    at = torch.arange(tokens.shape[1])
    mask = (at >= 100) & (at < lengths[:, None])
    inputs = [tensor.cuda() for tensor in (tokens, lengths, mask)]
    gradients = []
    select_backend("triton")
    try:
        for mode in (False, "selective", True, True):
            lora = LoraConfig(rank=8, dropout=dropout)
            config = PolicyConfig(path=str(folder), quantization=quantization, lora=lora, gradient_checkpointing=mode)  # type: ignore[arg-type]
            policy = Policy(folder, config, torch.device("cuda"), seed=1).train()
            with policy.perturbed(3), deterministic():
                torch.manual_seed(5)
                policy.token_values(*inputs, 1.0)[0].sum().backward()
            gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    finally:
        select_backend("torch")
    for other in gradients[1:]:
        assert all(torch.equal(one, two) for one, two in zip(gradients[0], other, strict=True))
