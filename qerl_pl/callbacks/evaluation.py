"""The report of `qerl test` and `qerl validate`: metrics with confidence intervals, and every sample."""

import hashlib
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from tqdm import tqdm

from qerl_pl.callbacks.rollout import RolloutCallback, rollout_callback
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.engines import VLLMEngine
from qerl_pl.engines.base import RolloutEngine
from qerl_pl.evaluation.evaluator import CACHE_FORMAT, Evaluator, SampleCache, SampleRecord
from qerl_pl.evaluation.metrics import bootstrap_interval, evaluation_tag, prompt_metrics
from qerl_pl.modules.qerl import BEFORE_TRAINING, QeRLModule
from qerl_pl.rewards import Reward, RewardFunction
from qerl_pl.rollout.dialogue import EnvironmentConfig
from qerl_pl.runtime.checks import ChecksFirst
from qerl_pl.runtime.communicator import Communicator, writes_files
from qerl_pl.runtime.files import atomic_write
from qerl_pl.runtime.machine import installed_versions, machine_of
from qerl_pl.runtime.strategy import communicator_of
from qerl_pl.seeds import stream_seed
from qerl_pl.types import EvaluatedPrompt, GradedAnswer, Prompt, PromptBatch

log = logging.getLogger(__name__)

EVALUATION = "evaluation"
LABELS = {
    "accuracy": "greedy accuracy",
    "pass@1": "mean over samples (pass@1)",
    "reward_mean": "mean reward",
    "length_mean": "mean length, tokens",
    "truncated_frac": "truncated",
    "unanswered_frac": "no answer found",
}


class EvaluationReport(Callback, ChecksFirst):
    """Writes the metrics of `qerl test` and `qerl validate` with confidence intervals, and every sample.

    RUN/evaluation.json has each metric of each set with its 95 % interval (bootstrap over prompts), RUN/evaluation.md
    the same as a table; loggers get the bounds as `<metric>_low` and `<metric>_high`. Every graded sample is a line of
    RUN/evaluation/DIGEST.jsonl, where the digest covers the settings that a sample depends on: weights, sampling,
    prompt format and rewards, but not the code of rewards and environments. After a kill, the same command continues
    from these samples.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, list[EvaluatedPrompt]] = {}
        self._extracts_answers = True
        self._settings: dict[str, Any] = {}
        self._cache: _ProgressCache | None = None
        self._evaluator: Evaluator | None = None

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Refuse an evaluation without a RolloutCallback."""
        if stage in ("validate", "test"):
            rollout_callback(trainer, "EvaluationReport")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the sample cache."""
        self._start(trainer, pl_module, trainer.test_dataloaders)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the sample cache, except in training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._start(trainer, pl_module, trainer.val_dataloaders)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int, *_: int
    ) -> None:
        """Add the batch's answers."""
        evaluation = batch.evaluation
        assert evaluation is not None
        self._prompts.setdefault(evaluation.name, []).extend(evaluation.prompts)
        self._extracts_answers = evaluation.extracts_answers

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int, *_: int
    ) -> None:
        """Add the batch's answers, except in training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.on_test_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report."""
        self._report("test", trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report, except in training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._report("val", trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the progress bar, and detach the cache: a later evaluation may be of another policy."""
        if self._evaluator is not None:
            self._evaluator.use_cache(None)
            self._evaluator = None
        if self._cache is not None:
            self._cache.bar.close()
            self._cache = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close and detach after an exception, when Lightning calls no teardown."""
        self.teardown(trainer, pl_module, "")

    def _start(self, trainer: Trainer, module: LightningModule, loaders: Any) -> None:
        assert isinstance(module, QeRLModule) and isinstance(trainer.datamodule, PromptDataModule)  # type: ignore[attr-defined]
        self._prompts, self._extracts_answers = {}, True
        rollout = rollout_callback(trainer, "EvaluationReport")
        self._settings = _settings(module, rollout, trainer.datamodule)  # type: ignore[attr-defined]
        digest = _sha256(json.dumps(self._settings, sort_keys=True).encode())[:12]
        # Not in the digest, which has the adapter's weights.
        self._settings["adapter"] = None if module.policy_version else module.policy_config.adapter
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        ranks, folder = communicator_of(trainer), Path(trainer.default_root_dir) / EVALUATION
        prompts = sum(len(loader.dataset) for loader in (loaders if isinstance(loaders, list) else [loaders]))
        total = -(-prompts * (1 + rollout.eval_config.samples) // ranks.size)
        file, others = _sample_files(folder, digest, ranks)
        self._cache = _ProgressCache(file, others, total, show=trainer.is_global_zero)
        if len(self._cache):
            message = "%s has %d samples; those of unchanged rows are used again; after an edit of a reward, remove it"
            log.info(message, file, len(self._cache))
        ranks.barrier()  # no rank may write before all have read
        self._evaluator = rollout.evaluator
        self._evaluator.use_cache(self._cache)
        self._settings["samples"] = f"{EVALUATION}/{digest}.jsonl"

    def _report(self, stage: str, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, QeRLModule)
        self.teardown(trainer, module, stage)
        if not writes_files(trainer):
            return
        sets: dict[str, Any] = {}
        for name, prompts in self._prompts.items():
            metrics = {}
            for metric, values in prompt_metrics(prompts, self._extracts_answers).items():
                seed = stream_seed(module.seed, "bootstrap", name, metric)
                fractions = not metric.startswith(("length_mean", "reward_"))
                low, high = bootstrap_interval(values, seed, fractions=fractions)
                metrics[metric] = {"value": values.mean().item(), "low": low, "high": high}
            sets[name or stage] = {"prompts": len(prompts), "samples": len(prompts[0].samples), "metrics": metrics}
            bounds = {
                f"{evaluation_tag(stage, name, metric)}_{end}": result[end]
                for metric, result in metrics.items()
                for end in ("low", "high")
            }
            for logger in trainer.loggers:
                logger.log_metrics(bounds, step=module.policy_version + BEFORE_TRAINING)
        folder = Path(trainer.default_root_dir)
        machine = machine_of(trainer.strategy.root_device) | installed_versions(["math-verify"])
        report = {"sets": sets, **self._settings, "machine": machine}
        text, json_file = report_table(report), folder / "evaluation.json"
        atomic_write(json_file, (json.dumps(report, indent=2) + "\n").encode())
        atomic_write(folder / "evaluation.md", text.encode())
        print(f"\n{text}\n{json_file} has all numbers, {folder / self._settings['samples']} all samples")


class _ProgressCache(SampleCache):
    """A sample cache that updates a progress bar."""

    def __init__(self, path: Path, others: Sequence[Path], total: int, show: bool) -> None:
        super().__init__(path, others)
        self.bar = tqdm(desc="evaluating", total=total, unit="completion", disable=None if show else True)

    def get(self, name: str, prompt: Prompt, sample: int | None) -> GradedAnswer | None:
        answer = super().get(name, prompt, sample)
        self.bar.update(answer is not None)
        return answer

    def put(self, records: Sequence[SampleRecord]) -> None:
        super().put(records)
        self.bar.update(len(records))


def _sample_files(folder: Path, digest: str, ranks: Communicator) -> tuple[Path, list[Path]]:
    """The file of samples that this rank writes, and those that others have written."""
    files = [folder / f"{digest}{f'.{rank}' if rank else ''}.jsonl" for rank in range(ranks.size)]
    others = {*folder.glob(f"{digest}.*jsonl"), *files} - {files[ranks.rank]}
    return files[ranks.rank], sorted(others)


def report_table(report: Mapping[str, Any]) -> str:
    """The contents of evaluation.json as `metrics_table`, with the model and the sampling below it."""
    adapter = report["adapter"]  # an exported adapter does not record its rollouts
    learned = f"after {report['rollouts']} rollouts" if adapter is None else f"with the adapter in {adapter}"
    return "\n".join(
        [
            metrics_table(report),
            "",
            f"{report['model']}, {report['quantization']}, {report['dtype']}, {learned}; {sampling_line(report)}",
            "",
        ]
    )


def sampling_line(report: Mapping[str, Any]) -> str:
    """A line with the sampling parameters of evaluation.json, for below `metrics_table`."""
    text = ", ".join(f"{name} {value}" for name, value in report["sampling"].items())
    return f"sampled with {text}, seed {report['seed']}. In brackets 95 %, by bootstrap over prompts."


def metrics_table(report: Mapping[str, Any]) -> str:
    """The metrics of evaluation.json as a Markdown table: a column for each set, a row for each metric."""
    sets = report["sets"]
    metrics = list(dict.fromkeys(name for results in sets.values() for name in results["metrics"]))
    rows = [["", *sets]]
    rows += [[label, *(str(results[label]) for results in sets.values())] for label in ("prompts", "samples")]
    for metric in metrics:
        row, digits = [LABELS.get(metric, metric)], 1 if metric.endswith("length_mean") else 3
        for results in sets.values():
            result = results["metrics"].get(metric)
            row.append("" if result is None else "{value:.{d}f} [{low:.{d}f}, {high:.{d}f}]".format(**result, d=digits))
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def weights_digest(trained: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and values of the trained weights, which identifies them in a report."""
    digest = hashlib.sha256()
    for name, tensor in sorted(trained.items()):
        digest.update(name.encode() + tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _settings(module: QeRLModule, rollout: RolloutCallback, data: PromptDataModule) -> dict[str, Any]:
    """All settings that samples and their grades depend on."""
    config, policy = rollout.eval_config, module.policy_config
    return {
        "format": CACHE_FORMAT,
        "model": "toy policy" if policy.path is None else policy.path,
        "base": module.base_identity,
        "quantization": policy.quantization,
        "dtype": policy.dtype,
        "trained": weights_digest(module.policy.trained_state()),
        "rollouts": module.policy_version,
        **engine_settings(rollout.engine),
        "seed": module.seed,
        "sampling": asdict(config.sampling),
        "rewards": [_reward_settings(reward) for reward in config.scorer.rewards],
        "accuracy_reward": config.scorer.accuracy.name,
        "system_prompt": data.system_prompt,
        "instruction": data.instruction,
        "chat_template": _sha256(str(module.tokenizer.chat_template).encode()),
        "chat_template_kwargs": data.chat_template_kwargs,
        **environment_settings(rollout.environment, data.max_prompt_tokens),
    }


def engine_settings(engine: RolloutEngine) -> dict[str, str]:
    """The engine, and how it rounds keys and values, which changes samples by more than other kernels do."""
    rounded = {"kv_cache_dtype": engine.kv_cache_dtype} if isinstance(engine, VLLMEngine) else {}
    return {"engine": type(engine).__name__, **rounded}


def environment_settings(config: EnvironmentConfig, max_prompt_tokens: int) -> dict[str, Any]:
    """Settings of the environment that samples depend on; empty without an environment."""
    if config.factory is None:
        return {}
    settings = {name: value for name, value in vars(config).items() if name not in ("weight", "workers", "tool_wait")}
    return {"environment": _plain(settings | {"max_prompt_tokens": max_prompt_tokens})}


def _reward_settings(reward: Reward) -> dict[str, Any]:
    """Class and public settings of a reward, and a digest of the file with a user's code."""
    settings = {name: value for name, value in vars(reward).items() if not name.startswith("_")}
    code: Any = type(reward)
    if isinstance(reward, RewardFunction):  # the others are the data's columns, and what was logged
        settings = {name: settings[name] for name in ("function", "weight", "name")}
        code = _code(reward.function)
    plain = _plain({"class": type(reward), **settings})
    if not str(code.__module__).startswith("qerl_pl.") and (file := _source_file(code)) is not None:
        plain["source"] = _sha256(file.read_bytes())
    return plain


def _source_file(code: Any) -> Path | None:
    """The file that defines a function or class; None for one of C or of a notebook."""
    try:
        file = Path(inspect.getsourcefile(code) or "")
    except (OSError, TypeError):  # OSError of a notebook's class
        return None
    return file if file.is_file() else None


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them, with the names of functions and classes, and of other objects' classes."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, skipkeys=True, default=_qualified_name))
    return plain


def _qualified_name(value: Any) -> str:
    code = _code(value)
    return f"{code.__module__}.{code.__qualname__}"


def _code(value: Any) -> Any:
    """The function or class of an object that may be called."""
    code = value.func if isinstance(value, partial) else value
    return code if inspect.isclass(code) or inspect.isroutine(code) else type(code)
