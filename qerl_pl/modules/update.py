"""The update: old and reference log-probabilities, minibatches, micro-batches and optimizer steps."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qerl_pl.algorithm.objectives import LossInputs, Objective
from qerl_pl.errors import UserError
from qerl_pl.policy.packing import Prompts, partition_groups, partition_micro_batches
from qerl_pl.policy.policy import Policy, TokenValues
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.seeds import stream_seed
from qerl_pl.types import Experience, TeacherStates

TOKEN_METRICS = {
    "policy/ratio_mean": "ratio",
    "policy/clip_frac_low": "clip_low",
    "policy/clip_frac_high": "clip_high",
    "policy/kl": "kl",
    "policy/entropy": "entropy",
    "distill/kl": "teacher_kl",
    "mismatch/logprob_abs_mean": "logprob_abs",
    "mismatch/is_weight_mean": "is_weight",
    "mismatch/k3": "mismatch_k3",
    "mismatch/rejected_frac": "rejected",
    "mismatch/capped_frac": "capped",
}
"""TensorBoard tag of each metric that the objective sums over tokens."""


def sampled_indices(share: float, completions: int, seed: int) -> Tensor:
    """Ascending indices of a random share of all ranks' completions, at least one; the same on all ranks."""
    count = min(max(round(share * completions), 1), completions)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(completions, generator=generator)[:count].sort().values


def local_rows(wanted: Tensor, indices: Tensor, completions: int) -> Tensor:
    """Rows of the `wanted` completions on this rank, in their order.

    `indices` [B] are the indices of this rank's rows among all ranks' completions.
    """
    row_of = torch.full((completions,), -1, device=indices.device)
    row_of[indices] = torch.arange(len(indices), device=indices.device)
    rows = row_of[wanted.to(indices.device)]
    return rows[rows >= 0]


@dataclass(frozen=True)
class PolicyUpdate:
    """Optimizer steps on an experience; `run` takes them.

    Each epoch splits the completions evenly into `minibatches`. Dynamic sampling may leave fewer completions than
    minibatches: the step of an empty minibatch has no gradient, changes neither parameters nor optimizer state, and
    still counts for the learning rate. Gradients of a minibatch accumulate over micro-batches.

    Args:
        objective: The loss.
        epochs: Passes over the experience (μ).
        minibatches: Optimizer steps per epoch.
        micro_batch_tokens: Most tokens of a forward pass; None computes a minibatch at once.
        max_grad_norm: Gradients are clipped to this norm.
        reference_share: Share of the completions on which the KL divergence to the reference is estimated if the loss
            does not need it; drawn for each rollout, 0 for none.
        seed: Seed of the run, for dropout and the order of minibatches.
        share_prompts: Compute a prompt once for its completions in a micro-batch, where `Policy.shares_prompts`.
    """

    objective: Objective
    epochs: int = 1
    minibatches: int = 1
    micro_batch_tokens: int | None = None
    max_grad_norm: float = 0.2
    reference_share: float = 0.0
    seed: int = 0
    share_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.reference_share <= 1:
            raise UserError(
                f"model.monitor_kl must be true, false or in [0, 1]; got {self.reference_share}; set it to 0.125, say"
            )

    @property
    def steps(self) -> int:
        """Optimizer steps of one update."""
        return self.epochs * self.minibatches

    def check_divides(self, completions: int) -> None:
        """Raise UserError if the minibatches do not divide the completions of a full rollout."""
        if completions % self.minibatches:
            raise UserError(
                f"minibatches must divide the completions of a rollout; got {self.minibatches} and {completions}; "
                "change model.minibatches, data.batch_size or group_size"
            )

    def run(
        self,
        policy: Policy,
        experience: Experience,
        optimizer: Optimizer | LightningOptimizer,
        schedule: LRScheduler,
        backward: Callable[[Tensor], None] = Tensor.backward,
        ranks: Communicator = SINGLE_PROCESS,
    ) -> dict[str, float]:
        """Update the policy. Collective: the steps equal those of one process with all ranks' completions.

        Args:
            policy: In training.
            experience: This rank's completions, on the policy's device.
            optimizer: Optimizer of the policy's trained parameters.
            schedule: Learning rate by optimizer steps.
            backward: Adds a loss's gradients to the parameters'; in a LightningModule its `manual_backward`.
            ranks: All training processes.

        Returns:
            Metrics by TensorBoard tag: means over all ranks' tokens, NaN where no token trained, and over steps.

        Raises:
            UserError: Loss or gradient is not finite.
        """
        own_stream = (ranks.rank,) if ranks.rank else ()
        torch.manual_seed(stream_seed(self.seed, "update", experience.version, *own_stream))  # dropout
        return RunningUpdate(self, policy, experience, backward, ranks).run(optimizer, schedule)

    def minibatch_indices(self, version: int, completions: int) -> Iterator[Tensor]:
        """Indices of the completions of each optimizer step, shuffled if an epoch has several; some may be empty."""
        for epoch in range(self.epochs):
            indices = torch.arange(completions)
            if self.minibatches > 1:
                seed = stream_seed(self.seed, "minibatches", version, epoch)
                indices = torch.randperm(completions, generator=torch.Generator().manual_seed(seed))
            yield from indices.tensor_split(self.minibatches)

    def forward_limit(self, experience: Experience) -> int:
        """Most tokens of a forward pass over more rows than a minibatch has; a longer sequence is alone in its own."""
        return self.micro_batch_tokens or self.max_micro_batch_tokens(experience.lengths, len(experience))

    def max_micro_batch_tokens(self, lengths: Tensor, completions: int) -> int:
        """Tokens of the largest micro-batch that a rank with sequences of these lengths [B] may have.

        A minibatch is drawn from all ranks' completions, and may be a single rank's.
        """
        if self.micro_batch_tokens is None:
            rows = max(-(-completions // self.minibatches), 1)
            return int(lengths.sort(descending=True).values[:rows].sum())
        return max([self.micro_batch_tokens, *lengths.tolist()])


class RunningUpdate:
    """One update: the policy, its experience, and what is computed from them before the first step."""

    def __init__(
        self,
        settings: PolicyUpdate,
        policy: Policy,
        experience: Experience,
        backward: Callable[[Tensor], None],
        ranks: Communicator,
    ) -> None:
        self.settings, self.objective = settings, settings.objective
        self.policy, self.experience, self.backward, self.ranks = policy, experience, backward, ranks
        self.parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.mask = self.objective.training_mask(experience.mask, experience.truncated)
        """Tokens that train, bool [B, T]."""
        self.has_gradient = (experience.advantages != 0) | self.objective.has_other_terms
        """Rows of this rank that have a gradient, bool [B]; others count in the loss's denominator alone."""
        self.indices, self.token_counts = self._gather_indices()
        """Indices of this rank's rows among all ranks' completions [B]; trained tokens of all completions [N]."""
        self.completions = len(self.token_counts)
        shared = settings.share_prompts and policy.shares_prompts
        self.prompts = Prompts.of(experience.tokens, self.mask) if shared else None
        """Prompts of this rank's rows if each is computed once; None if every row computes its own."""
        self.old = torch.zeros_like(experience.sampler_logprobs)
        """Log-probabilities by the policy before the update [B, T]; the first step fills in its own rows."""
        self.reference: Tensor | None = None
        """Log-probabilities by the reference policy [B, T], of the rows in `kl_rows`, bool [B]: a sample."""
        self.kl_rows = torch.zeros(len(experience), dtype=torch.bool, device=self.mask.device)
        self.kl_scale = 1.0
        """Completions of all ranks divided by those in the sample: makes the mean KL unbiased."""

    def run(self, optimizer: Optimizer | LightningOptimizer, schedule: LRScheduler) -> dict[str, float]:
        """Take all steps; see `PolicyUpdate.run`."""
        experience, settings, policy = self.experience, self.settings, self.policy
        longest = max(experience.lengths.tolist(), default=1)
        largest = settings.max_micro_batch_tokens(experience.lengths, self.completions)
        policy.checkpointing.choose_mode(largest, self.ranks, longest)
        minibatches = list(settings.minibatch_indices(experience.version, self.completions))
        local = [local_rows(minibatch, self.indices, self.completions) for minibatch in minibatches]
        local = [rows[self.has_gradient[rows]] for rows in local]
        self._precompute_logprobs(local[0])
        totals: dict[str, float] = defaultdict(float)
        policy.train()
        for step, (minibatch, rows) in enumerate(zip(minibatches, local, strict=True)):
            optimizer.zero_grad()
            tokens = self.token_counts[minibatch].sum().item()
            sizes = float(len(minibatch)), max(tokens, 1.0)
            weights = self.objective.weights(self.mask[rows], experience.max_tokens, *sizes)
            sums = self._accumulate(rows, weights, step == 0 and not policy.trained.has_dropout)
            if tokens > 0:  # else no rank has a gradient
                missing = all(parameter.grad is None for parameter in self.parameters)  # all rows may be masked
                self.ranks.all_reduce(gradients(self.parameters, self.ranks.size > 1 or missing))
            for rank_sums in self.ranks.all_gather(dict(sums)):
                for name, value in rank_sums.items():
                    totals[name] += value
            totals["lr"] += optimizer.param_groups[0]["lr"]
            totals["grad_norm"] += clip_and_step(optimizer, self.parameters, settings.max_grad_norm, totals["loss"])
            schedule.step()
        if self.reference is not None and "kl" in totals:
            totals["kl"] *= self.kl_scale
        policy.checkpointing.synchronize_mode(self.ranks)
        return update_metrics(totals, settings.steps)

    def _accumulate(self, rows: Tensor, weights: Tensor, on_policy: bool) -> dict[str, float]:
        """Accumulate the gradient of this rank's rows of a minibatch; returns sums over their tokens."""
        micro_batches = self._micro_batches(rows, self.settings.micro_batch_tokens)

        def work() -> list[dict[str, Tensor]]:
            all_sums = []
            for micro_batch in micro_batches:
                loss, sums = self._loss(rows[micro_batch], weights[micro_batch], on_policy)
                if loss.requires_grad:  # not if every completion of the micro-batch is masked
                    self.backward(loss)
                all_sums.append({"loss": loss.detach(), **sums})
            return all_sums

        all_sums = self.policy.checkpointing.run_with_oom_fallback(work, self.parameters)
        totals: dict[str, float] = defaultdict(float)
        for name in all_sums[0]:  # after all micro-batches, as each transfer waits for the device
            for value in torch.stack([sums[name] for sums in all_sums]).tolist():
                totals[name] += value
        return totals

    def _loss(self, rows: Tensor, weights: Tensor, on_policy: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch, and sums over its tokens."""
        experience, reference, teacher = self.experience, self.reference, self.experience.teacher_states
        teacher = None if teacher is None else replace(teacher, index=teacher.index[rows])
        logprobs, entropy, teacher_kl = self._token_values(rows, teacher=teacher)
        if on_policy:  # the policy is still the old one
            self.old[rows] = logprobs.detach()
        ref_logprobs = None
        if reference is not None:  # the KL of completions outside the sample is 0
            ref_logprobs = torch.where(self.kl_rows[rows, None], reference[rows], logprobs.detach())
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=self.old[rows],
            sampler_logprobs=experience.sampler_logprobs[rows],
            advantages=experience.advantages[rows],
            mask=self.mask[rows],
            weights=weights,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            teacher_logprobs=None if experience.teacher_logprobs is None else experience.teacher_logprobs[rows],
            teacher_kl=teacher_kl,
        )
        outputs = self.objective.loss(inputs)
        return outputs.loss, outputs.metrics

    def _precompute_logprobs(self, first_rows: Tensor) -> None:
        """Old and reference log-probabilities; without dropout the first step computes its rows' old ones itself."""
        needs_old = self.has_gradient.clone()
        if not self.policy.trained.has_dropout:
            needs_old[first_rows] = False
        self.old = self._frozen_logprobs(needs_old.nonzero().squeeze(1))
        share = 1.0 if self.objective.needs_reference else self.settings.reference_share
        if share > 0:
            seed = stream_seed(self.settings.seed, "kl", self.experience.version)
            sample = sampled_indices(share, self.completions, seed)
            rows = local_rows(sample, self.indices, self.completions)
            rows = rows[self.has_gradient[rows]]
            self.reference = self._frozen_logprobs(rows, reference=True)
            self.kl_rows[rows], self.kl_scale = True, self.completions / max(len(sample), 1)

    @torch.no_grad()
    def _frozen_logprobs(self, rows: Tensor, reference: bool = False) -> Tensor:
        """Log-probabilities [B, T] of some rows without gradient and dropout, 0 elsewhere; or the reference's."""
        self.policy.eval()
        logprobs = torch.zeros_like(self.experience.sampler_logprobs)
        limit = self.settings.forward_limit(self.experience)
        for micro_batch in self._micro_batches(rows, limit) if len(rows) else []:
            batch = rows[micro_batch]
            logprobs[batch], _, _ = self._token_values(batch, reference)
        return logprobs

    def _token_values(self, rows: Tensor, reference: bool = False, teacher: TeacherStates | None = None) -> TokenValues:
        """Log-probabilities and entropies [len(rows), T], and the KL divergence to a teacher, if there is one."""
        experience, routing = self.experience, self.experience.routing
        chosen = None if routing is None else routing[rows.to(routing.device)].to(rows.device)
        sequences = experience.tokens[rows], experience.lengths[rows], self.mask[rows], experience.temperature
        groups = None if self.prompts is None else self.prompts.groups[rows]
        return self.policy.token_values(*sequences, self.objective.needs_entropy, reference, chosen, teacher, groups)

    def _micro_batches(self, rows: Tensor, max_tokens: int | None) -> list[Tensor]:
        """Indices into `rows` for each micro-batch."""
        lengths = self.experience.lengths[rows].tolist()
        if self.prompts is None:
            partition = partition_micro_batches(lengths, max_tokens)
        else:
            prompts, groups = (numbers[rows].tolist() for numbers in self.prompts)
            partition = partition_groups(lengths, prompts, groups, max_tokens)
        return [torch.tensor(indices, dtype=torch.int64, device=rows.device) for indices in partition]

    def _gather_indices(self) -> tuple[Tensor, Tensor]:
        own = torch.arange(len(self.experience)) if self.experience.indices is None else self.experience.indices.cpu()
        gathered = self.ranks.all_gather((own, self.mask.sum(dim=1).cpu()))
        token_counts = torch.zeros(sum(len(indices) for indices, _ in gathered), dtype=torch.int64)
        for indices, counts in gathered:
            token_counts[indices] = counts
        return own.to(self.mask.device), token_counts.to(self.mask.device)


def clip_and_step(
    optimizer: Optimizer | LightningOptimizer, parameters: list[nn.Parameter], max_norm: float, loss: float
) -> float:
    """Clip the gradient and take an optimizer step; returns the norm before.

    Raises:
        UserError: Loss or gradient is not finite; no step is taken.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(
            f"loss and gradient must be finite; got loss {loss:g} and gradient norm {norm:g}; lower the learning rate "
            "and go on with --resume auto"
        )
    optimizer.step()  # skips parameters without a gradient, weight decay and momentum included
    return norm


def gradients(parameters: list[nn.Parameter], filled: bool) -> list[Tensor]:
    """Gradients to reduce; `filled`, zeros where there is none."""
    if filled:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def update_metrics(totals: Mapping[str, float], steps: int) -> dict[str, float]:
    """Means, by TensorBoard tag, of sums over tokens (NaN where no token trained) and over optimizer steps."""
    tokens = totals["tokens"] or math.nan
    metrics = {tag: totals[name] / tokens for tag, name in TOKEN_METRICS.items() if name in totals}
    metrics["mismatch/chi2"] = totals["mismatch_ratio_squared"] / tokens - 1
    metrics["mismatch/ess"] = totals["is_weight"] ** 2 / (tokens * totals["is_weight_squared"] or math.nan)
    return metrics | {f"optim/{name}": totals[name] / steps for name in ("grad_norm", "loss", "lr")}
