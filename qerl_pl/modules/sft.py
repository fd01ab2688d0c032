"""The LightningModule that trains the policy by supervised fine-tuning (SFT)."""

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from qerl_pl.datamodules.conversations import Conversation, ConversationBatch, ConversationDataModule, padded
from qerl_pl.errors import UserError
from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.modules.qerl import BEFORE_TRAINING
from qerl_pl.modules.update import clip_and_step, gradients
from qerl_pl.policy.packing import partition_micro_batches
from qerl_pl.runtime.checks import check_monitors
from qerl_pl.runtime.communicator import Communicator, writes_files
from qerl_pl.runtime.random_state import deterministic
from qerl_pl.runtime.strategy import communicator_of
from qerl_pl.seeds import stream_seed

log = logging.getLogger(__name__)

Batch = tuple[Tensor, Tensor, Tensor]
"""Token ids [B, T], lengths [B] and trained tokens [B, T]."""


class SFTModule(PolicyModule):
    """Trains a policy on conversations: the mean negative log-likelihood of a batch's trained tokens, of all ranks.

    A training step is one optimizer step, accumulated over micro-batches. Nothing is sampled, and there is no noise.
    Arguments are those of `PolicyModule`.
    """

    kind = "supervised fine-tuning"

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Refuse another precision, a run without an end, other data, and conversations too long."""
        super().check_first(trainer, stage)
        data, positions = _data(trainer), self.policy_config.positions()
        if positions is not None and data.max_length > positions:
            raise UserError(
                f"a conversation must fit the model's {positions} positions; got data.max_length {data.max_length}; "
                "lower it"
            )

    def on_train_start(self) -> None:
        """Set the learning rate, and refuse ranks that have read different files."""
        super().on_train_start()
        facts = {"base model": self.base_identity, "adapter to start from": self.start_identity}
        communicator_of(self.trainer).require_same(
            facts | {"number of finished steps": self.policy_version} | _data(self.trainer).state_dict()
        )

    # Training ------------------------------------------------------------------------------------------------------

    def training_step(self, batch: ConversationBatch, batch_idx: int) -> None:
        """Take an optimizer step on the batch."""
        start = time.perf_counter()
        self.restore_random_state()
        with deterministic():
            metrics = self._update(batch, communicator_of(self.trainer))
        self.policy_version += 1
        metrics["time/update_s"] = seconds = time.perf_counter() - start
        tokens = sum(len(conversation.token_ids) for conversation in batch.conversations)
        metrics["perf/tokens_per_s"] = tokens / seconds
        for name, value in metrics.items():
            self.log(name, value, batch_size=1, prog_bar=name == "optim/loss")

    def _update(self, batch: ConversationBatch, ranks: Communicator) -> dict[str, float]:
        """One optimizer step, equal to that of one process; returns its metrics by TensorBoard tag."""
        policy, (optimizer, schedule) = self.policy, self.optimizer_and_schedule()
        own_stream = (ranks.rank,) if ranks.rank else ()
        torch.manual_seed(stream_seed(self.seed, "update", self.policy_version, *own_stream))  # dropout
        micro_batches = self._micro_batches(batch.share(ranks.rank, ranks.size))
        largest = max((int(lengths.sum()) for _, lengths, _ in micro_batches), default=0)
        longest = max((int(lengths.max()) for _, lengths, _ in micro_batches), default=1)
        policy.checkpointing.choose_mode(max(largest, self.micro_batch_tokens or 0), ranks, longest)
        parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimizer.zero_grad()
        policy.train()
        sums = policy.checkpointing.run_with_oom_fallback(
            lambda: self._accumulate(micro_batches, batch.trained_tokens), parameters
        )
        ranks.all_reduce(gradients(parameters, ranks.size > 1))
        nll, entropy = (math.fsum(parts) for parts in zip(*ranks.all_gather(sums), strict=True))
        norm = clip_and_step(optimizer, parameters, self.max_grad_norm, nll)
        lr = optimizer.param_groups[0]["lr"]
        schedule.step()
        policy.checkpointing.synchronize_mode(ranks)
        tokens = batch.trained_tokens
        means = {"optim/loss": nll / tokens, "policy/entropy": entropy / tokens}
        return means | {"optim/grad_norm": norm, "optim/lr": lr}

    def _accumulate(self, micro_batches: list[Batch], trained_tokens: int) -> tuple[float, float]:
        """Accumulate this rank's gradient; returns its sums of negative log-likelihood and entropy, in nats."""
        sums = []
        for tokens, lengths, mask in micro_batches:
            logprobs, entropies, _ = self.policy.token_values(tokens, lengths, mask, temperature=1.0)
            nll = -logprobs.sum()
            self.manual_backward(nll / trained_tokens)
            sums.append(torch.stack([nll.detach(), entropies.detach().sum()]))
        nll_sum, entropy = torch.stack(sums).double().sum(0).tolist() if sums else (0.0, 0.0)
        return nll_sum, entropy

    def _micro_batches(self, conversations: list[Conversation]) -> list[Batch]:
        lengths = [len(conversation.token_ids) for conversation in conversations]
        partition = partition_micro_batches(lengths, self.micro_batch_tokens)
        return [padded([conversations[index] for index in rows], self.device) for rows in partition if rows]

    def on_fit_end(self) -> None:
        """Write RUN/adapter or RUN/model, and log where; a run by reinforcement learning has a summary."""
        super().on_fit_end()
        if writes_files(self.trainer) and self.policy_version:
            result = self.policy.trained.result
            log.info("%s %s", result, Path(self.trainer.default_root_dir) / result)

    # Validation ----------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Begin this validation's sums: of negative log-likelihood, tokens predicted right, and tokens."""
        self._sums = [0.0, 0.0, 0.0]

    def validation_step(self, batch: ConversationBatch, batch_idx: int) -> None:
        """Add this rank's share of the batch."""
        ranks = communicator_of(self.trainer)
        for tokens, lengths, mask in self._micro_batches(batch.share(ranks.rank, ranks.size)):
            logprobs, right = self.policy.token_predictions(tokens, lengths, mask)
            found = (-logprobs.double().sum().item(), right.sum().item(), float(len(right)))
            self._sums = [total + part for total, part in zip(self._sums, found, strict=True)]

    def on_validation_epoch_end(self) -> None:
        """Log the means over all ranks' trained tokens; those of a complete sanity check are from before training."""
        gathered = communicator_of(self.trainer).all_gather(self._sums)
        nll, right, tokens = (math.fsum(parts) for parts in zip(*gathered, strict=True))
        loss = nll / tokens
        metrics: dict[str, Any] = {
            "val/loss": loss,
            "val/perplexity": math.exp(min(loss, 700.0)),
            "val/mean_token_accuracy": right / tokens,
        }
        self.log_dict(metrics, batch_size=1)
        trainer = self.trainer
        if trainer.sanity_checking:  # of which Lightning's loggers get nothing
            for logger in trainer.loggers if trainer.num_sanity_val_batches == trainer.num_val_batches else ():
                logger.log_metrics(metrics, step=BEFORE_TRAINING)
        elif trainer.state.fn != TrainerFn.FITTING:  # the point of the run's curves with this policy
            self.log("step", float(self.policy_version + BEFORE_TRAINING), batch_size=1)

    def on_validation_end(self) -> None:
        """Refuse checkpoints and early stops by a metric that validations do not have, also in the sanity check."""
        check_monitors(self.trainer)


def _data(trainer: Trainer) -> ConversationDataModule:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, ConversationDataModule):
        raise UserError(
            f"supervised fine-tuning needs a ConversationDataModule; got {type(data).__name__}; pass one of "
            "qerl_pl.datamodules as data"
        )
    return data
