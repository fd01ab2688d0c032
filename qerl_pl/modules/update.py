"""Which sequences share a forward pass."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from qerl_pl.algorithm.objectives import LossInputs, Objective
from qerl_pl.distributed.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.errors import UserError
from qerl_pl.modules.policy import Policy
from qerl_pl.persistence.random_state import stream_seed
from qerl_pl.types import Experience


def partition_micro_batches(lengths: Sequence[int], most_tokens: int | None) -> list[list[int]]:
    """Deal sequences to few micro-batches of as even a number of tokens as that gives.

    The longest first, each to the micro-batch that has the fewest tokens so far. Where that makes one too large, each
    to the first that has room, if that needs no more of them; else there is one micro-batch more. The same lengths are
    dealt alike anywhere.

    Args:
        lengths: Tokens of each sequence.
        most_tokens: Of a micro-batch; a sequence of more goes alone. None takes one micro-batch of all.

    Returns:
        Indices into `lengths`, ascending in each micro-batch; at least one micro-batch, empty where there are no
        sequences. That of most tokens is the first, so that no later one needs memory that was not needed before.
    """
    if most_tokens is None:
        return [list(range(len(lengths)))]
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    alone = [[index] for index in longest_first if lengths[index] >= most_tokens]
    others = longest_first[len(alone) :]
    filled = _first_fit(others, lengths, most_tokens)
    parts = filled
    for count in range(-(-sum(lengths[index] for index in others) // most_tokens), len(filled) + 1):
        even = _evenly(others, lengths, count)
        if all(_tokens(part, lengths) <= most_tokens for part in even):
            parts = even
            break
    dealt = sorted(alone + parts, key=lambda part: -_tokens(part, lengths))
    return [sorted(part) for part in dealt] or [[]]


def _tokens(part: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in part)


def _evenly(indices: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in indices:
        least = tokens.index(min(tokens))
        parts[least].append(index)
        tokens[least] += lengths[index]
    return parts


def _first_fit(indices: Sequence[int], lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        place = next((place for place, left in enumerate(room) if lengths[index] <= left), len(parts))
        if place == len(parts):
            parts.append([])
            room.append(most_tokens)
        parts[place].append(index)
        room[place] -= lengths[index]
    return parts


@dataclass(frozen=True)
class Reference:
    """The reference policy's log-probabilities of a sample of the completions."""

    logprobs: Tensor
    """[B, T], 0 where they were not measured."""
    measured: Tensor
    """Of which rows, bool [B]."""
    factor: float
    """Completions of all ranks over those that were measured: what makes a sum over these one over all."""


@dataclass(frozen=True)
class PrecomputedLogprobs:
    """What is known of a rollout before its first step."""

    experience: Experience
    mask: Tensor
    """Tokens that train, bool [B, T]."""
    old: Tensor
    """The clean policy's log-probabilities before the update [B, T]; of rows that the first step knows, from then."""
    reference: Reference | None


def logprobs_of(
    policy: Policy, objective: Objective, experience: Experience, mask: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [len(rows), T] of some completions."""
    return policy.token_logprobs(
        experience.tokens[rows],
        experience.lengths[rows],
        mask[rows],
        experience.temperature,
        objective.needs_entropy,
    )


@torch.no_grad()
def frozen_logprobs(
    policy: Policy, objective: Objective, experience: Experience, mask: Tensor, parts: Sequence[Tensor]
) -> Tensor:
    """Log-probabilities [B, T] without gradient or dropout of the rows in `parts`, a forward pass each, else 0."""
    policy.eval()
    found = torch.zeros_like(experience.sampler_logprobs)
    for part in parts:
        found[part] = logprobs_of(policy, objective, experience, mask, part)[0]
    return found


def sampled_indices(share: float, completions: int, seed: int) -> Tensor:
    """Places, ascending, of a share of the completions of all ranks, one at least; equal on all ranks."""
    count = min(max(round(share * completions), 1), completions)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(completions, generator=generator)[:count].sort().values


def local_rows(wanted: Tensor, indices: Tensor, completions: int) -> Tensor:
    """Own rows among the wanted places, in the order of those."""
    row_at = torch.full((completions,), -1, device=indices.device)
    row_at[indices] = torch.arange(len(indices), device=indices.device)
    rows = row_at[wanted.to(indices.device)]
    return rows[rows >= 0]


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
    optimizer's state change, and is counted as any other: the learning rate goes its way by rollouts. A part's gradient
    is summed over micro-batches, dealt by `partition_micro_batches`.

    Args:
        objective: The loss.
        epochs: Passes over the experience (μ).
        minibatches: Optimizer steps a pass.
        micro_batch_tokens: Most tokens of one forward pass; None takes a whole minibatch.
        max_grad_norm: Gradients are scaled down to this norm.
        reference_share: Share of the completions whose KL divergence to the reference is measured where the loss does
            not need it; 0 measures none. Which ones is drawn by rollout; the mean is unbiased.
        seed: Seed of the run, for dropout and the order of minibatches.
    """

    objective: Objective
    epochs: int
    minibatches: int
    micro_batch_tokens: int | None
    max_grad_norm: float
    reference_share: float
    seed: int

    def __post_init__(self) -> None:
        """Check the range.

        Raises:
            UserError: A share is none.
        """
        if not 0 <= self.reference_share <= 1:
            raise UserError(
                f"model.monitor_kl must be true, false or in [0, 1]; found {self.reference_share}; set it to 0.125, say"
            )

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
        ranks: Communicator = SINGLE_PROCESS,
    ) -> dict[str, float]:
        """Update the policy.

        Args:
            policy: What learns.
            experience: What it learns from, on the policy's device.
            optimizer: Of the policy's trained parameters.
            schedule: Learning rate, a step an optimizer step.
            backward: Runs a loss's backward pass (`LightningModule.manual_backward`).
            ranks: Who learns with this process, each from the experience of its own completions. All take the steps
                that one process with all completions would take.

        Returns:
            Means over all ranks' tokens by TensorBoard tag, nan where none was learned from; rate, loss, gradient norm.

        Raises:
            NonFiniteLossError: Loss or gradient is not finite.
        """
        policy.checkpointing.choose_mode(self.most_tokens(experience.lengths), ranks)
        own_stream = (ranks.rank,) if ranks.rank else ()
        torch.manual_seed(stream_seed(self.seed, "update", experience.version, *own_stream))  # dropout
        mask = self.objective.training_mask(experience.mask, experience.truncated)
        indices, tokens_of = self._everywhere(experience, mask, ranks)
        minibatches = list(self._minibatches(experience.version, len(tokens_of)))
        steps = [(step, local_rows(step, indices, len(tokens_of))) for step in minibatches]
        precomputed = self._known(policy, experience, mask, steps[0][1], indices, len(tokens_of))
        parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        totals: dict[str, float] = defaultdict(float)
        policy.train()
        for number, (step_places, rows) in enumerate(steps):
            optimizer.zero_grad()
            tokens = tokens_of[step_places].sum().item()
            completions = float(len(step_places))
            weights = self.objective.weights(mask[rows], experience.max_tokens, completions, max(tokens, 1.0))
            unchanged = number == 0 and not policy.trained.random
            sums = self._accumulate(policy, precomputed, rows, weights, backward, parameters, unchanged)
            if tokens > 0:  # else no rank has a gradient, and none is made
                ranks.sum(_gradients(parameters, ranks))
            for part in ranks.gather(dict(sums)):
                for name, value in part.items():
                    totals[name] += value
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm).item()
            if not torch.tensor([totals["loss"], norm]).isfinite().all():
                raise NonFiniteLossError(f"loss {totals['loss']:g}, gradient norm {norm:g}")
            totals["grad_norm"] += norm
            totals["lr"] += optimizer.param_groups[0]["lr"]
            optimizer.step()  # passes over parameters without a gradient: weight decay and momentum rest with it
            schedule.step()
        if precomputed.reference is not None and "kl" in totals:
            totals["kl"] *= precomputed.reference.factor
        policy.checkpointing.synchronize_mode(ranks)
        return self._metrics(totals)

    def _metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Of sums over all steps and ranks: means a token and a step, by TensorBoard tag."""
        learned = totals["tokens"] or math.nan  # no mean where every completion was left out
        metrics = {tag: totals[name] / learned for tag, name in PER_TOKEN.items() if name in totals}
        return metrics | {f"optim/{name}": totals[name] / self.steps for name in ("grad_norm", "loss", "lr")}

    def _accumulate(
        self,
        policy: Policy,
        precomputed: PrecomputedLogprobs,
        rows: Tensor,
        weights: Tensor,
        backward: Callable[[Tensor], None],
        parameters: list[nn.Parameter],
        unchanged: bool,
    ) -> dict[str, float]:
        """Accumulate the gradient of this rank's rows of one minibatch; returns sums over their tokens.

        `unchanged`: the policy is still the old one, whose log-probabilities are kept for later steps.
        """
        parts = self._micro_batches(precomputed.experience.lengths[rows])

        def work() -> list[dict[str, Tensor]]:
            found = []
            for part in parts:
                loss, sums = self._loss(policy, precomputed, rows[part], weights[part], unchanged)
                if loss.requires_grad:  # a micro-batch of masked completions has nothing to learn
                    backward(loss)
                found.append({"loss": loss.detach(), **sums})
            return found

        found = policy.checkpointing.run_with_oom_fallback(work, parameters)
        totals: dict[str, float] = defaultdict(float)
        for name in found[0]:  # all at once, for each waits for the device
            for value in torch.stack([sums[name] for sums in found]).tolist():
                totals[name] += value
        return totals

    def _loss(
        self, policy: Policy, precomputed: PrecomputedLogprobs, rows: Tensor, weights: Tensor, unchanged: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch, and sums over its tokens."""
        experience, reference = precomputed.experience, precomputed.reference
        logprobs, entropy = logprobs_of(policy, self.objective, experience, precomputed.mask, rows)
        if unchanged:
            precomputed.old[rows] = logprobs.detach()
        ref_logprobs = None
        if reference is not None:  # rows that were not measured add nothing
            measured = reference.measured[rows, None]
            ref_logprobs = torch.where(measured, reference.logprobs[rows], logprobs.detach())
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=precomputed.old[rows],
            sampler_logprobs=experience.sampler_logprobs[rows],
            advantages=experience.advantages[rows],
            mask=precomputed.mask[rows],
            weights=weights,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
        )
        outputs = self.objective.loss(inputs)
        return outputs.loss, outputs.metrics

    def _known(
        self, policy: Policy, experience: Experience, mask: Tensor, first: Tensor, indices: Tensor, completions: int
    ) -> PrecomputedLogprobs:
        """Measure what the steps need and do not measure themselves; `first` are the rows of the first one.

        Its forward pass is the old policy's, unless there is dropout.
        """
        asked = torch.ones(len(experience), dtype=torch.bool, device=mask.device)
        if not policy.trained.random:
            asked[first] = False

        def measured(rows: Tensor) -> Tensor:
            parts = [rows[part] for part in self._micro_batches(experience.lengths[rows])] if len(rows) else []
            return frozen_logprobs(policy, self.objective, experience, mask, parts)

        old, reference = measured(asked.nonzero().squeeze(1)), None
        share = 1.0 if self.objective.needs_reference else self.reference_share
        if share > 0:
            drawn = sampled_indices(share, completions, stream_seed(self.seed, "kl", experience.version))
            rows = local_rows(drawn, indices, completions)
            with policy.reference():
                reference = Reference(measured(rows), torch.zeros_like(asked), completions / max(len(drawn), 1))
            reference.measured[rows] = True
        return PrecomputedLogprobs(experience, mask, old, reference)

    def _micro_batches(self, lengths: Tensor) -> list[Tensor]:
        """Indices into `lengths` [B] of each micro-batch."""
        parts = partition_micro_batches(lengths.tolist(), self.micro_batch_tokens)
        return [torch.tensor(part, dtype=torch.int64, device=lengths.device) for part in parts]

    def most_tokens(self, lengths: Tensor) -> int:
        """Tokens of the largest micro-batch that sequences of these lengths [B] make."""
        if self.micro_batch_tokens is None:
            per_step = max(-(-len(lengths) // self.minibatches), 1)
            return int(lengths.sort(descending=True).values[:per_step].sum())
        return max([self.micro_batch_tokens, *lengths.tolist()])

    def _everywhere(self, experience: Experience, mask: Tensor, ranks: Communicator) -> tuple[Tensor, Tensor]:
        """Place of each own row among the completions of all ranks [B], and how many tokens train at each place."""
        own = torch.arange(len(experience)) if experience.indices is None else experience.indices.cpu()
        parts = ranks.gather((own, mask.sum(dim=1).cpu()))
        tokens_of = torch.zeros(sum(len(indices) for indices, _ in parts), dtype=torch.int64)
        for indices, tokens in parts:
            tokens_of[indices] = tokens
        return own.to(mask.device), tokens_of.to(mask.device)

    def _minibatches(self, version: int, completions: int) -> Iterator[Tensor]:
        """Places of each optimizer step, shuffled when there are several; of some steps none."""
        for epoch in range(self.epochs):
            indices = torch.arange(completions)
            if self.minibatches > 1:
                seed = stream_seed(self.seed, "minibatches", version, epoch)
                indices = torch.randperm(completions, generator=torch.Generator().manual_seed(seed))
            yield from indices.tensor_split(self.minibatches)


def _gradients(parameters: list[nn.Parameter], ranks: Communicator) -> list[Tensor]:
    """Gradients to add up; zeros where this rank had nothing to learn from."""
    if ranks.size > 1:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
