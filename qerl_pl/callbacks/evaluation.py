"""The end of an evaluation: every metric with its interval, every sample, and a table."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from tqdm import tqdm

from qerl_pl.callbacks.rollout import RolloutCallback, rollout_callback
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.distributed.communicator import writes_files
from qerl_pl.distributed.strategy import communicator_of
from qerl_pl.errors import require_at_least
from qerl_pl.evaluation.evaluator import FORMAT, SampleCache, SampleRecord
from qerl_pl.evaluation.metrics import evaluation_tag, interval, prompt_metrics
from qerl_pl.modules.qerl import BEFORE_TRAINING, QeRLModule
from qerl_pl.persistence.atomic_files import atomic_write
from qerl_pl.persistence.random_state import stream_seed
from qerl_pl.rewards import Reward
from qerl_pl.start_checks import ChecksFirst
from qerl_pl.types import EvaluatedPrompt, Evaluation, GradedAnswer, Prompt

FOLDER = "evaluation"
LABELS = {
    "accuracy": "greedy accuracy",
    "pass@1": "mean over samples (pass@1)",
    "length_mean": "mean length, tokens",
    "truncated_frac": "truncated",
    "unanswered_frac": "no answer found",
}
PACKAGES = ("qerl-pl", "torch", "transformers", "lightning", "math-verify")


class EvaluationReport(Callback, ChecksFirst):
    """Writes what `qerl test` and `qerl validate` measure, with intervals, and keeps every sample.

    RUN/evaluation.json has each metric of each set with 95 % of its bootstrap over prompts, RUN/evaluation.md the same
    as a table; loggers get the bounds beside each metric as `<metric>_low` and `<metric>_high`. Every sample, with its
    grade, is a line of RUN/evaluation/DIGEST.jsonl, where the digest is of all that a sample depends on: the weights,
    how it is sampled, asked and graded. Started again after a kill, an evaluation goes on after the last line there.

    Args:
        resamples: Times that prompts are drawn anew for an interval.
    """

    def __init__(self, resamples: int = 2000) -> None:
        require_at_least(1, {"EvaluationReport's resamples": resamples})
        self.resamples = resamples
        self._prompts: dict[str, list[EvaluatedPrompt]] = {}
        self._tells_answers = True
        self._settings: dict[str, Any] = {}
        self._samples: _Shown | None = None

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Refuse an evaluation that nothing samples for."""
        if stage in ("validate", "test"):
            rollout_callback(trainer, "EvaluationReport")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the file of samples."""
        self._begin(trainer, pl_module, trainer.test_dataloaders)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the file of samples, where this is no part of training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._begin(trainer, pl_module, trainer.val_dataloaders)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        """Gather what was answered."""
        self._gather(outputs["evaluation"])

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        """Gather what was answered, where this is no part of training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._gather(outputs["evaluation"])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report."""
        self._report("test", trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report, where this is no part of training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._report("val", trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the progress bar; no other evaluation, of a policy that has learned since, takes what was kept."""
        if self._samples is not None:
            assert isinstance(pl_module, QeRLModule) and pl_module.hand_over is not None
            pl_module.hand_over.samples = None
            self._samples.bar.close()
            self._samples = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same where something went wrong: Lightning tears no callback down then."""
        self.teardown(trainer, pl_module, "")

    def _begin(self, trainer: Trainer, module: LightningModule, loaders: Any) -> None:
        assert isinstance(module, QeRLModule) and isinstance(trainer.datamodule, PromptDataModule)  # type: ignore[attr-defined]
        self._prompts, self._tells_answers = {}, True
        rollout = rollout_callback(trainer, "EvaluationReport")
        self._settings = _settings(module, rollout, trainer.datamodule)  # type: ignore[attr-defined]
        digest = _digest(json.dumps(self._settings, sort_keys=True).encode())[:12]
        adapter = module.adapter_folder  # its weights are in the digest, wherever they lie
        self._settings["adapter"] = None if adapter is None else str(adapter)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        ranks, folder = communicator_of(trainer), Path(trainer.default_root_dir) / FOLDER
        files = [folder / f"{digest}{f'.{rank}' if rank else ''}.jsonl" for rank in range(ranks.size)]
        others = {*folder.glob(f"{digest}.*jsonl"), *files} - {files[ranks.rank]}
        prompts = sum(len(loader.dataset) for loader in (loaders if isinstance(loaders, list) else [loaders]))
        total = -(-prompts * (1 + rollout.config.eval_samples) // ranks.size)
        self._samples = _Shown(SampleCache(files[ranks.rank], sorted(others)), total, show=trainer.is_global_zero)
        ranks.wait()  # for no rank may write before all have read
        assert module.hand_over is not None
        module.hand_over.samples = self._samples
        self._settings["samples"] = str(files[0].relative_to(folder.parent))

    def _gather(self, evaluation: Evaluation) -> None:
        self._prompts.setdefault(evaluation.name, []).extend(evaluation.prompts)
        self._tells_answers = evaluation.tells_answers

    def _report(self, stage: str, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, QeRLModule) and module.hand_over is not None
        module.hand_over.samples = None
        if self._samples is not None:
            self._samples.bar.close()
        if not writes_files(trainer):
            return
        sets: dict[str, Any] = {}
        for name, prompts in self._prompts.items():
            metrics = {}
            for metric, values in prompt_metrics(prompts, self._tells_answers).items():
                low, high = interval(values, stream_seed(module.seed, "bootstrap", name, metric), self.resamples)
                metrics[metric] = {"value": values.mean().item(), "low": low, "high": high}
            sets[name or stage] = {"prompts": len(prompts), "samples": len(prompts[0].samples), "metrics": metrics}
            bounds = {
                f"{evaluation_tag(stage, name, metric)}_{end}": found[end]
                for metric, found in metrics.items()
                for end in ("low", "high")
            }
            for logger in trainer.loggers:
                logger.log_metrics(bounds, step=module.policy_version + BEFORE_TRAINING)
        folder = Path(trainer.default_root_dir)
        versions = {package: version(package) for package in PACKAGES}
        report = {"sets": sets, "resamples": self.resamples, **self._settings, "versions": versions}
        atomic_write(folder / "evaluation.json", (json.dumps(report, indent=2) + "\n").encode())
        text = table(report)
        atomic_write(folder / "evaluation.md", text.encode())
        print(
            f"\n{text}\n{folder / 'evaluation.json'} has all numbers, {folder / self._settings['samples']} all samples"
        )


class _Shown:
    """Kept samples, with a progress bar of them."""

    def __init__(self, kept: SampleCache, total: int, show: bool) -> None:
        self.kept = kept
        self.bar = tqdm(desc="evaluating", total=total, unit="completion", disable=None if show else True)

    def find(self, name: str, prompt: Prompt, sample: int | None) -> GradedAnswer | None:
        found = self.kept.find(name, prompt, sample)
        self.bar.update(found is not None)
        return found

    def keep(self, records: Sequence[SampleRecord]) -> None:
        self.kept.keep(records)
        self.bar.update(len(records))


def table(report: Mapping[str, Any]) -> str:
    """A report as Markdown: a column a set, a row a metric, each with its interval.

    Args:
        report: What evaluation.json holds.
    """
    sets = report["sets"]
    metrics = list(dict.fromkeys(name for one in sets.values() for name in one["metrics"]))
    rows = [["", *sets]]
    rows += [[label, *(str(one[label]) for one in sets.values())] for label in ("prompts", "samples")]
    for metric in metrics:
        found = [one["metrics"].get(metric) for one in sets.values()]
        digits = 1 if metric == "length_mean" else 3
        cells = [
            "" if one is None else "{value:.{d}f} [{low:.{d}f}, {high:.{d}f}]".format(**one, d=digits) for one in found
        ]
        rows.append([LABELS.get(metric, metric), *cells])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    adapter = report["adapter"]  # which does not tell after how many rollouts it was written
    learned = f"after {report['rollouts']} rollouts" if adapter is None else f"with the adapter in {adapter}"
    sampling = ", ".join(f"{name} {value}" for name, value in report["sampling"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"{report['model']}, {report['quantization']}, {report['dtype']}, {learned}; "
            f"sampled with {sampling}, seed {report['seed']}. In brackets 95 %, by bootstrap over prompts.",
            "",
        ]
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _settings(module: QeRLModule, rollout: RolloutCallback, data: PromptDataModule) -> dict[str, Any]:
    """All that a sample and its grade depend on, but for its question."""
    config, policy = rollout.config, module.policy_config
    state = hashlib.sha256()
    for name, tensor in sorted(module.policy.trained_state().items()):
        state.update(name.encode() + tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return {
        "format": FORMAT,
        "model": "toy policy" if policy.path is None else policy.path,
        "base": module.base_identity,
        "quantization": policy.quantization,
        "dtype": policy.dtype,
        "trained": state.hexdigest(),
        "rollouts": module.policy_version,
        "engine": type(rollout.engine).__name__,
        "seed": module.seed,
        "sampling": asdict(config.evaluation_sampling()),
        "rewards": [_reward(reward) for reward in config.rewards],
        "accuracy_reward": config.answers.name,
        "system_prompt": data.system_prompt,
        "chat_template": _digest(str(module.tokenizer.chat_template).encode()),
    }


def _reward(reward: Reward) -> dict[str, Any]:
    given = {name: value for name, value in vars(reward).items() if not name.startswith("_") and _is_plain(value)}
    return {"class": f"{type(reward).__module__}.{type(reward).__qualname__}", **given}


def _is_plain(value: Any) -> bool:
    """Whether JSON has it: a list of compiled patterns is a reward's own affair."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | bool | None)
