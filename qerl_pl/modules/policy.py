"""The policy: a frozen base model, 4-bit or 16-bit, with a LoRA adapter, and the log-probabilities of its tokens."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from accelerate import init_empty_weights
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import ModulesToSaveWrapper
from qerl_kernels import chunked_token_logprobs
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines.base import LentWeights
from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import fused_group
from qerl_pl.formats.model_files import TensorFiles, is_nvfp4
from qerl_pl.formats.norm import Float32RMSNorm, use_float32_norms
from qerl_pl.modules.lora import ADAPTER, LoraConfig, LoraLinear, attach_lora
from qerl_pl.modules.nvfp4 import BorrowedLinear, NVFP4Linear
from qerl_pl.modules.packing import ATTENTION, Packing
from qerl_pl.run.files import cache_root
from qerl_pl.run.seeding import stream_seed
from qerl_pl.toy import ToyConfig
from qerl_pl.types import PolicyWeights

_PACKED = (torch.uint8, torch.float8_e4m3fn)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # float16's gradients underflow in large batches


@dataclass(frozen=True)
class PolicyConfig:
    """What the policy is made of.

    Args:
        path: Folder or hub name of a causal LM in Hugging Face format: 16-bit weights, or NVFP4 as `qerl quantize`
            writes them. Null takes the toy policy that `toy` describes.
        toy: The embedded toy policy, trained on first use and cached; used when `path` is null.
        quantization: `nvfp4` holds the base in four bits (16-bit weights are quantized once and cached), `none` in
            `dtype`: plain LoRA.
        dtype: Data type of activations, embeddings, norms and, without quantization, of the base.
        lora: The adapter.
        train_norms: Train the RMSNorm scales too.
        gradient_checkpointing: Recompute each layer in the backward pass instead of keeping its activations.
    """

    path: str | None = None
    toy: ToyConfig = field(default_factory=ToyConfig)
    quantization: Literal["nvfp4", "none"] = "nvfp4"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    lora: LoraConfig = field(default_factory=LoraConfig)
    train_norms: bool = False
    gradient_checkpointing: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch names it."""
        return DTYPES[self.dtype]


def load_base(
    folder: Path, dtype: torch.dtype, device: torch.device, lent: LentWeights | None = None
) -> PreTrainedModel:
    """A frozen causal LM from a local folder; linears that the folder stores in NVFP4 become `NVFP4Linear`.

    No dense copy of a quantized weight is made, and none at all of what is lent.

    Args:
        folder: Hugging Face format.
        dtype: Data type of everything that is not packed.
        device: Where the tensors go, one by one.
        lent: Weights of an engine that has loaded the same folder.

    Raises:
        UserError: The folder is no such model, tensors are missing or left over, or projections that run fused have
            unequal global scales.
    """
    config = AutoConfig.from_pretrained(folder)
    quantized, tensors = is_nvfp4(folder), TensorFiles(folder)
    if quantized:
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        if quantized:
            _use_quantized_linears(model, tensors, dtype, lent)
    if quantized:
        _check_fused_scales(tensors)
    state = dict(lent.tensors) if lent is not None else {}
    linears = lent.linears if lent is not None else {}
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind == "inv_freq":  # old Llama files store what their configuration says
            continue
        if name not in state and not (module in linears and kind.startswith("weight")):
            tensor = tensors.read(name)
            packed = tensor.dtype in _PACKED or name.endswith("_global_scale")
            state[name] = tensor.to(device=device, dtype=None if packed else dtype)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name in missing if name != "lm_head.weight" or not config.tie_word_embeddings]
    if missing or unexpected:
        raise UserError(
            f"the weight files must fit config.json; {folder} lacks {missing[:3]} and has {unexpected[:3]} besides; "
            "check that both come from the same model"
        )
    model.to(device)  # type: ignore[arg-type]
    return model.requires_grad_(False)


def _use_quantized_linears(
    model: nn.Module, tensors: TensorFiles, dtype: torch.dtype, lent: LentWeights | None
) -> None:
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or f"{name}.weight_packed" not in tensors:
            continue
        if lent is not None and name in lent.linears:
            model.set_submodule(name, BorrowedLinear(lent.linears[name], module.bias is not None, dtype))
        else:
            linear = NVFP4Linear(module.in_features, module.out_features, module.bias is not None, dtype)
            model.set_submodule(name, linear.to("meta"))


def _check_fused_scales(tensors: TensorFiles) -> None:
    for name in tensors:
        if name.endswith(".weight_global_scale"):
            group = fused_group(name.removesuffix("_global_scale"))
            scales = {member: tensors.read(f"{member}_global_scale").item() for member in group}
            if len(set(scales.values())) > 1:
                raise UserError(
                    "projections that run fused must share one global scale; found "
                    + ", ".join(f"{key}={value:g}" for key, value in scales.items())
                    + "; quantize the 16-bit weights with `qerl quantize`"
                )


class Policy(nn.Module):
    """Base model and adapter; knows nothing of rewards or objectives.

    Args:
        folder: Local folder of the base model.
        config: What to build.
        device: Where.
        seed: Seed of the adapter's initial A matrices.
        lent: Weights of an engine that has loaded the same folder, to be used instead of an own copy.
    """

    def __init__(
        self,
        folder: Path,
        config: PolicyConfig,
        device: torch.device,
        seed: int,
        lent: LentWeights | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        base = load_base(folder, config.torch_dtype, device, lent)
        use_float32_norms(base)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: PeftModel = attach_lora(base, config.lora, config.train_norms)
        self.model.to(device)
        # What plain PEFT needs to load the exported adapter without being told its base: never the 16-bit weights that
        # the base was quantized from.
        made_here = config.path is None or folder.parent == cache_root()
        self.model.peft_config[ADAPTER].base_model_name_or_path = str(folder) if made_here else config.path
        if config.gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(self.parameters()).device

    @property
    def base(self) -> nn.Module:
        """The causal LM that the adapter wraps."""
        return self.model.get_base_model()

    def _trained_norms(self) -> Iterator[tuple[str, Float32RMSNorm]]:
        for name, module in self.base.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                norm = module.modules_to_save[ADAPTER]
                assert isinstance(norm, Float32RMSNorm)
                yield name, norm

    def _adapted(self) -> Iterator[tuple[str, LoraLinear]]:
        return ((name, module) for name, module in self.base.named_modules() if isinstance(module, LoraLinear))

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside the block the policy is its reference: adapter off, norm scales as in the base model."""
        with self.model.disable_adapter():
            yield

    def token_logprobs(
        self, tokens: Tensor, lengths: Tensor, mask: Tensor, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the policy at the tokens that a mask selects; padding costs nothing.

        Args:
            tokens: Right-padded token ids, int64 [B, T].
            lengths: Real tokens of each row, int64 [B].
            mask: Which positions hold sampled tokens, bool [B, T]; position 0 has no prediction and must be False. Rows
                that select nothing are not computed.
            temperature: Divides the logits, as in the sampler.
            entropy_gradient: Whether the entropies have a gradient; it costs one more product with the vocabulary.

        Returns:
            (natural log-probabilities, entropies in nats), float32 [B, T] each, 0 where the mask is False.
        """
        empty = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        rows = mask.any(dim=1)
        if not rows.any():
            return empty, empty
        packing = Packing.of(lengths[rows], tokens.shape[1])
        decoder = self.base.get_decoder()  # type: ignore[operator]
        hidden = decoder(
            input_ids=tokens[rows][packing.kept].unsqueeze(0),
            position_ids=packing.positions.unsqueeze(0),
            use_cache=False,
            packing=packing,
        ).last_hidden_state[0]
        predicting = mask[rows][packing.kept].nonzero().squeeze(1) - 1
        head = self.base.get_output_embeddings()  # type: ignore[operator]
        logprobs, entropies = chunked_token_logprobs(
            hidden[predicting], head.weight, tokens[mask], temperature, entropy_gradient=entropy_gradient
        )
        return empty.masked_scatter(mask, logprobs.float()), empty.masked_scatter(mask, entropies.float())

    def weights(self, version: int, noise: NormNoise | None = None, adapter: bool = True) -> PolicyWeights:
        """What an engine needs to sample from this policy; views of the parameters, not copies.

        Args:
            version: Number of updates so far.
            noise: Noise of the sampler's norms.
            adapter: False for the reference policy.
        """
        factors = {
            name: (module.factors()[0].detach(), module.factors()[1].detach()) for name, module in self._adapted()
        }
        norms = {name: norm.weight.detach() for name, norm in self._trained_norms()}
        return PolicyWeights(
            version=version,
            adapter=factors if adapter else None,
            scaling=self.config.lora.scaling,
            norms=norms if adapter else {},
            noise=noise,
        )

    @contextmanager
    def probed(self, seed: int) -> Iterator[None]:
        """Inside the block B of every adapter is random by `seed`, and changes each product by some half of itself.

        A fresh adapter does nothing, and a young one little, so that an engine without it would look right.
        """
        matrices = {name: module.factors()[1] for name, module in self._adapted()}
        kept = {name: b.detach().clone() for name, b in matrices.items()}
        std = 1 / (self.config.lora.scaling * math.sqrt(self.config.lora.rank))
        with torch.no_grad():
            for name, b in matrices.items():
                b.normal_(std=std, generator=torch.Generator(b.device).manual_seed(stream_seed(seed, name)))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, b in matrices.items():
                    b.copy_(kept[name])

    def trained_state(self) -> dict[str, Tensor]:
        """Everything that training changes: adapter matrices and, if trained, norm scales, by PEFT's names."""
        # Not "auto", which asks the hub whether the base's embeddings are the model's own.
        state = get_peft_model_state_dict(self.model, adapter_name=ADAPTER, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in state.items()}

    def load_trained_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `trained_state` gave.

        Raises:
            UserError: Names or shapes are another policy's.
        """
        own = self.trained_state()
        if {name: tensor.shape for name, tensor in own.items()} != {name: t.shape for name, t in state.items()}:
            raise UserError(
                "a checkpoint must hold this policy's adapter; found other names or shapes; "
                "set model.policy.lora and train_norms as in the run that wrote it"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def save_adapter(self, folder: Path) -> None:
        """Write adapter and trained norms in PEFT's format."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty model card
