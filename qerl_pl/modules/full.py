"""Full fine-tuning: all of the policy is trained. `FullWeights` has the methods of `LoraAdapter`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qerl_pl.errors import UserError
from qerl_pl.formats.dense_copy import fill_dense_folder
from qerl_pl.modules.masters import train_all
from qerl_pl.modules.parameters import given_back, take_over
from qerl_pl.run.seeding import stream_seed


class FullWeights:
    """Trains every weight of a 16-bit base.

    Args:
        base: The causal LM; its layers are replaced by ones that train.
        folder: Where it is from.
        dtype: In which engines and saved models hold the weights.
        reference: A frozen copy; None where nothing asks for the reference policy.
    """

    result = "model"
    """Folder of a run that holds what was learned."""
    random = False
    """Whether two forward passes in training differ."""
    whole = True
    """Whether all of the model trains: then nothing is left to switch off."""

    def __init__(
        self, base: PreTrainedModel, folder: Path, dtype: torch.dtype, reference: PreTrainedModel | None
    ) -> None:
        self.base, self.folder, self.dtype, self.reference = base, folder, dtype, reference
        self.layers = base.config.num_hidden_layers
        train_all(base)

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """No adapter."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Every weight by its checkpoint name, the trained parameters themselves."""
        return dict(self.base.named_parameters())

    @contextmanager
    def off(self) -> Iterator[PreTrainedModel]:
        """The frozen copy.

        Raises:
            UserError: None was loaded.
        """
        if self.reference is None:
            raise UserError(
                "full fine-tuning has its reference policy only where the loss needs it; found none; set the "
                "objective's beta above 0"
            )
        yield self.reference

    @contextmanager
    def rounded(self, dtype: torch.dtype) -> Iterator[None]:
        """Each layer rounds its own weight, which is too large to be kept beside the master."""
        yield

    @contextmanager
    def probed(self, seed: int) -> Iterator[None]:
        """Inside the block the weights of one decoder layer, another by each seed, are changed by half of themselves.

        Args:
            seed: Of the choice and of the random numbers.
        """
        place = f".layers.{seed % self.layers}."
        changed = {name: parameter for name, parameter in self.tensors().items() if place in name}
        with given_back(changed.values()):
            with torch.no_grad():
                for name, parameter in changed.items():
                    generator = torch.Generator(parameter.device).manual_seed(stream_seed(seed, name))
                    drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                    parameter.add_(drawn, alpha=0.5 * parameter.square().mean().sqrt().item())
            yield

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, by checkpoint name, detached."""
        return {name: parameter.detach() for name, parameter in self.tensors().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave.

        Raises:
            UserError: Names or shapes are another model's.
        """
        take_over(self.state(), state, "weights", "model.policy")

    def save(self, folder: Path) -> None:
        """Write the whole model as plain transformers loads it, a few GiB in memory at a time."""
        trained = {name: p.detach() for name, p in self.base.named_parameters(remove_duplicate=False)}
        # All but what `load_base` leaves out of a checkpoint: that stays as it is.
        fill_dense_folder(self.folder, folder, self.dtype, lambda name, tensor: tensor.copy_(trained.get(name, tensor)))
