"""`qerl fit --dry-run`: what a run needs of memory, and the longest completion that fits; loads and starts nothing."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from transformers import AutoConfig

from qerl_pl.callbacks import RolloutCallback
from qerl_pl.datamodules import ConversationDataModule, PromptDataModule
from qerl_pl.engines import VLLMEngine
from qerl_pl.engines.base import RolloutEngine
from qerl_pl.engines.vllm.merged import merged_above
from qerl_pl.engines.vllm.startup import linear_backend
from qerl_pl.errors import UserError
from qerl_pl.formats.base import FORMATS, named_format
from qerl_pl.formats.base_format import DENSE
from qerl_pl.formats.dense_checkpoint import validate_checkpoint
from qerl_pl.formats.fp4 import PackedFormat
from qerl_pl.formats.quantize import check_quantization, config_in_reach
from qerl_pl.models.families import PROJECTIONS
from qerl_pl.models.folder import TensorFiles
from qerl_pl.models.memory import GIB, check_length, kv_cache_size, optimizer_bytes
from qerl_pl.models.memory_plan import (
    LARGE_GPU_GIB,
    PREFILL_TOKENS,
    MicroBatch,
    RunPlan,
    longest_completion,
    run_memory,
)
from qerl_pl.models.shape import BITS, Shape
from qerl_pl.modules.optimizer import trial_weight
from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.modules.sft import SFTModule
from qerl_pl.policy.activation_checkpointing import MemorySettings, candidate_settings, mode_name
from qerl_pl.policy.loading import check_trainable
from qerl_pl.policy.policy import PolicyConfig
from qerl_pl.toy.tokenizer import VOCABULARY

CARDS = (12, 16, 24, 32, 48, 80)
"""Sizes in GiB of the GPUs that a dry run tells of on a machine without one."""
CPU = torch.device("cpu")


class DryRun(Exception):
    """Leaves the command line before anything is loaded; its text is the answer."""


def describe(model: PolicyModule, data: LightningDataModule, rollout: RolloutCallback | None) -> str:
    """Tables of memory by purpose and of completions by the size of a GPU.

    Args:
        model: Without its policy.
        data: Before its `setup`.
        rollout: Before its engine has started; None in supervised fine-tuning.

    Raises:
        UserError: As `shape_of`.
    """
    plan, prompt = plan_of(model, data, rollout)
    memory = run_memory(plan)
    rows = [f"{'memory that the run needs, estimated, in GiB':<48}{'rollout':>9}{'update':>9}"]
    rows += [f"  {name:<46}{first:>9.2f}{second:>9.2f}" for name, first, second in memory.table()]
    rows += [f"  pinned on the CPU: {name:<27}{'':>9}{size / GIB:>9.2f}" for name, size in memory.cpu.items()]
    candidates = _candidates(model.policy_config, plan.shape)
    chosen = " (the most that auto saves by)" if len(candidates) > 1 else ""
    rows.append(
        f"of micro-batches of {plan.batch.tokens} tokens, gradient_checkpointing {_name(candidates[-1])}{chosen}"
    )
    if len(candidates) > 1:
        saved = {_name(each): run_memory(replace(plan, batch=_saved_by(plan.batch, each))) for each in candidates}
        needs = "; ".join(f"{name} {sum(one.update.values()) / GIB:.2f}" for name, one in saved.items())
        rows += ["auto takes the first that fits; the update needs in GiB:", f"  {needs}"]
    if plan.engine and (state := plan.shape.state_bytes(plan.batch.dtype)):
        held = int(plan.kv_cache_gib * GIB // state)
        rows.append(
            f"a sequence has {state / 2**20:.1f} MiB of states: the engine's cache holds at most {held} at once"
        )
    gib = _gpu_gib()
    if gib is None:
        rows.append("no GPU is visible here; what one would need:")
    kind = "conversation" if rollout is None else f"completion after a prompt of {prompt} tokens"
    rows.append(f"longest {kind} that fits, in tokens:")
    if rollout is not None:
        rows.append(f"{'':<11}{'with this cache':>16}{'with one for a single sequence':>32}")
    sequences = plan.batch.sequences if model.micro_batch_tokens is None else 1
    for size in CARDS if gib is None else (gib,):
        plans = [plan] if rollout is None else [plan, replace(plan, kv_cache_gib=0.0)]
        lengths = [longest_completion(one, prompt, size, sequences) for one in plans]
        cells = [f"{longest:,}" if longest else "none" for longest in lengths]
        rows.append(
            f"  {size:>5.4g} GiB" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, (16, 32), strict=False))
        )
    if (positions := model.policy_config.positions()) is not None:
        rows.append(f"the model has {positions:,} positions, prompt included: longer ones are refused")
    return "\n".join(rows)


def _gpu_gib() -> float | None:
    """Memory of the visible GPU; None without one."""
    return torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else None


def _candidates(config: PolicyConfig, shape: Shape) -> tuple[MemorySettings, ...]:
    """Settings that gradient_checkpointing and mlp_tile_tokens leave to choose from; the CPU has the memory."""
    can_tile = not shape.experts and (config.lora_spec is None or config.lora.dropout == 0)
    candidates = candidate_settings(config.gradient_checkpointing, config.mlp_tile_tokens, can_tile)
    by_hand = candidates[0].tile_tokens
    return tuple(each for each in candidates if each.tile_tokens == by_hand or each.mode == "offload")


def _saved_by(batch: MicroBatch, settings: MemorySettings) -> MicroBatch:
    return replace(batch, checkpointing=settings.mode, mlp_tile_tokens=settings.tile_tokens)


def _name(settings: MemorySettings) -> str:
    return mode_name(settings.mode) + (f", mlp_tile_tokens {settings.tile_tokens}" if settings.tile_tokens else "")


def shape_of(config: PolicyConfig) -> Shape:
    """The model's sizes by its config.json.

    Raises:
        UserError: It is not in reach, or of a model that a start refuses.
    """
    if config.path is None:
        toy = config.toy
        return Shape(
            hidden=toy.width, intermediate_size=toy.intermediate, q_dim=toy.width, kv_dim=toy.width, layers=toy.layers,
            heads=toy.heads, vocabulary=VOCABULARY, tied=True, head_norms=False,
        )  # fmt: skip
    settings = config_in_reach(config.path)
    if not settings:
        raise UserError(
            f"a dry run reads the model's config.json; {config.path} has none in reach; name a local folder as "
            "model.policy.path"
        )
    folder = Path(config.path).expanduser()
    family = check_trainable(settings, folder, config.finetune == "full", config.replay_routing)
    base_format = check_quantization(settings, folder, config.quantization)
    stores_codes = base_format is not DENSE and any(folder.glob("*.safetensors"))
    if stores_codes:
        validate_checkpoint(folder)
    shape = Shape.of(AutoConfig.for_model(**settings))
    if not stores_codes or shape.dense_attention:
        return shape
    stored = TensorFiles(folder).shapes()
    return replace(shape, dense_weights=sum(math.prod(stored[name]) for name in stored if family.is_four_bits(name)))


def plan_of(model: PolicyModule, data: LightningDataModule, rollout: RolloutCallback | None) -> tuple[RunPlan, int]:
    """The plan of a run, and its prompts' tokens."""
    policy = model.policy_config
    lora, shape = policy.lora_spec, shape_of(policy)
    limit: int | None
    if rollout is None:
        assert isinstance(data, ConversationDataModule) and isinstance(model, SFTModule)
        prompt, longest, limit = 0, data.max_length, model.micro_batch_tokens
        step_tokens = data.batch_size * longest
    else:
        assert isinstance(data, PromptDataModule) and isinstance(model, QeRLModule)
        update = model.update
        prompt, limit = data.max_prompt_tokens, update.micro_batch_tokens
        longest = prompt + rollout.config.sampling.max_tokens
        # Of several ranks one may have a complete minibatch, see `PolicyUpdate.max_micro_batch_tokens`.
        step_tokens = max(data.batch_size * rollout.config.group_size // update.minibatches, 1) * longest
    tokens = step_tokens if limit is None else min(max(limit, longest), step_tokens)
    batch = MicroBatch(
        tokens,
        max(tokens // longest, 1),
        policy.torch_dtype,
        train_norms=policy.train_norms or lora is None,
        rank=0 if lora is None else lora.rank,
        full_finetuning=lora is None,
    )
    plan = RunPlan(
        shape,
        _saved_by(batch, _candidates(policy, shape)[-1]),
        -(-step_tokens // tokens),
        _stored_as(policy.quantization),
        PROJECTIONS if lora is None else lora.targets,
        optimizer_bytes(model.make_optimizer, CPU),
        _step_bytes(model),
        reference=model.needs_reference if lora is None else policy.adapter is not None,
        engine=rollout is not None,
    )
    if rollout is None:
        return plan, 0
    assert isinstance(data, PromptDataModule)
    engine, tokens = rollout.engine, data.batch_size * prompt
    if isinstance(engine, VLLMEngine) and not engine.caches_prefixes(shape.delta is not None):
        tokens *= rollout.config.group_size
    return _with_engine(plan, engine, rollout.longest(data), tokens), prompt


def _stored_as(quantization: str) -> str:
    """The format's name; of a user's that is derived from a packed one that one's."""
    own = named_format(quantization)
    return next(
        (one.name for one in FORMATS if isinstance(one, PackedFormat) and isinstance(own, type(one))), quantization
    )


def _with_engine(plan: RunPlan, engine: RolloutEngine, longest: int, prompts: int) -> RunPlan:
    """The plan with an engine's part: its cache, and whether it shares the base."""
    if isinstance(engine, VLLMEngine):
        default = (2 if (_gpu_gib() or 0) > LARGE_GPU_GIB else 1) * PREFILL_TOKENS
        prefill = engine.max_num_batched_tokens or default
        plan = replace(plan, kv_dtype=engine.cache_dtype(plan.batch.dtype), prefill_tokens=prefill)
    sequence = plan.sequence_kv_bytes(longest) / GIB
    if not isinstance(engine, VLLMEngine):  # dense weights of its own, and the keys and values of a batch
        rows = getattr(engine, "max_batch", 1)
        return replace(
            plan, shares_weights=False, engine_is_dense=True, kv_cache_gib=rows * sequence, sleeps=True,
            prompt_tokens=prompts, prefill_tokens=prompts, max_num_seqs=rows,
        )  # fmt: skip
    marlin = engine.linear_backend == "marlin" if plan.quantization in BITS else not plan.shape.experts
    quantized = linear_backend(named_format(plan.quantization), engine.linear_backend) is not None
    cache = kv_cache_size(engine.kv_cache_gib, engine.gpu_memory_utilization, torch.device("cuda"))
    least_bytes = partial(plan.shape.sequence_kv_bytes, dtype=plan.kv_dtype or plan.batch.dtype)
    check_length(engine.max_model_len or longest, longest, cache, least_bytes)
    return replace(
        plan,
        shares_weights=engine.share_weights and marlin,
        merges=merged_above(engine.adapter, quantized, engine.max_num_seqs) is not None,
        kv_cache_gib=sequence if cache is None else cache,  # a share of the GPU takes at least one sequence
        sleeps=engine.sleep_mode,
        prompt_tokens=prompts,
        max_num_seqs=engine.max_num_seqs,
    )


def _step_bytes(model: PolicyModule) -> float:
    """In addition during a step, for each trained weight: Adam of PyTorch takes the roots of all second moments at
    once, unless it is fused or steps through the weights."""
    optimizer = model.make_optimizer([trial_weight()])
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return 0.0
    settings = optimizer.defaults
    return 0.0 if settings.get("fused") or settings.get("foreach") is False else 4.0
