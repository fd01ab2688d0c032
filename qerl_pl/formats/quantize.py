"""`qerl quantize SRC DST` converts a 16-bit checkpoint to a 4-bit one, a few matrices in memory at a time.

Rounding is in the file of each format. Embeddings, norms, biases and lm_head stay in 16 bits. transformers and vLLM
load the result.
"""

import fnmatch
import hashlib
import inspect
import json
import logging
import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from qerl_kernels import backend_for
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig

from qerl_pl.errors import UserError
from qerl_pl.formats.base import FORMATS, format_of, format_of_config, named_format
from qerl_pl.formats.base_format import DENSE, BaseFormat
from qerl_pl.formats.dense_checkpoint import validate_checkpoint
from qerl_pl.formats.loftq import LOFTQ, LoftQAdapter
from qerl_pl.models.families import (
    Family,
    check_family,
    family_of,
    fused_group,
    linear_shapes,
    text_config,
)
from qerl_pl.models.folder import (
    QUANTIZATION_REPORT,
    ShardWriter,
    TensorFiles,
    copy_other_files,
    other_files,
    read_config,
)
from qerl_pl.runtime.files import atomic_directory, build_once, cache_root, folder_fingerprint, require_absent

log = logging.getLogger(__name__)

_KEY = "quantization_config"
CHUNK = 1 << 20
"""Weights that a CPU thread rounds at a time."""
LARGEST_ROUNDING = 0.25
"""Norm of the error of a matrix in 4 bits, over the matrix's norm; rounding to nearest makes 0.1."""
Device = Literal["auto", "cpu", "cuda"]


def quantize_checkpoint(
    src: Path,
    dst: Path,
    format: str = "nvfp4",
    device: Device = "auto",
    loftq_rank: int | None = None,
) -> None:
    """Quantize a 16-bit checkpoint to 4 bits, and report the error of each matrix.

    Every `*_proj.weight` of the decoder layers is quantized without data, and a gated delta net's `in_proj_qkv` and
    `in_proj_z`; of gpt-oss the experts, to MXFP4 as it is published. `quantization_report.json` in DST holds their
    relative squared errors: the sum of (quantized - weight)**2 over the sum of weight**2. Of a model of text and images
    DST is the text model alone.

    A checkpoint in the format already is copied as it is, if DST thereby has something left out: other models than that
    of text, or what `BaseFormat.is_mixed` says, which is dequantized. 16 bits are such a format: `none`.

    Arguments are those of `qerl quantize`.

    Raises:
        UserError: `dst` exists, `src` is no model folder, is of no known family, inconsistent or already quantized, has
            no matrix to quantize, or one or experts that the format cannot store, there is no GPU for `device`, or
            `loftq_rank` does not fit.
    """
    adapter = None if loftq_rank is None else LoftQAdapter(loftq_rank, dst)
    quantizer, torch_device = named_format(format, "--format"), _device(device)
    config, tensors = _source(src, dst, quantizer if adapter is None else None)
    if quantizer is DENSE:
        _copy_text_model(src, dst, config, tensors, adapter)
        return
    if quantizer.reads_mixed and format_of(src) is quantizer:
        _copy_quantized(src, dst, quantizer, config, tensors)
        return
    family, needed = family_of(config["model_type"]), "*_proj.weight"
    quantized = {name for name in tensors if family.is_four_bits(name)}
    if family.experts is not None and family.experts.stored_in_stacks:
        quantizer, needed = _of_stacks(quantizer, src), "*.experts.*_proj"
        quantized = {name for name in tensors if re.search(rf"\.layers\.\d+\.{fnmatch.translate(needed)}", name)}
    if family.experts is not None and not quantizer.stores_experts:
        raise UserError(
            f"{quantizer.name.upper()} holds no mixture of experts, which transformers and vLLM read in other layouts; "
            f"{src} has one; {quantizer.remedy}"
        )
    with atomic_directory(dst) as folder:
        if not quantized:
            raise UserError(f"quantizing needs weights named model.layers.N.{needed}; {src} has none")
        writer = ShardWriter(folder)
        errors = _quantize(tensors, quantized, quantizer, torch_device, writer, adapter)
        for name in tensors:
            if name not in quantized:
                writer.add(name, tensors.read(name))
        writer.finish()
        copy_other_files(src, folder, config | {_KEY: _quantization_config(quantizer, family)})
        _report(format, errors, folder / QUANTIZATION_REPORT)
        if adapter is not None:
            adapter.save(folder / LOFTQ)
    log.info("wrote %s checkpoint %s", format.upper(), dst)


def _source(src: Path, dst: Path, quantizer: BaseFormat | None) -> tuple[dict[str, Any], TensorFiles]:
    """Config and tensors of the text model in `src`, checked; in 16 bits, or in the format of `quantizer` with more."""
    config = read_config(src)
    inner = text_config(config, src)
    if inner is None:
        check_family(config, src)
    source = format_of(src)
    more = inner is not None or source.is_mixed(config.get(_KEY), TensorFiles(src))
    if source is not DENSE and not (source is quantizer and source.reads_mixed and more):
        remedy = "use it as it is" if inner is None else f"take its text model out by --format {source.name}"
        raise UserError(f"only 16-bit weights can be quantized; {src} is {source.name.upper()} already; {remedy}")
    require_absent(dst)
    validate_checkpoint(src)
    tensors = TensorFiles(src)
    if tensors.skipped:
        parts = sorted({".".join(name.split(".")[: 1 + name.startswith("model.")]) for name in tensors.skipped})
        log.info("left out %d tensors that are no part of the text model: %s", len(tensors.skipped), ", ".join(parts))
    return config if inner is None else inner, tensors


def _copy_text_model(
    src: Path, dst: Path, config: dict[str, Any], tensors: TensorFiles, adapter: LoftQAdapter | None
) -> None:
    """Write the text model of a 16-bit model of text and images, every tensor as it is stored."""
    if adapter is not None or text_config(read_config(src), src) is None:
        found = f"{src} is a text model: use it as it is" if adapter is None else "leave out --loftq_rank"
        raise UserError(f"--format none takes a text model out of one of text and images and rounds nothing; {found}")
    names = list(tensors)
    with atomic_directory(dst) as folder:
        writer = ShardWriter(folder)
        for name, (tensor,) in zip(names, tensors.read_groups([(name,) for name in names]), strict=True):
            writer.add(name, tensor)
        writer.finish()
        copy_other_files(src, folder, config)
    log.info("wrote %s: the text model of %s as it is", dst, src)


def _copy_quantized(
    src: Path, dst: Path, base_format: BaseFormat, config: Mapping[str, Any], tensors: TensorFiles
) -> None:
    """Write a checkpoint with its 4-bit linears as they are, all else in the embeddings' 16 bits."""
    base_format.report_unused(tensors)
    embeddings = "model.embed_tokens.weight"
    dtype = tensors.first_rows(1).read(embeddings).dtype
    head, *scales = base_format.tensor_names("lm_head")
    model_config = AutoConfig.for_model(**{key: config[key] for key in config if key != _KEY})
    linears = linear_shapes(model_config)
    dense = [name for name in linears if name == "lm_head" or base_format.tensor_names(name)[0] not in tensors]
    with atomic_directory(dst) as folder:
        writer = ShardWriter(folder)
        for name in tensors:
            if name.rpartition(".")[2] in base_format.dropped or name in scales:
                continue
            tensor, quantized = tensors.read(name), name == head or name in tensors.fp8
            if name == head:
                tensor = base_format.dense([tensor, *(tensors.read(one) for one in scales)], dtype)
            if quantized and name in (head, "lm_head.weight") and model_config.tie_word_embeddings:
                _check_tied(tensor, tensors.read(embeddings), src)
                continue
            writer.add("lm_head.weight" if name == head else name, tensor.to(dtype) if quantized else tensor)
        writer.finish()
        ignored = list(dict.fromkeys((*dense, *family_of(config["model_type"]).unquantized)))
        copy_other_files(src, folder, {**config, _KEY: {**base_format.config, "ignore": ignored}})
    log.info("wrote %s: a copy of %s with 4-bit linears as they are, and the rest in 16 bits", dst, src)


def _check_tied(output_layer: Tensor, embeddings: Tensor, src: Path) -> None:
    """Refuse a quantized output layer that is not the embeddings, which config.json ties it to, but for rounding."""
    embeddings = embeddings.float()
    if not (output_layer.float() - embeddings).norm() <= LARGEST_ROUNDING * embeddings.norm():
        raise UserError(
            f"with tie_word_embeddings true lm_head must be the embeddings; those of {src} differ by more than "
            "rounding to 4 bits does: set it to false in config.json, if the model was trained so"
        )
    log.info("the quantized lm_head of %s is not used: config.json ties it to the embeddings", src)


def _of_stacks(quantizer: BaseFormat, source: Path) -> BaseFormat:
    """The format of experts in stacks of the same name."""
    if quantizer.of_stacks is None:
        raise UserError(
            f"{quantizer.name.upper()} holds no experts in stacks, which transformers and vLLM read in 16 bits and in "
            f"MXFP4; {source} has such; use mxfp4, or none"
        )
    return quantizer.of_stacks


def _device(name: Device) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise UserError("--device cuda needs a GPU; PyTorch finds none here; use --device cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())


def _quantization_config(quantizer: BaseFormat, family: Family) -> dict[str, Any]:
    """`quantization_config` of the format, whose lists of 16-bit linears also name those of the model's family."""
    document = dict(quantizer.config)
    added = {"ignore": family.unquantized, "llm_int8_skip_modules": family.dense_linears}
    return document | {key: [*document[key], *names] for key, names in added.items() if key in document and names}


def _start_worker(device: torch.device) -> None:
    """Set up a thread of the pool; both settings are per thread."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _quantize(
    tensors: TensorFiles,
    quantized: set[str],
    quantizer: BaseFormat,
    device: torch.device,
    writer: ShardWriter,
    adapter: LoftQAdapter | None,
) -> dict[str, float]:
    """Quantize fused group by fused group; return the relative squared error of each matrix."""
    errors: dict[str, float] = {}
    # The ops are many and small: a thread per chunk of rows is faster than PyTorch's threads sharing every op, which
    # wait for each other and are slow where another process holds a core.
    workers = 1 if device.type == "cuda" else torch.get_num_threads()
    with (
        backend_for(device),
        ThreadPoolExecutor(workers, initializer=_start_worker, initargs=(device,)) as pool,
        tqdm(total=len(quantized), desc="quantizing", unit="matrix", mininterval=1.0, leave=False, disable=None) as bar,
    ):
        groups = (
            tuple(member for member in fused_group(name) if member in quantized)
            for name in tensors
            if name in quantized
        )
        unique = list(dict.fromkeys(groups))
        for group, read in zip(unique, tensors.read_groups(unique), strict=True):
            weights = {name: _as_rows(weight.to(device)) for name, weight in zip(group, read, strict=True)}
            _check(weights, quantizer)
            # On the pool, for its threads are single-threaded.
            global_scale = pool.submit(quantizer.global_scale, weights.values()).result()
            for (name, weight), stored in zip(weights.items(), read, strict=True):
                experts = len(stored) if stored.dim() == 3 else None
                takes_residual = adapter is not None and adapter.wants(name)
                errors[name], residual = _quantize_matrix(
                    name, weight, global_scale, quantizer, pool, writer, experts, takes_residual
                )
                if adapter is not None and residual is not None:
                    adapter.add(name, residual)
            bar.update(len(group))
    return errors


def _as_rows(weight: Tensor) -> Tensor:
    """A matrix [N, K] as it is, a stack of experts [E, K, N] as [E N, K]."""
    return weight.transpose(1, 2).flatten(0, 1) if weight.dim() == 3 else weight


def _check(weights: dict[str, Tensor], quantizer: BaseFormat) -> None:
    for name, weight in weights.items():
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UserError(f"only 16 or 32-bit weights can be quantized; got {name} in {weight.dtype}")
        if weight.dim() != 2 or weight.shape[1] % quantizer.block:
            raise UserError(
                f"{quantizer.name.upper()} needs an input dimension divisible by {quantizer.block}; got {name} with "
                f"{weight.shape[-1]}; {quantizer.remedy}"
            )
    if len({weight.dtype for weight in weights.values()}) > 1:
        types = ", ".join(f"{name} in {weight.dtype}" for name, weight in weights.items())
        raise UserError(f"matrices that share a global scale must have one data type; got {types}; convert the model")


def _quantize_matrix(
    name: str,
    weight: Tensor,
    global_scale: Tensor | None,
    quantizer: BaseFormat,
    pool: ThreadPoolExecutor,
    writer: ShardWriter,
    experts: int | None,
    wants_residual: bool,
) -> tuple[float, Tensor | None]:
    """Quantize and write a matrix, or so many experts'; returns its relative squared error and, if wanted, residual."""
    chunks = weight.split(len(weight) if weight.is_cuda else max(1, CHUNK // weight.shape[1]))
    codes, scales = zip(*pool.map(lambda chunk: quantizer.encode(chunk, global_scale), chunks), strict=True)
    stored, stored_scales = quantizer.store(torch.cat(codes), torch.cat(scales), global_scale, weight.dtype)
    for suffix, tensor in stored.items():
        writer.add(f"{name}{suffix}", tensor if experts is None else tensor.unflatten(0, (experts, -1)))

    def squares(rows: Tensor, row_codes: Tensor, row_scales: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sums of the squared errors and of the squared weights, and the residual."""
        dense, exact = quantizer.decode(row_codes, row_scales, global_scale), rows.float()
        residual = exact - dense if wants_residual else None
        return dense.sub_(exact).square_().sum(), exact.square().sum(), residual

    sums = pool.map(squares, chunks, codes, stored_scales.split([len(chunk) for chunk in chunks]))
    error, square, residuals = zip(*sums, strict=True)
    total = torch.stack(square).double().sum().item()
    relative = torch.stack(error).double().sum().item() / (total or 1.0)
    if not math.isfinite(relative):
        raise UserError(f"weights must be finite numbers; {name} has inf or nan; get the model again")
    return relative, torch.cat(residuals) if wants_residual else None


def _report(format: str, errors: dict[str, float], path: Path) -> None:
    mean, worst = math.fsum(errors.values()) / len(errors), max(errors, key=lambda name: errors[name])
    report = {"format": format, "mean_relative_squared_error": mean, "relative_squared_error": errors}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    log.info(
        "relative squared error of %d matrices: mean %.3g, largest %.3g in %s", len(errors), mean, errors[worst], worst
    )


def local_folder(path: str, key: str = "model.policy.path") -> Path:
    """The folder of a model or adapter, by its path or by its name on the hub, which is downloaded once.

    Raises:
        UserError: The path, the value of the setting `key`, is neither a folder nor a model of the hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        # The weights once more in another layout: gpt-oss's `original` folder, and Mistral's, which vLLM would prefer.
        copies = ["*/*.safetensors", "consolidated*.safetensors"]
        return Path(snapshot_download(path, allow_patterns=patterns, ignore_patterns=copies))
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the hub cannot be reached"
        raise UserError(
            f"{key} must be a folder or a model of the hub; {path!r} is no folder here, was not downloaded "
            f"before, and {why}; connect this machine to the network, or give the folder of the downloaded model"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"{key} must be a folder or a model of the hub; {path!r} is neither "
            f"({type(error).__name__}); check the spelling, or download the model and give its folder"
        ) from error


def config_in_reach(path: str) -> dict[str, Any]:
    """config.json of a folder or of a model of the hub, without its weights; empty where there is none in reach."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(hf_hub_download(path, "config.json")).parent
        except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError):
            return {}
    return read_config(folder) if (folder / "config.json").is_file() else {}


def check_quantization(config: Mapping[str, Any], source: object, quantization: str) -> BaseFormat:
    """The format, by its config.json, of a model that is in the requested format, or that can be quantized to it.

    Raises:
        UserError: It is quantized in another format, or in none that trains.
    """
    base_format = format_of_config(config, source)
    if base_format.name != quantization and (quantization == "none" or base_format is not DENSE):
        raise UserError(
            f"quantization: {quantization} needs 16-bit weights; {source} is {base_format.name.upper()}; "
            f"set model.policy.quantization to {base_format.name} or name the 16-bit model"
        )
    return base_format


def in_format(source: Path, quantization: str) -> Path:
    """The folder of a model in a format: `source`, or a copy that is quantized once and cached."""
    config = read_config(source)
    base_format = check_quantization(config, source, quantization)
    mixed = base_format is not DENSE and base_format.is_mixed(config.get(_KEY), TensorFiles(source))
    if quantization == "none" or (base_format.name == quantization and not mixed):
        return source
    requested = named_format(quantization)
    own = "" if requested in FORMATS else inspect.getsource(type(requested))  # a user may change it
    name = type(requested).__name__ if own else quantization
    target = cache_root() / f"{name}-{_fingerprint(source, own)}"
    with build_once(target) as missing:
        if missing:
            log.info("quantizing %s to %s (once; `qerl quantize` does it beforehand)", source, quantization.upper())
            quantize_checkpoint(source, target, quantization, device="cuda" if torch.cuda.is_available() else "cpu")
    return target


def _fingerprint(source: Path, code: str) -> str:
    """Digest of the weights, of the files that a quantized copy includes, and of code."""
    digest = hashlib.blake2b(folder_fingerprint(source).encode() + code.encode(), digest_size=16)
    for path in other_files(source):
        digest.update(f"{path.relative_to(source)}:{path.stat().st_size}".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
