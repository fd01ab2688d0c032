"""`qerl test` over named sets: the report, its samples, and going on after a kill."""

import hashlib
import importlib.util
import json
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fit_helpers import configuration
from lightning.pytorch import Trainer
from scripted import Scripted, evaluator_of
from short_run import data, module_of, trainer_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qerl_pl.callbacks import EnvironmentConfig, EvaluationReport, evaluation
from qerl_pl.callbacks.evaluation import (
    _ProgressCache,
    _reward_settings,
    _sample_files,
    _settings,
    engine_settings,
    weights_digest,
)
from qerl_pl.cli.main import QeRLCLI, main
from qerl_pl.engines import TransformersEngine, VLLMEngine
from qerl_pl.errors import UserError
from qerl_pl.modules import QeRLModule
from qerl_pl.rewards import GSM8KAnswer, MathAnswer, RewardFunction, RewardSample, as_rewards
from qerl_pl.types import Completion, RolloutRequest, SamplingConfig

CONFIG = Path(__file__).parents[1] / "configs" / "evaluate.yaml"


pytestmark = pytest.mark.usefixtures("process_state")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two sets of sums, as --data.sets takes them."""
    folder = tmp_path_factory.mktemp("sets")
    for name, count in (("easy", 3), ("hard", 2)):
        lines = [json.dumps({"question": f"{name} {n} + {n} =", "answer": f"#### {2 * n}"}) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return json.dumps({name: {"path": str(folder / f"{name}.jsonl")} for name in ("easy", "hard")})


def run_on_cpu(policy: Path, run: Path, sets: str, *more: str, command: str = "test") -> int:
    """Run the shipped configuration; its exit status."""
    rollout = "--rollout"
    options = {
        "--model.policy.path": policy,
        "--model.policy.dtype": "float32",
        "--data.sets": sets,
        "--trainer.default_root_dir": run,
        "--trainer.accelerator": "cpu",
        f"{rollout}.engine": "qerl_pl.engines.TransformersEngine",
        f"{rollout}.evaluation.samples": 2,
        f"{rollout}.evaluation.sampling.max_tokens": 6,
        f"{rollout}.evaluation.batch": 4,
    }
    return main([command, "-c", str(CONFIG), *(str(word) for pair in options.items() for word in pair), *more])


def evaluate(policy: Path, run: Path, sets: str, *more: str, command: str = "test") -> dict[str, Any]:
    """The same where nothing goes wrong; evaluation.json."""
    assert run_on_cpu(policy, run, sets, *more, command=command) == 0
    return json.loads((run / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def whole(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory, sets: str) -> tuple[Path, dict[str, Any]]:
    """Folder and report of an evaluation."""
    run = tmp_path_factory.mktemp("evaluation") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["qerl"])
        return run, evaluate(tiny_policy_dir, run, sets)


def lines(run: Path) -> list[dict[str, Any]]:
    (file,) = (run / "evaluation").glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_report_has_every_metric_of_every_set(whole: tuple[Path, dict[str, Any]]) -> None:
    run, report = whole
    metrics = {"accuracy", "pass@1", "pass@2", "maj@2", "reward_mean"}
    metrics |= {"length_mean", "truncated_frac", "unanswered_frac"}
    counts = {name: (one["prompts"], one["samples"]) for name, one in report["sets"].items()}
    assert counts == {"easy": (3, 2), "hard": (2, 2)}
    assert report["machine"]["processor"] == f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    assert report["machine"]["math-verify"] == version("math-verify")
    samples = lines(run)
    assert {(one["set"], one["prompt_id"], one["sample"]) for one in samples} == {
        (name, f"{name}-{row}", sample) for name, count in (("easy", 3), ("hard", 2)) for row in range(count)
        for sample in (None, 0, 1)
    }  # fmt: skip
    (log,) = run.glob("events.*")
    scalars = EventAccumulator(str(log)).Reload()
    for name, one in report["sets"].items():
        assert one["metrics"].keys() == metrics
        mine = [line for line in samples if line["set"] == name and line["sample"] is not None]
        assert one["metrics"]["length_mean"]["value"] == sum(line["tokens"] for line in mine) / len(mine)
        assert one["metrics"]["reward_mean"]["value"] == sum(line["rewards"]["total"] for line in mine) / len(mine)
        for metric, found in one["metrics"].items():
            assert found["low"] <= found["value"] <= found["high"]
            for end, value in (("", "value"), ("_low", "low"), ("_high", "high")):
                (event,) = scalars.Scalars(f"test/{name}/{metric}{end}")
                assert (event.step, event.value) == (-1, pytest.approx(found[value]))
    text = (run / "evaluation.md").read_text()
    assert text.startswith("|  | easy | hard |\n|---|---|---|\n| prompts | 3 | 2 |")
    assert f"| mean length, tokens | {report['sets']['easy']['metrics']['length_mean']['value']:.1f} [" in text


def test_a_rewards_settings_are_in_the_digest_of_its_samples() -> None:
    class Mine:
        name, weight = "mine", 1.0

        def __init__(self, **settings: Any) -> None:
            vars(self).update(settings)

    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    mine = {"class": f"{__name__}.{Mine.__qualname__}", "source": source}
    for settings, found in (
        ({"words": {"a": 1}, "signs": ["+", None]}, {"words": {"a": 1}, "signs": ["+", None]}),
        ({"_state": 3}, {}),
        ({"pattern": re.compile("x")}, {"pattern": "re.Pattern"}),
        ({"patterns": [re.compile("x")]}, {"patterns": ["re.Pattern"]}),
        ({"by": {1: 2, (3,): 4}}, {"by": {"1": 2}}),
        ({"function": len, "kind": Path}, {"function": "builtins.len", "kind": f"{Path.__module__}.Path"}),
    ):
        assert _reward_settings(Mine(**settings)) == mine | found
    limits = ((3, 12), (4, 12), (3, 13))
    found = [_reward_settings(MathAnswer(time_limit_s=one, batch_limit_s=all_together)) for one, all_together in limits]
    assert len({json.dumps(settings) for settings in found}) == 3


def test_samples_of_another_rounding_of_keys_and_values_are_not_reused() -> None:
    rounded = engine_settings(VLLMEngine(kv_cache_dtype="fp8"))
    assert rounded == {"engine": "VLLMEngine", "kv_cache_dtype": "fp8"}
    assert engine_settings(VLLMEngine(kv_cache_gib=2.0)) == rounded | {"kv_cache_dtype": "auto"}
    assert engine_settings(TransformersEngine()) == {"engine": "TransformersEngine"}


def test_samples_graded_by_another_function_are_not_reused(tmp_path: Path) -> None:
    file = tmp_path / "grading.py"
    file.write_text("".join(f"def {name}(completions):\n    return [1.0]\n" for name in ("exact", "loose")))
    (exact,), (loose,) = (as_rewards({"accuracy": f"{file}:{name}"}) for name in ("exact", "loose"))
    found = [_reward_settings(reward)["function"] for reward in (exact, loose)]
    assert found == ["qerl_reward_grading.exact", "qerl_reward_grading.loose"]
    bound = RewardFunction(partial(len, ()), name="bound")
    settings = _reward_settings(bound)
    assert settings["function"] == "builtins.len"
    bound.data_columns, bound.logged_columns = ("level",), {"text": ["long"]}  # of another set, and of the last call
    assert _reward_settings(bound) == settings


def test_a_failed_evaluation_detaches_its_cache(tmp_path: Path) -> None:
    report, module, trainer = EvaluationReport(), QeRLModule(), Trainer(logger=False, accelerator="cpu")
    report.on_exception(trainer, module, ValueError("before it began"))
    cache = report._cache = _ProgressCache(tmp_path / "samples.jsonl", [], total=3, show=True)
    evaluator = report._evaluator = evaluator_of(Scripted())
    evaluator.use_cache(cache)
    report.on_exception(trainer, module, ValueError("in the middle"))
    assert evaluator._cache is None and report._cache is None and cache.bar.disable  # closed


def test_a_killed_evaluation_goes_on(
    whole: tuple[Path, dict[str, Any]],
    tiny_policy_dir: Path,
    tmp_path: Path,
    sets: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, uninterrupted = whole
    asked: list[int] = []
    generate = TransformersEngine.generate

    def dying(
        self: TransformersEngine, requests: Sequence[RolloutRequest], sampling: SamplingConfig
    ) -> list[list[Completion]]:
        asked.append(sum(len(request.seeds) for request in requests))
        if len(asked) == 3:
            raise RuntimeError("killed")
        return generate(self, requests, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", dying)
    with pytest.raises(RuntimeError, match="killed"):
        run_on_cpu(tiny_policy_dir, tmp_path / "again", sets)
    assert len(lines(tmp_path / "again")) == 7 and not (tmp_path / "again" / "evaluation.json").exists()
    asked[:] = [0, 0, 0]
    caplog.set_level("INFO", "qerl_pl.callbacks.evaluation")
    assert evaluate(tiny_policy_dir, tmp_path / "again", sets) == uninterrupted
    assert f"{tmp_path / 'again' / uninterrupted['samples']} has 7 samples; those of unchanged" in caplog.text
    assert asked[3:] == [2, 2, 4]  # of 15, seven were there
    by_name = [sorted(map(str, lines(run))) for run in (folder, tmp_path / "again")]
    assert by_name[0] == by_name[1]
    other = evaluate(tiny_policy_dir, tmp_path / "again", sets, "--seed_everything", "5")
    assert other["samples"] != uninterrupted["samples"] and sum(asked[6:]) == 15  # other streams, other samples
    thinking = evaluate(tiny_policy_dir, tmp_path / "again", sets, "--data.chat_template_kwargs", "{thinks: true}")
    assert thinking["samples"] not in (uninterrupted["samples"], other["samples"]) and sum(asked[6:]) == 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_evaluation_at_once(
    tiny_policy_dir: Path,
    tmp_path: Path,
    sets: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    """In the middle of a batch, which may be all there is."""
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    grade = GSM8KAnswer._value

    def asked(self: GSM8KAnswer, sample: RewardSample) -> float:
        if sample.prompt.startswith("hard 1"):
            signal.raise_signal(number)
        return grade(self, sample)

    monkeypatch.setattr(GSM8KAnswer, "_value", asked)
    rewards = ["--rollout.rewards", "[{class_path: qerl_pl.rewards.GSM8KAnswer}]"]
    assert run_on_cpu(tiny_policy_dir, tmp_path, sets, *rewards) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == f"qerl: stopped by {number.name}; give the same command again"
    assert {line["set"] for line in lines(tmp_path)} == {"easy"} and not (tmp_path / "evaluation.json").exists()
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_an_exported_adapter_is_evaluated_as_its_checkpoint_is(
    tiny_policy_dir: Path, tmp_path: Path, sets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = configuration(tiny_policy_dir, tmp_path / "run", summary=False)
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": 2}
    settings["model"]["policy"]["quantization"] = "none"
    QeRLCLI({"subcommand": "fit", "fit": settings})
    plain = ["--model.policy.quantization", "none"]
    lora = ["--model.policy.lora.rank", "4", "--model.policy.lora.alpha", "8", "--model.policy.train_norms", "true"]
    checkpoint = str(next((tmp_path / "run" / "checkpoints").glob("*.ckpt")))
    resumed = evaluate(tiny_policy_dir, tmp_path / "1", sets, *plain, *lora, "--resume", checkpoint)
    # How the base was held is the adapter's to say.
    adapter = evaluate(tmp_path / "run" / "adapter", tmp_path / "2", sets, "--model.policy.quantization", "nvfp4")
    assert (adapter["trained"], adapter["sets"]) == (resumed["trained"], resumed["sets"])
    assert adapter["quantization"] == "none"
    assert adapter["adapter"] == str(tmp_path / "run" / "adapter") and resumed["adapter"] is None
    told = [(tmp_path / run / "evaluation.md").read_text().splitlines()[-1] for run in ("1", "2")]
    assert "after 2 rollouts" in told[0] and f"with the adapter in {tmp_path / 'run' / 'adapter'};" in told[1]
    base = evaluate(tiny_policy_dir, tmp_path / "3", sets, *plain, command="validate")
    assert base["trained"] != adapter["trained"] and base["rollouts"] == 0
    capsys.readouterr()
    for words, found in ((["fit"], "with qerl fit"), (["test", "--resume", checkpoint], "with --resume")):
        given = ["--model.policy.path", str(tmp_path / "run" / "adapter"), "--trainer.default_root_dir", str(tmp_path)]
        assert main([words[0], "-c", str(CONFIG), *given, *words[1:]]) == 2
        assert found in capsys.readouterr().err
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "run" / "adapter", broken)
    (broken / "adapter_model.safetensors").unlink()
    assert main(["test", "-c", str(CONFIG), "--model.policy.path", str(broken)]) == 2
    assert "an adapter in PEFT's format has adapter_model.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_report_without_a_rollout_callback_is_refused(tiny_policy_dir: Path, tmp_path: Path, stage: str) -> None:
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, callbacks=EvaluationReport())
    message = "EvaluationReport needs .*; trainer.callbacks has none; add qerl_pl.callbacks.Rollout"
    with pytest.raises(UserError, match=message):
        getattr(trainer, stage)(module_of(tiny_policy_dir), datamodule=data(), verbose=False)


def test_the_digest_of_weights_is_of_names_and_values() -> None:
    states = [{"a": torch.zeros(3)}, {"b": torch.zeros(3)}, {"a": torch.tensor([0.0, 0.0, 1e-8])}]
    assert len({weights_digest(state) for state in states}) == 3


def test_an_evaluation_reports_its_own_prompts_alone(tiny_policy_dir: Path, tmp_path: Path) -> None:
    trainer, module = trainer_of(tmp_path, EvaluationReport()), module_of(tiny_policy_dir)
    for _ in range(2):
        trainer.test(module, datamodule=data(), verbose=False)
        (test_set,) = json.loads((tmp_path / "evaluation.json").read_text())["sets"].values()
        assert test_set["prompts"] == 2


def test_a_rank_reads_what_all_ranks_have_written(tmp_path: Path) -> None:
    for name in ("abc.jsonl", "abc.1.jsonl", "abc.3.jsonl", "other.1.jsonl"):  # of four ranks
        (tmp_path / name).touch()
    ranks: Any = SimpleNamespace(rank=1, size=2)
    own, others = _sample_files(tmp_path, "abc", ranks)
    assert own == tmp_path / "abc.1.jsonl" and others == [tmp_path / "abc.3.jsonl", tmp_path / "abc.jsonl"]


def test_only_fractions_have_the_interval_of_fractions(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {name: torch.ones(4, dtype=torch.float64) for name in ("accuracy", "length_mean", "reward_mean")}
    monkeypatch.setattr(evaluation, "prompt_metrics", lambda *_: values)
    trainer_of(tmp_path, EvaluationReport()).test(module_of(tiny_policy_dir), datamodule=data(), verbose=False)
    (test_set,) = json.loads((tmp_path / "evaluation.json").read_text())["sets"].values()
    assert {name: one["low"] < 1 for name, one in test_set["metrics"].items()} == {
        "accuracy": True, "length_mean": False, "reward_mean": False
    }  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("data", "system_prompt", "Think."),
        ("data", "instruction", "Sum it."),
        ("data", "chat_template_kwargs", {"thinks": True}),
        ("tokenizer", "chat_template", "other"),
        ("module", "base_identity", "other"),
        ("module", "seed", 6),
        ("policy", "dtype", "bfloat16"),
        ("policy", "quantization", "nf4"),
        ("accuracy", "name", "other"),
        ("rollout", "engine", VLLMEngine(kv_cache_dtype="fp8")),
    ],
)
def test_samples_of_other_settings_are_not_reused(owner: str, name: str, value: Any) -> None:
    tokenizer = SimpleNamespace(chat_template="one")
    policy = SimpleNamespace(path="base", quantization="none", dtype="float32")
    trained = SimpleNamespace(trained_state=dict)
    accuracy = SimpleNamespace(name="math")
    scorer = SimpleNamespace(rewards=[], accuracy=accuracy)
    parts: dict[str, Any] = {
        "accuracy": accuracy,
        "tokenizer": tokenizer,
        "policy": policy,
        "module": SimpleNamespace(
            policy_config=policy, base_identity="base", policy_version=2, seed=5, policy=trained, tokenizer=tokenizer
        ),
        "rollout": SimpleNamespace(
            eval_config=SimpleNamespace(sampling=SamplingConfig(max_tokens=6), scorer=scorer),
            engine=TransformersEngine(),
            environment=EnvironmentConfig(),
        ),
        "data": SimpleNamespace(system_prompt=None, instruction=None, chat_template_kwargs={}, max_prompt_tokens=64),
    }
    before = _settings(parts["module"], parts["rollout"], parts["data"])
    setattr(parts[owner], name, value)
    assert "format" in before  # of the cache itself
    assert _settings(parts["module"], parts["rollout"], parts["data"]) != before


@pytest.mark.parametrize("kind", ["exact", "Exact"])
def test_samples_are_graded_again_by_a_reward_whose_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = tmp_path / f"grader_{kind}.py"
    text = "def exact(completions, **columns): ...\n\n\nclass Exact:\n    name, weight = 'exact', 1.0\n"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    grader = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, grader)
    spec.loader.exec_module(grader)
    reward = RewardFunction(grader.exact) if kind == "exact" else grader.Exact()
    before = _reward_settings(reward)
    assert _reward_settings(reward) == before
    file.write_text(f"{text}# other grades")
    assert _reward_settings(reward) != before
    assert "source" not in _reward_settings(GSM8KAnswer())
    shell: dict[str, Any] = {"__name__": "__main__"}
    exec(text, shell)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # as in a notebook, without a file
    assert "source" not in _reward_settings(RewardFunction(shell["exact"]))
    assert "source" not in _reward_settings(shell["Exact"]())
