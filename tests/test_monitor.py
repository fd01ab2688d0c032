"""Where the memory goes, against sizes worked out from the toy policy's shapes."""

from pathlib import Path

import pytest
import torch
from fit_helpers import configuration
from lightning.pytorch.loggers import TensorBoardLogger
from plain_ops import to_marlin
from qerl_kernels import MarlinRows
from qerl_kernels.reference import NVFP4Tensor
from safetensors.torch import load_file
from short_run import data, module_of, trainer_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig

from qerl_pl.algorithm import GRPO
from qerl_pl.callbacks import Monitor
from qerl_pl.callbacks.monitor import measure_memory
from qerl_pl.cli.main import QeRLCLI
from qerl_pl.engines.base import SharedWeights
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig, QeRLModule

CPU = torch.device("cpu")
GIB = 2**30
LAYERS, WIDTH, RANK = 2, 128, 4
LINEARS = 7 * LAYERS  # all of them 128 x 128: the toy policy's MLP is as wide as the rest here
PACKED = WIDTH * WIDTH // 2 + WIDTH * WIDTH // 16 + 4  # codes, block scales, global scale
BIASES = 3 * LAYERS * WIDTH * 4  # q, k, v
NORMS = (2 * LAYERS + 1) * WIDTH * 4
ROTARY = 2 * 32 * 4  # two float32 tensors of half a head's 64 channels
ADAPTER = LINEARS * 2 * RANK * WIDTH * 4


@pytest.fixture(scope="module")
def base(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("monitor") / "nvfp4"
    quantize_checkpoint(tiny_policy_dir, folder)
    return folder


def embeddings(base: Path) -> int:
    """Bytes of the embeddings, which lm_head shares."""
    return AutoConfig.from_pretrained(base).vocab_size * WIDTH * 4


def make(base: Path, shared: SharedWeights | None = None) -> Policy:
    return Policy(base, PolicyConfig(path=str(base), dtype="float32", lora=LoraConfig(rank=RANK)), CPU, 0, shared)


def size(gib: float) -> int:
    return round(gib * GIB)


def test_counts_the_trainers_own_tensors(base: Path) -> None:
    policy = make(base)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad])
    before = measure_memory(policy, None, [optimizer], {})
    assert before["optimizer"] == 0
    tokens = torch.tensor([[5, 6, 7]])
    mask = torch.tensor([[False, True, True]])
    policy.token_values(tokens, torch.tensor([3]), mask, 1.0)[0].sum().backward()
    optimizer.step()
    report = measure_memory(policy, None, [optimizer], {})
    assert size(report["base"]) == LINEARS * PACKED + embeddings(base) + BIASES + NORMS + ROTARY
    assert report["kv_cache"] == 0
    assert size(report["adapter"]) == ADAPTER
    assert size(report["optimizer"]) == 2 * ADAPTER + 2 * LINEARS * 4  # two moments, and a step count a matrix


def test_shared_weights_count_once_beside_the_engines_own(base: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(LAYERS) for part in "qkv"]
    linears, tensors = {}, load_file(base / "model.safetensors")
    for layer in range(LAYERS):
        fused = names[3 * layer : 3 * layer + 3]  # q, k and v in one matrix
        packed, scale = (
            torch.cat([tensors[f"{name}.weight_{kind}"] for name in fused]) for kind in ("packed", "scale")
        )
        held = to_marlin(NVFP4Tensor(packed, scale, tensors[f"{fused[0]}.weight_global_scale"]))
        for index, name in enumerate(fused):
            linears[name] = MarlinRows(held, index * WIDTH, (index + 1) * WIDTH)
    table = tensors["model.embed_tokens.weight"]
    shared = SharedWeights(linears, {"model.embed_tokens.weight": table})
    engine = {"weights": 1.0, "adapter": 0.25, "kv_cache": 2.0}
    report = measure_memory(make(base, shared), shared, [], engine)
    own = (LINEARS - 6) * PACKED + BIASES + NORMS + ROTARY
    assert size(report["base"]) == own + GIB  # the engine's GiB includes what it shares
    all_shared = measure_memory(make(base, shared), shared, [], {})
    assert size(all_shared["base"]) == own + LAYERS * 3 * (PACKED - 4) + LAYERS * 4 + embeddings(base)
    assert size(report["adapter"]) == ADAPTER + GIB // 4
    assert report["kv_cache"] == 2.0


def test_the_reference_policy_of_full_finetuning_is_a_copy_of_the_base(tiny_policy_dir: Path, tmp_path: Path) -> None:
    found = {}
    for beta in (0.0, 0.1):
        policy = PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32", finetune="full")
        module = QeRLModule(policy, GRPO(beta=beta))
        trainer = trainer_of(tmp_path / str(beta), Monitor(), max_steps=1, limit_val_batches=0)
        trainer.fit(module, datamodule=data())
        found[beta] = float(trainer.callback_metrics["memory/base_gib"])
    linears = LINEARS * WIDTH * WIDTH * 4
    assert size(found[0.1] - found[0.0]) == linears + embeddings(tiny_policy_dir) + BIASES + NORMS + ROTARY


def test_a_run_logs_each_steps_memory(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = configuration(base, tmp_path / "run")
    settings["model"]["policy"] |= {"lora": {"rank": RANK}, "train_norms": False}
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    wanted = ("RolloutCallback", "Monitor")
    settings["trainer"]["callbacks"] = [c for c in settings["trainer"]["callbacks"] if c["class_path"].endswith(wanted)]
    monkeypatch.setattr("sys.argv", ["qerl"])
    QeRLCLI({"subcommand": "fit", "fit": settings})
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    own = LINEARS * PACKED + embeddings(base) + BIASES + NORMS + ROTARY
    noisy_norms = 2 * LAYERS * 2 * WIDTH * 4  # the engine keeps a noisy norm's base and clean scale beside the used one
    engine = LINEARS * WIDTH * WIDTH * 4 + embeddings(base) + BIASES + NORMS + noisy_norms + ROTARY + ADAPTER
    expected = {"base": own + engine, "adapter": ADAPTER, "optimizer": 2 * ADAPTER + 2 * LINEARS * 4, "kv_cache": 0}
    for name, size_ in expected.items():
        values = [event.value * GIB for event in events.Scalars(f"memory/{name}_gib")]
        assert values == pytest.approx([size_, size_], rel=1e-6), name
    assert "memory/driver_gib" not in events.Tags()["scalars"]
    assert [event.value > 0.1 for event in events.Scalars("memory/peak_gib")] == [True, True]  # PyTorch alone has more


def test_every_logger_has_the_accuracy_before_training_and_no_later_one_there(
    tiny_policy_dir: Path, tmp_path: Path
) -> None:
    loggers = [TensorBoardLogger(tmp_path, name) for name in ("first", "second")]
    settings = {"limit_train_batches": 2, "num_sanity_val_steps": -1}
    trainer_of(tmp_path, Monitor(), logger=loggers, **settings).fit(module_of(tiny_policy_dir), datamodule=data())
    for logger in loggers:
        events = EventAccumulator(logger.log_dir).Reload()
        assert [event.step for event in events.Scalars("val/accuracy")] == [-1, 1]
