"""One rollout's worth of updates: epochs of minibatches of micro-batches over an experience."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from qerl_pl.algorithm.objectives import LossInputs, Objective
from qerl_pl.errors import UserError
from qerl_pl.modules.policy import Policy
from qerl_pl.rollout.experience import Experience
from qerl_pl.run.seeding import stream_seed

PER_TOKEN = {
    "policy/ratio_mean": "ratio",
    "policy/clip_frac_low": "clip_low",
    "policy/clip_frac_high": "clip_high",
    "policy/kl": "kl",
    "policy/entropy": "entropy",
    "mismatch/logprob_abs_mean": "logprob_abs",
    "mismatch/is_weight_mean": "is_weight",
}
"""TensorBoard tag of each metric that the objective sums over tokens."""


class NonFiniteLossError(ArithmeticError):
    """Loss or gradient is NaN or infinite; the optimizer has not taken this step, but may have taken earlier ones."""


@dataclass(frozen=True)
class PolicyUpdate:
    """How a policy learns from an experience; `run` does it.

    Each pass splits the completions into `minibatches` parts, as even as they can be. Dynamic sampling may leave fewer
    completions than parts: an empty part's optimizer step has no gradient, so that neither parameters nor the
    optimizer's state change, and is counted as any other: the learning rate goes its way by rollouts.

    Args:
        objective: The loss.
        epochs: Passes over the experience (μ).
        minibatches: Optimizer steps a pass.
        micro_batch_tokens: Most tokens of one forward pass; None takes a whole minibatch.
        max_grad_norm: Gradients are scaled down to this norm.
        with_reference: Measure the KL divergence to the reference also where the loss does not need it.
        seed: Seed of the run, for dropout and the order of minibatches.
    """

    objective: Objective
    epochs: int
    minibatches: int
    micro_batch_tokens: int | None
    max_grad_norm: float
    with_reference: bool
    seed: int

    @property
    def steps(self) -> int:
        """Optimizer steps of one update."""
        return self.epochs * self.minibatches

    def check_divides(self, completions: int) -> None:
        """Refuse minibatches that do not divide the completions of a whole rollout.

        Raises:
            UserError: They do not.
        """
        if completions % self.minibatches:
            raise UserError(
                f"minibatches must divide the completions of a rollout; found {self.minibatches} and {completions}; "
                "change model.minibatches, data.batch_size or group_size"
            )

    def run(
        self,
        policy: Policy,
        experience: Experience,
        optimizer: LightningOptimizer,
        schedule: LRScheduler,
        backward: Callable[[Tensor], None],
    ) -> dict[str, float]:
        """Update the policy.

        Args:
            policy: What learns.
            experience: What it learns from, on the policy's device.
            optimizer: Of the policy's trained parameters.
            schedule: Learning rate, a step an optimizer step.
            backward: Runs a loss's backward pass (`LightningModule.manual_backward`).

        Returns:
            Means over tokens by TensorBoard tag, nan where none was learned from, and learning rate, loss and gradient
            norm.

        Raises:
            NonFiniteLossError: Loss or gradient is not finite.
        """
        torch.manual_seed(stream_seed(self.seed, "update", experience.version))  # dropout
        mask = self.objective.training_mask(experience.mask, experience.truncated)
        old = self._old_logprobs(policy, experience, mask)
        reference = self._reference_logprobs(policy, experience, mask)
        parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        totals: dict[str, float] = defaultdict(float)
        policy.train()
        for rows in self._minibatch_rows(experience):
            optimizer.zero_grad()
            for name, value in self._accumulate(policy, experience, mask, old, reference, rows, backward).items():
                totals[name] += value
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm).item()
            if not torch.tensor([totals["loss"], norm]).isfinite().all():
                raise NonFiniteLossError(f"loss {totals['loss']:g}, gradient norm {norm:g}")
            totals["grad_norm"] += norm
            totals["lr"] += optimizer.param_groups[0]["lr"]
            optimizer.step()  # passes over parameters without a gradient: weight decay and momentum rest with it
            schedule.step()
        tokens = totals["tokens"] or math.nan  # no mean where every completion was left out
        metrics = {tag: totals[name] / tokens for tag, name in PER_TOKEN.items() if name in totals}
        return metrics | {f"optim/{name}": totals[name] / self.steps for name in ("grad_norm", "loss", "lr")}

    def _accumulate(
        self,
        policy: Policy,
        experience: Experience,
        mask: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
        rows: Tensor,
        backward: Callable[[Tensor], None],
    ) -> dict[str, float]:
        """Accumulate the gradient of one minibatch; returns sums over its tokens."""
        tokens = max(mask[rows].sum().item(), 1.0)
        weights = self.objective.weights(mask[rows], experience.max_tokens, float(len(rows)), tokens)
        totals: dict[str, float] = defaultdict(float)
        for part in self._micro_batches(experience.lengths[rows]):
            index = rows[part]
            logprobs, entropy = self._logprobs(policy, experience, mask, index)
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if old is None else old[index],
                sampler_logprobs=experience.sampler_logprobs[index],
                advantages=experience.advantages[index],
                mask=mask[index],
                weights=weights[part],
                ref_logprobs=None if reference is None else reference[index],
                entropy=entropy,
            )
            outputs = self.objective.loss(inputs)
            if outputs.loss.requires_grad:  # a micro-batch of masked completions has nothing to learn
                backward(outputs.loss)
            totals["loss"] += outputs.loss.item()
            for name, value in outputs.metrics.items():
                totals[name] += value.item()
        return totals

    def _logprobs(self, policy: Policy, experience: Experience, mask: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [len(rows), T] of some completions."""
        return policy.token_logprobs(
            experience.tokens[rows],
            experience.lengths[rows],
            mask[rows],
            experience.temperature,
            self.objective.needs_entropy,
        )

    @torch.no_grad()
    def _frozen_logprobs(self, policy: Policy, experience: Experience, mask: Tensor) -> Tensor:
        policy.eval()
        parts = self._micro_batches(experience.lengths)
        return torch.cat([self._logprobs(policy, experience, mask, part)[0] for part in parts])

    def _old_logprobs(self, policy: Policy, experience: Experience, mask: Tensor) -> Tensor | None:
        """The clean policy's log-probabilities before the update; None where the update's own forward gives them."""
        if self.steps == 1 and not policy.trained.random:
            return None
        return self._frozen_logprobs(policy, experience, mask)

    def _reference_logprobs(self, policy: Policy, experience: Experience, mask: Tensor) -> Tensor | None:
        if not (self.objective.needs_reference or self.with_reference):
            return None
        with policy.reference():
            return self._frozen_logprobs(policy, experience, mask)

    def _micro_batches(self, lengths: Tensor) -> list[Tensor]:
        """Indices into `lengths` [B], in order, cut where the token budget is full."""
        sizes, tokens = [0], 0
        for length in lengths.tolist():
            if self.micro_batch_tokens is not None and sizes[-1] > 0 and tokens + length > self.micro_batch_tokens:
                sizes.append(0)
                tokens = 0
            sizes[-1] += 1
            tokens += length
        return list(torch.arange(len(lengths), device=lengths.device).split(sizes))

    def _minibatch_rows(self, experience: Experience) -> Iterator[Tensor]:
        """Rows of each optimizer step, shuffled when there are several; of some steps none."""
        completions = len(experience)
        for epoch in range(self.epochs):
            rows = torch.arange(completions)
            if self.minibatches > 1:
                seed = stream_seed(self.seed, "minibatches", experience.version, epoch)
                rows = torch.randperm(completions, generator=torch.Generator().manual_seed(seed))
            yield from rows.to(experience.tokens.device).tensor_split(self.minibatches)
