"""The teacher of on-policy distillation: a frozen model whose log-probabilities the policy is trained towards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from qerl_kernels import chunked_token_logprobs
from torch import Tensor

from qerl_pl.errors import UserError, require_one_of
from qerl_pl.formats.base import format_of
from qerl_pl.formats.base_format import DENSE
from qerl_pl.formats.dense_checkpoint import validate_checkpoint
from qerl_pl.formats.quantize import local_folder
from qerl_pl.models.families import check_family, logit_cap
from qerl_pl.models.folder import load_config, load_tokenizer, read_config
from qerl_pl.policy.loading import load_base
from qerl_pl.policy.packing import partition_micro_batches
from qerl_pl.policy.policy import DTYPES, PolicyConfig, predicting_states
from qerl_pl.types import Experience, TeacherStates


@dataclass(frozen=True)
class TeacherConfig:
    """Model that on-policy distillation learns from; see `Objective.distillation_coefficient`.

    Args:
        path: Folder or hub name of a causal LM with the policy's tokenizer, in 16 bits or as `qerl quantize` writes it.
            Null takes the policy's own base in 16 bits, before it is quantized.
        dtype: Data type of its activations and of weights that are not quantized; null takes `model.policy.dtype`.
        offload: Hold it in the CPU's memory, and copy it to the device for each rollout's log-probabilities, while the
            engine sleeps; `false` keeps it on the device.
    """

    path: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    offload: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", None if self.path is None else os.fspath(self.path))
        if self.dtype is not None:
            require_one_of(tuple(DTYPES), "model.teacher.dtype", self.dtype)

    def folder(self, policy: PolicyConfig) -> Path:
        """Local folder of the teacher of a policy; UserError if `path` is neither a folder nor a model of the hub."""
        return policy.source_folder() if self.path is None else local_folder(self.path, "model.teacher.path")

    def torch_dtype(self, policy: torch.dtype) -> torch.dtype:
        """Data type of the teacher of a policy of this data type."""
        return DTYPES[self.dtype] if self.dtype else policy

    def check(self, policy: PolicyConfig) -> None:
        """Check that a policy can learn from the teacher; no weight is read.

        Raises:
            UserError: There is no such model, it is of no known family, its files disagree, the policy's own base is
                stored in 4 bits alone, or the tokenizers differ.
        """
        folder, student = self.folder(policy), policy.source_folder()
        if self.path is not None:
            check_family(read_config(folder), folder)
            validate_checkpoint(folder)
            check_same_tokens(folder, student)
        elif format_of(folder) is not DENSE:
            raise UserError(
                f"a policy learns from its base in 16 bits; {folder} has {format_of(folder).name.upper()} weights "
                "alone; name the 16-bit model as model.teacher.path"
            )


def check_same_tokens(teacher: Path, student: Path) -> None:
    """Raise UserError if a folder has no tokenizer, a token has other ids, or the teacher's output layer is smaller.

    It may be larger: models of one family pad the same vocabulary differently.
    """
    vocabularies = []
    for folder in (teacher, student):
        if (tokenizer := load_tokenizer(folder)) is None:
            raise UserError(f"a teacher needs the policy's tokenizer; {folder} has none; copy it there")
        vocabularies.append(tokenizer.get_vocab())
    theirs, own = vocabularies
    if different := sorted(token for token in theirs.keys() | own.keys() if theirs.get(token) != own.get(token)):
        first = different[0]
        raise UserError(
            f"a teacher needs the policy's tokenizer; {len(different)} tokens have other ids, such as {first!r}: "
            f"{theirs.get(first)} in {teacher}, {own.get(first)} in {student}; name a model of the same family as "
            "model.teacher.path"
        )
    sizes = [load_config(folder).get_text_config().vocab_size for folder in (teacher, student)]
    if sizes[0] < sizes[1]:
        raise UserError(
            f"a teacher's output layer needs the policy's {sizes[1]} tokens; {teacher} has {sizes[0]}; name another "
            "model as model.teacher.path"
        )


class Teacher:
    """A frozen model that computes log-probabilities of sampled tokens, or next-token distributions."""

    def __init__(self, config: TeacherConfig, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        held = torch.device("cpu") if config.offload else device
        self._model = load_base(folder, config.torch_dtype(dtype), held).eval()

    @torch.no_grad()
    def logprobs(self, experience: Experience, mask: Tensor, micro_batch_tokens: int | None) -> Tensor:
        """Log-probabilities of sampled tokens, at the temperature of the sampler.

        Args:
            experience: This rank's completions, on the teacher's device.
            mask: Tokens that train, bool [B, T]; False at position 0.
            micro_batch_tokens: Most tokens of a forward pass; None for no limit.

        Returns:
            Natural logs, float32 [B, T], 0 where the mask is False.
        """
        logprobs = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        with self._on_device():
            for batch, hidden, head in self._states(experience, mask, micro_batch_tokens):
                tokens, masked = experience.tokens[batch], mask[batch]
                cap = logit_cap(self._model.config)
                values, _ = chunked_token_logprobs(hidden, head, tokens[masked], experience.temperature, soft_cap=cap)
                logprobs[batch] = torch.zeros_like(logprobs[batch]).masked_scatter(masked, values.float())
        return logprobs

    @torch.no_grad()
    def states(self, experience: Experience, mask: Tensor, micro_batch_tokens: int | None) -> TeacherStates:
        """What the next-token distributions of the tokens that train are computed from; see `logprobs`.

        The hidden states take [M, D] of the device's memory, and so does the output layer, wherever the model is held.
        """
        index = torch.full(mask.shape, -1, dtype=torch.int64, device=mask.device)
        found, count = [], 0
        with self._on_device():
            for batch, hidden, _ in self._states(experience, mask, micro_batch_tokens):
                own = torch.full_like(index[batch], -1)
                numbers = torch.arange(count, count + len(hidden), device=mask.device)
                index[batch] = own.masked_scatter(mask[batch], numbers)
                found.append(hidden)
                count += len(hidden)
            head = self._model.get_output_embeddings().weight.detach()
        hidden = torch.cat(found) if found else head.new_zeros(0, head.shape[1])
        return TeacherStates(hidden, index, head, logit_cap(self._model.config))

    def _states(
        self, experience: Experience, mask: Tensor, micro_batch_tokens: int | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(rows, hidden states that predict their masked tokens, output layer) of each micro-batch."""
        rows = mask.any(dim=1).nonzero().squeeze(1)
        if not len(rows):
            return
        for indices in partition_micro_batches(experience.lengths[rows].tolist(), micro_batch_tokens):
            batch = rows[torch.tensor(indices, device=rows.device)]
            states = predicting_states(self._model, experience.tokens[batch], experience.lengths[batch], mask[batch])
            yield batch, *states

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Inside the block the weights are on the device; afterwards they are where they were, without a copy."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        held = [tensor.data for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.data = tensor.data.to(self.device)
            yield
        finally:
            for tensor, data in zip(tensors, held, strict=True):
                tensor.data = data
