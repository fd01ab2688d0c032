"""The policy: a base model, 4-bit or 16-bit, with an adapter or trained itself, and its tokens' log-probabilities."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from qerl_kernels import chunked_token_logprobs
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError
from qerl_pl.formats.base import Quantization
from qerl_pl.formats.dense_checkpoint import validate_checkpoint
from qerl_pl.formats.norm import use_float32_norms
from qerl_pl.formats.quantize import in_format, local_folder
from qerl_pl.modules.activation_checkpointing import ActivationCheckpointing, Checkpointing
from qerl_pl.modules.adapter import LoraAdapter
from qerl_pl.modules.full_finetuning import FullWeights
from qerl_pl.modules.lora import LoraConfig, check_targets
from qerl_pl.modules.model_loading import load_base
from qerl_pl.modules.packed_layers import Packing, use_gated_mlps, use_packed_attention
from qerl_pl.persistence.atomic_files import cache_root
from qerl_pl.toy import ToyConfig, build_toy_policy
from qerl_pl.types import PolicyWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # float16's gradients underflow in large batches


@dataclass(frozen=True)
class PolicyConfig:
    """What the policy is made of.

    Args:
        path: Folder or hub name of a causal LM in Hugging Face format: 16-bit weights, or four bits as `qerl quantize`
            writes them. Null takes the toy policy that `toy` describes.
        toy: The embedded toy policy, trained on first use and cached; used when `path` is null.
        quantization: `nvfp4`, `mxfp4` and `nf4` (QLoRA) hold the base in four bits (16-bit weights are quantized once
            and cached), `none` in `dtype`: plain LoRA.
        dtype: Data type of activations, embeddings, norms and, without quantization, of the base.
        finetune: `lora` trains an adapter over the frozen base. `full` trains every weight, kept in float32, of a base
            that is not quantized; `lora` and `train_norms` below mean nothing then.
        lora: The adapter.
        train_norms: Train the RMSNorm scales too.
        gradient_checkpointing: What the backward pass computes again instead of keeping it: `true` each layer,
            `selective` all but the linears' products, `false` nothing. `auto` takes the fastest of them that fits the
            memory that is free in the first update, keeps to it when resumed, and keeps less where it runs out after
            all. Gradients are the same.
    """

    path: str | None = None
    toy: ToyConfig = field(default_factory=ToyConfig)
    quantization: Quantization = "nvfp4"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    finetune: Literal["lora", "full"] = "lora"
    lora: LoraConfig = field(default_factory=LoraConfig)
    train_norms: bool = False
    gradient_checkpointing: Checkpointing = False

    def __post_init__(self) -> None:
        if self.finetune == "full" and self.quantization != "none":
            raise UserError(
                f"full fine-tuning trains weights that are not quantized; found quantization {self.quantization}; set "
                "model.policy.quantization to none, or model.policy.finetune to lora"
            )

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter, where one is trained."""
        return self.lora if self.finetune == "lora" else None

    @property
    def scaling(self) -> float:
        """Factor of the adapter; 1 where there is none."""
        return 1.0 if self.adapter is None else self.adapter.scaling

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch names it."""
        return DTYPES[self.dtype]

    def base_folder(self) -> Path:
        """Local folder of the base model in the format asked for, which the engine loads too.

        Trains the toy policy, downloads from the hub, or quantizes 16-bit weights, each once: the results are cached.

        Raises:
            UserError: `path` is neither a folder nor a model of the hub, its files disagree, it has no place for the
                adapter, or its weights are quantized in another format.
        """
        source = build_toy_policy(self.toy) if self.path is None else local_folder(self.path)
        model = validate_checkpoint(source)
        if self.adapter is not None:
            check_targets(model, self.adapter)
        return in_format(source, self.quantization)


class Policy(nn.Module):
    """Base model and what is trained of it; knows nothing of rewards or objectives.

    Args:
        folder: Local folder of the base model.
        config: What to build.
        device: Where.
        seed: Seed of the adapter's initial A matrices.
        lent: Weights of an engine that has loaded the same folder, to be used instead of an own copy.
        with_reference: Full fine-tuning only, whether `reference` will be asked for: it is a second model then.
    """

    def __init__(
        self,
        folder: Path,
        config: PolicyConfig,
        device: torch.device,
        seed: int,
        shared: SharedWeights | None = None,
        with_reference: bool = False,
    ) -> None:
        super().__init__()
        self.config = config

        def load(shared: SharedWeights | None) -> PreTrainedModel:
            model = load_base(folder, config.torch_dtype, device, shared)
            use_float32_norms(model)
            use_gated_mlps(model)
            use_packed_attention(model)
            return model

        self.base = load(shared if config.adapter else None)
        """The causal LM, with all that is trained in it."""
        self.trained: LoraAdapter | FullWeights
        if config.adapter is None:
            reference = load(None).to(device).eval() if with_reference else None  # type: ignore[arg-type]
            self.trained = FullWeights(self.base, folder, config.torch_dtype, reference)
        else:
            self.trained = self._adapter(folder, config.adapter, seed)
        self.base.to(device)  # type: ignore[arg-type]
        asked, random = config.gradient_checkpointing, self.trained.random
        self.checkpointing = ActivationCheckpointing(self.base, asked, random, config.torch_dtype)

    def _adapter(self, folder: Path, lora: LoraConfig, seed: int) -> LoraAdapter:
        config = self.config
        # What plain PEFT needs to load the exported adapter, from any folder, without being told its base: never the
        # 16-bit weights that the base was quantized from, and a name only where it is the hub's.
        own = config.path is None or folder.parent == cache_root() or folder == Path(config.path).expanduser()
        base_name = str(folder.absolute()) if own else str(config.path)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LoraAdapter(self.base, lora, config.train_norms, base_name)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(self.parameters()).device

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside the block the policy is its reference: adapter off, norm scales as in the base model."""
        base = self.base
        try:
            with self.trained.off() as self.base:
                yield
        finally:
            self.base = base

    @property
    def full_finetuning(self) -> bool:
        """Whether all of it trains, so that no adapter can be switched off."""
        return self.trained.full_finetuning

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
        decoder = self.base.get_decoder()
        with self.trained.rounded(self.config.torch_dtype):
            hidden = decoder(
                input_ids=tokens[rows][packing.kept].unsqueeze(0),
                position_ids=packing.positions.unsqueeze(0),
                use_cache=False,
                packing=packing,
            ).last_hidden_state[0]
        predicting = mask[rows][packing.kept].nonzero().squeeze(1) - 1
        head = self.base.get_output_embeddings()
        logprobs, entropies = chunked_token_logprobs(
            hidden[predicting],
            head.weight.to(hidden.dtype),
            tokens[mask],
            temperature,
            entropy_gradient=entropy_gradient,
        )
        return empty.masked_scatter(mask, logprobs.float()), empty.masked_scatter(mask, entropies.float())

    def weights(self, version: int, noise: NormNoise | None = None, adapter: bool = True) -> PolicyWeights:
        """What an engine needs to sample from this policy; views of the parameters, not copies.

        Args:
            version: Number of updates so far.
            noise: Noise of the sampler's norms.
            adapter: False for the reference policy, which is an engine's where it was launched for an adapter.
        """
        assert adapter or not self.full_finetuning
        factors = {name: (a.detach(), b.detach()) for name, (a, b) in self.trained.factors().items()}
        tensors = {name: tensor.detach() for name, tensor in self.trained.tensors().items()}
        return PolicyWeights(
            version=version,
            adapter=factors if adapter else None,
            scaling=self.config.scaling,
            tensors=tensors if adapter else {},
            noise=noise,
        )

    @contextmanager
    def perturbed(self, seed: int) -> Iterator[None]:
        """Inside the block the adapter is random by `seed`, and not small.

        A fresh adapter does nothing, and a young one little, so that an engine without it would look right.
        """
        with self.trained.perturbed(seed):
            yield

    def trained_state(self) -> dict[str, Tensor]:
        """Everything that training changes: adapter matrices and, if trained, norm scales, by PEFT's names; or every
        weight by its checkpoint name."""
        return self.trained.state()

    def load_trained_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `trained_state` gave.

        Raises:
            UserError: Names or shapes are another policy's.
        """
        self.trained.load(state)

    def save(self, folder: Path) -> None:
        """Write what was learned: adapter and trained norms in PEFT's format, or the whole model."""
        self.trained.save(folder)
