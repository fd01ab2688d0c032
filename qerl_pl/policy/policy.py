"""The policy: a 4-bit or BF16 base model with a LoRA adapter, or fully fine-tuned; log-probabilities of tokens."""

import json
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from qerl_kernels import chunked_reverse_kl, chunked_token_logprobs
from qerl_kernels.logprob import default_chunk
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError, require_at_least, require_one_of, require_type
from qerl_pl.formats.base import format_of, named_format
from qerl_pl.formats.base_format import DENSE
from qerl_pl.formats.dense_checkpoint import validate_checkpoint
from qerl_pl.formats.quantize import config_in_reach, in_format, local_folder
from qerl_pl.models.families import PROJECTIONS, find_family, logit_cap
from qerl_pl.models.folder import load_config, load_tokenizer, longest_sequence, read_config
from qerl_pl.policy.activation_checkpointing import MODES, ActivationCheckpointing, Checkpointing, Tiles, mode_name
from qerl_pl.policy.adapter import SavedAdapter, load_in_place, read_adapter
from qerl_pl.policy.full_finetuning import FullWeights
from qerl_pl.policy.loading import check_trainable, load_base
from qerl_pl.policy.lora import LoraConfig, LoraSpec, check_targets
from qerl_pl.policy.packed_layers import PackedAttention
from qerl_pl.policy.packing import Packing
from qerl_pl.toy.policy import POSITIONS, ToyConfig, build_toy_policy
from qerl_pl.toy.tokenizer import VOCABULARY
from qerl_pl.types import PolicyWeights, TeacherStates

if TYPE_CHECKING:
    from qerl_pl.policy.lora_adapter import LoraAdapter

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # float16's gradients underflow in large batches

BASE_FILE = "qerl_base.json"
"""File beside an adapter that says which base it was trained on: `path` or `toy`, and `quantization`."""
MODEL_FILE = "qerl_model.json"
"""File beside a complete trained model that says how to evaluate it: `quantization`, which is `none`."""


@dataclass(frozen=True)
class PolicyConfig:
    """Base model, precision and trained weights of the policy.

    Args:
        path: Folder or hub name of a causal LM in Hugging Face format: 16-bit weights, or 4-bit ones as `qerl quantize`
            writes them. Null takes the toy policy that `toy` describes.
        toy: The embedded toy policy, trained on first use and cached; used when `path` is null.
        quantization: `nvfp4`, `mxfp4` and `nf4` (QLoRA) hold the base in 4 bits (16-bit weights are quantized once
            and cached), `none` in `dtype`: plain LoRA. Or the import path of a `BaseFormat` of yours.
        dtype: Data type of activations, embeddings, norms and, without quantization, of the base.
        finetune: `lora` trains an adapter over the frozen base. `full` trains float32 master weights of a base without
            quantization; `lora` and `train_norms` below mean nothing then.
        lora: The adapter.
        adapter: Folder or hub name of an adapter in PEFT's format, of `qerl export`, PEFT or TRL, that training goes on
            from; it is the reference policy, too. Null starts a new one.
        train_norms: Train the RMSNorm scales too; those that `adapter` has train in any case.
        gradient_checkpointing: What the backward pass recomputes: `true` each layer, `selective` all but the linears'
            products, `false` nothing. `offload` is `true` with the layers' inputs in pinned CPU memory until the
            backward pass needs them. `auto` takes the fastest of them that fits the free memory in the first update,
            keeps to it when resumed, and saves less where the memory runs out after all. Gradients are the same.
        mlp_tile_tokens: Compute the MLPs of longer micro-batches in tiles of so many tokens, at most, in both passes:
            bounds their memory. Changes the rounding of gradients. Null computes all tokens at once, and so does `auto`
            unless only tiles, of 4096 tokens, fit the memory; a resumed run keeps to that, too.
        replay_routing: The update gives each token of a mixture of experts to the experts that the sampler chose, with
            its own router's weights of them (R3, arXiv 2510.11370).
    """

    path: str | None = None
    toy: ToyConfig = field(default_factory=ToyConfig)
    quantization: str = "nvfp4"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    finetune: Literal["lora", "full"] = "lora"
    lora: LoraConfig = field(default_factory=LoraConfig)
    adapter: str | None = None
    train_norms: bool = False
    gradient_checkpointing: Checkpointing = False
    mlp_tile_tokens: Tiles = None
    replay_routing: bool = False

    def __post_init__(self) -> None:
        for name in ("path", "adapter"):  # as text, which a checkpoint can hold
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, os.fspath(path))
        require_type(LoraConfig, "lora", self.lora)
        named_format(self.quantization)
        require_one_of(tuple(DTYPES), "model.policy.dtype", self.dtype)
        require_one_of(("lora", "full"), "model.policy.finetune", self.finetune)
        modes = [*map(mode_name, MODES), "auto"]
        require_one_of(modes, "model.policy.gradient_checkpointing", mode_name(self.gradient_checkpointing))
        tiles = None if self.mlp_tile_tokens == "auto" else self.mlp_tile_tokens
        require_at_least(1, {"model.policy.mlp_tile_tokens": tiles})
        if tiles is not None and self.lora.dropout > 0 and self.finetune == "lora":
            raise UserError(
                f"an MLP in tiles is computed again in the backward pass, which dropout would change; got dropout "
                f"{self.lora.dropout:g} and mlp_tile_tokens {tiles}; set one of "
                "model.policy.lora.dropout to 0 and model.policy.mlp_tile_tokens to null"
            )
        if self.finetune == "full" and self.quantization != "none":
            raise UserError(
                f"full fine-tuning trains weights that are not quantized; got quantization {self.quantization}; set "
                "model.policy.quantization to none, or model.policy.finetune to lora"
            )
        if self.finetune == "full" and self.adapter is not None:
            raise UserError(
                f"full fine-tuning has no adapter to go on from; got model.policy.adapter {self.adapter}; set "
                "model.policy.finetune to lora, or merge the adapter and name that model as model.policy.path"
            )

    @cached_property
    def start(self) -> SavedAdapter | None:
        """What `adapter` names."""
        if self.adapter is None:
            return None
        config = {"num_hidden_layers": self.toy.layers} if self.path is None else config_in_reach(self.path)
        return read_adapter(self.adapter, layers=config.get("num_hidden_layers"))

    @cached_property
    def lora_spec(self) -> LoraSpec | None:
        """The adapter that trains, None in full fine-tuning; UserError if `adapter` is none, or contradicts `lora`."""
        if self.finetune == "full":
            return None
        lora = self.lora
        if lora.targets == "all-linear" or lora.targets is None and self.start is None:
            lora = replace(lora, targets=self._all_linear())
        return lora.spec(LoraSpec()) if self.start is None else self.start.spec(lora)

    def _all_linear(self) -> tuple[str, ...]:
        """Names of the model's linears, without the output layer."""
        # `base_folder` refuses an unknown family
        config = {} if self.path is None else config_in_reach(self.path)
        family = find_family(config.get("model_type"))
        return PROJECTIONS if family is None else family.projections

    @property
    def scaling(self) -> float:
        """Factor of the adapter; 1 in full fine-tuning."""
        return 1.0 if self.lora_spec is None else self.lora_spec.scaling

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a `torch.dtype`."""
        return DTYPES[self.dtype]

    @property
    def base_name(self) -> str:
        """The model as the user named it, a folder from its root; of the toy policy the name that it is cached by."""
        if self.path is None:
            return f"toy-{self.toy.digest}"
        folder = Path(self.path).expanduser()
        return str(folder.absolute()) if folder.is_dir() else self.path

    def positions(self) -> int | None:
        """Longest sequence, in tokens, that the base model knows by its config; None where that does not say."""
        if self.path is None:
            return POSITIONS
        return longest_sequence(read_config(local_folder(self.path)))

    def vocab_size(self) -> int:
        """Number of token ids that the base model has an embedding of."""
        return (
            VOCABULARY if self.path is None else int(load_config(local_folder(self.path)).get_text_config().vocab_size)
        )

    def source_folder(self) -> Path:
        """Local folder of the model as it is stored; the toy policy's training and downloads are cached."""
        return build_toy_policy(self.toy) if self.path is None else local_folder(self.path)

    def base_folder(self) -> Path:
        """Local folder of the base in the requested format; toy training, download or quantization are cached.

        Raises:
            UserError: `path` is neither a folder nor a model of the hub, its files disagree, it is of no known family,
                it cannot be trained so, the adapter does not fit it, or its weights are quantized in another format.
        """
        lora = self.lora_spec
        if self.start is not None and self.start.base != self.base_name:
            log.warning("%s was trained on %s and goes on with %s", self.adapter, self.start.base, self.base_name)
        source = self.source_folder()
        # First: the format of an unknown family does not matter.
        check_trainable(read_config(source), source, self.finetune == "full", self.replay_routing)
        model = validate_checkpoint(source)
        if lora is not None:
            check_targets(model, lora)
        if self.quantization != "none" and (source / MODEL_FILE).is_file() and format_of(source) is DENSE:
            log.warning(
                "%s is a trained model in 16 bits, which is quantized again: to evaluate what was trained, set "
                "model.policy.quantization to none in place of %s",
                source,
                self.quantization,
            )
        return in_format(source, self.quantization)


def mark_trained(folder: Path) -> None:
    """Write `MODEL_FILE` beside a complete trained model."""
    (folder / MODEL_FILE).write_text(json.dumps({"quantization": "none"}) + "\n")


def predicting_states(
    base: PreTrainedModel,
    tokens: Tensor,
    lengths: Tensor,
    mask: Tensor,
    routing: Tensor | None = None,
    groups: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden states [M, D] that predict the M masked tokens, without padding, and the output layer's weight [V, D].

    Args:
        base: Of `load_base`.
        tokens: Right-padded token ids, int64 [B, T].
        lengths: Real tokens of each row, int64 [B].
        mask: bool [B, T], with a token, and False at position 0; rows without a token are skipped.
        routing: As for `Policy.token_values`.
        groups: As for `Policy.token_values`.
    """
    rows = mask.any(dim=1)
    tokens, lengths, mask = tokens[rows], lengths[rows], mask[rows]
    if groups is None:
        packing = Packing.of(lengths, tokens.shape[1])
    else:
        prompts = mask.int().argmax(dim=1)
        packing = Packing.with_shared_prompts(lengths, tokens.shape[1], prompts, groups[rows])
    if routing is not None:
        packing = replace(packing, routing=packing.pack(routing[rows]).transpose(0, 1).long())
    hidden = base.get_decoder()(
        input_ids=packing.pack(tokens).unsqueeze(0),
        position_ids=packing.positions.unsqueeze(0),
        use_cache=False,
        packing=packing,
    ).last_hidden_state[0]
    return hidden[packing.before(mask)], base.get_output_embeddings().weight.to(hidden.dtype)


class TokenValues(NamedTuple):
    """Values of the tokens of B sequences by a policy, float32 [B, T] each, 0 for tokens outside the mask."""

    logprobs: Tensor
    """Natural log-probabilities."""
    entropies: Tensor
    """Entropies of the next-token distributions, in nats."""
    teacher_kl: Tensor | None = None
    """KL(policy || teacher) of the next-token distributions, in nats; None without a teacher."""


class Policy(nn.Module):
    """Base model in a local folder and its trained weights; knows nothing of rewards or objectives.

    Args:
        folder: As `config.base_folder` returns it.
        config: Settings of the policy.
        device: Device of all tensors.
        seed: Seed of the adapter's initial A matrices.
        shared: Weights of an engine that has loaded the same folder, used instead of a copy.
        with_reference: Whether full fine-tuning loads a second model as reference policy.
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
        self.config, self.folder = config, folder
        lora = config.lora_spec
        self.base = load_base(folder, config.torch_dtype, device, shared if lora else None)
        """The causal LM, trained weights included."""
        self._logit_cap = logit_cap(self.base.config)
        self.trained: LoraAdapter | FullWeights
        reference = None
        if lora is None:
            reference = load_base(folder, config.torch_dtype, device).eval() if with_reference else None
            self.trained = FullWeights(self.base, folder, config.torch_dtype, reference)
        else:
            self.trained = self._attach_adapter(lora, seed)
        self.base.to(device)  # type: ignore[arg-type]
        if config.start is not None and not isinstance(self.trained, FullWeights):
            self.trained.start_from(config.start.tensors())
        self.checkpointing = ActivationCheckpointing(
            self.base,
            config.gradient_checkpointing,
            self.trained.has_dropout,
            config.torch_dtype,
            config.mlp_tile_tokens,
            reference,
        )

    def _attach_adapter(self, lora: LoraSpec, seed: int) -> "LoraAdapter":
        from qerl_pl.policy.lora_adapter import LoraAdapter  # PEFT: slow, and only a policy that is loaded needs it

        train_norms = self.config.train_norms or (self.config.start is not None and self.config.start.train_norms)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LoraAdapter(self.base, lora, train_norms, self.config.base_name)

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        return next(self.parameters()).device

    @property
    def full_finetuning(self) -> bool:
        """Whether every weight trains; then there is no adapter to switch off."""
        return self.trained.full_finetuning

    def token_values(
        self,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor,
        temperature: float,
        entropy_gradient: bool = False,
        reference: bool = False,
        routing: Tensor | None = None,
        teacher: TeacherStates | None = None,
        groups: Tensor | None = None,
    ) -> TokenValues:
        """Log-probabilities and entropies of the masked tokens, and a divergence, computed without padding.

        Args:
            tokens: Right-padded token ids, int64 [B, T].
            lengths: Real tokens of each row, int64 [B].
            mask: Sampled tokens, bool [B, T]; False at position 0, which has no prediction. Rows without a masked token
                are skipped.
            temperature: Divides the logits, as in the sampler.
            entropy_gradient: Whether the entropies have a gradient; it costs another product with the output layer.
            reference: Compute with the reference policy, without gradients: the adapter that training started from, or
                else the base model, adapter off; or the second model of full fine-tuning.
            routing: Experts that the sampler chose, int [B, T, layers, k], -1 where the router selects; their weights
                are the router's. None lets it select everywhere.
            teacher: To which the KL divergence is computed; its index is of these rows.
            groups: int64 [B], equal for rows whose tokens before the first masked one are the same: these are computed
                once. None computes all. See `shares_prompts`.

        Returns:
            Float32 [B, T] each, 0 where the mask is False.

        Raises:
            UserError: Full fine-tuning has loaded no reference policy.
        """
        empty = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        if not mask.any():
            return TokenValues(empty, empty, None if teacher is None else empty)
        hidden, head = self._predicting(tokens, lengths, mask, reference, routing, groups)
        logprobs, entropies = chunked_token_logprobs(
            hidden, head, tokens[mask], temperature, entropy_gradient=entropy_gradient, soft_cap=self._logit_cap
        )
        values = TokenValues(
            empty.masked_scatter(mask, logprobs.float()), empty.masked_scatter(mask, entropies.float())
        )
        if teacher is None:
            return values
        theirs = teacher.hidden[teacher.index[mask]]
        caps = self._logit_cap, teacher.soft_cap
        kl = chunked_reverse_kl(hidden, head, theirs, teacher.head, temperature, *caps)
        return values._replace(teacher_kl=empty.masked_scatter(mask, kl.float()))

    @torch.no_grad()
    def token_predictions(self, tokens: Tensor, lengths: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Natural log-probability of each masked token, and whether it is the most likely one; see `token_values`.

        Returns:
            float32 [M] and bool [M] of the M masked tokens, at least one, in row-major order.
        """
        hidden, head = self._predicting(tokens, lengths, mask, reference=False)
        logprobs, _ = chunked_token_logprobs(hidden, head, tokens[mask], soft_cap=self._logit_cap)
        likeliest = [(chunk @ head.t()).argmax(-1) for chunk in hidden.split(default_chunk(hidden, head))]
        return logprobs.float(), torch.cat(likeliest) == tokens[mask]

    def _predicting(
        self,
        tokens: Tensor,
        lengths: Tensor,
        mask: Tensor,
        reference: bool,
        routing: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [M, D] that predict the masked tokens, and the output layer's weight [V, D]."""
        model = self.trained.reference() if reference else nullcontext(self.base)
        copies = self.trained.low_precision_copies(self.config.torch_dtype)
        with model as base, copies, self.checkpointing.saved_activations():
            return predicting_states(base, tokens, lengths, mask, routing, groups)

    @cached_property
    def shares_prompts(self) -> bool:
        """Whether a prompt can be computed once: by full attention alone, without windows, soft caps and sinks."""
        mixers = [module for name, module in self.base.named_modules() if name.endswith((".self_attn", ".linear_attn"))]
        return all(isinstance(mixer, PackedAttention) and mixer.is_full for mixer in mixers)

    def weights(self, version: int, noise: NormNoise | None = None, reference: bool = False) -> PolicyWeights:
        """Weights for an engine to sample with: views of the parameters, not copies.

        Args:
            version: Number of updates so far.
            noise: Noise of the sampler's norms.
            reference: Return the reference policy's weights; not in full fine-tuning.
        """
        assert not (reference and self.full_finetuning)
        if reference and not self.trained.has_start:
            return PolicyWeights(version, None, self.config.scaling, {}, noise)
        with self.trained.reference() if reference else nullcontext():
            factors = {name: (a.detach(), b.detach()) for name, (a, b) in self.trained.factors().items()}
            tensors = {name: tensor.detach() for name, tensor in self.trained.tensors().items()}
            return PolicyWeights(version, factors, self.config.scaling, tensors, noise)

    def perturbed(self, seed: int, strength: float = 1.0) -> AbstractContextManager[None]:
        """Inside the block the adapter, or in full fine-tuning a layer, is random; at strength 1 outputs change a lot.

        A new adapter changes nothing: an engine without it would pass the parity check.
        """
        return self.trained.perturbed(seed, strength)

    def trained_state(self) -> dict[str, Tensor]:
        """Trained tensors: adapter and trained norm scales by PEFT's names, or all weights by checkpoint name."""
        return self.trained.state()

    def load_trained_state(self, state: dict[str, Tensor]) -> None:
        """Load what `trained_state` returned; UserError where names or shapes differ."""
        load_in_place(self.trained.state(), state, *self.trained.state_description)

    def save(self, folder: Path) -> None:
        """Write adapter and trained norms in PEFT's format, with the tokenizer, or the full model.

        `BASE_FILE` beside an adapter names its base: for a 4-bit one, the weights that it was quantized from.
        """
        self.trained.save(folder)
        if self.full_finetuning:
            mark_trained(folder)
            return
        if (tokenizer := load_tokenizer(self.folder)) is not None:
            tokenizer.save_pretrained(str(folder))
        toy = self.config.toy.settings if self.config.path is None else None
        base = {"path": None if toy else self.config.base_name, "toy": toy, "quantization": self.config.quantization}
        (folder / BASE_FILE).write_text(json.dumps(base, indent=2) + "\n")
