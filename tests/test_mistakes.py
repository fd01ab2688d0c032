"""A user's mistakes: one line that says what is wrong, exit status 2, no traceback."""

import hashlib
import operator
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from qerl_pl.cli.configs import check_config
from qerl_pl.cli.error_messages import explain
from qerl_pl.cli.main import main
from qerl_pl.errors import UserError

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


pytestmark = pytest.mark.usefixtures("process_state")


def complaint(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a mistake prints, after whatever was logged before it was found."""
    assert main(list(args)) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("qerl: ")]
    assert len(lines) == 1 and error.endswith(lines[0] + "\n") and "Traceback" not in error
    assert len(lines[0]) < 360
    return lines[0]


def of(name: str, **arguments: object) -> dict[str, Any]:
    return {"class_path": name, "init_args": arguments}


REWARDS = {"accuracy": of("GSM8KAnswer"), "format": of("Format", wieght=0.1)}
LINES: dict[str, tuple[str | dict[str, Any], str]] = {
    # Words of the command line (a key and its value), or a file -> the line.
    "key": ("--model.policy.lora.rnk 4", r"^qerl: there is no key model.policy.lora.rnk; .*rank\?; see qerl fit -"),
    "abbreviated key": ("--model.lr 1", r"there is no key model.lr; did you mean model.optimizer.lr\?"),
    "argument": ("--data.batchsize 4", r"^qerl: there is no key data.batchsize; did you mean data.batch_size\?"),
    "argument of an optimizer": ("--model.optimizer.wieght_decay 1", r"did you mean model.optimizer.weight_decay\?"),
    "argument in a file": ({"rollout": {"rewards": REWARDS}}, r"rewards.wieght; did you mean rollout.rewards.weight\?"),
    "argument of a listed callback": (
        {"trainer": {"callbacks": [of("RolloutCallback", rewards=[], eval_samples=4)]}},
        r"no key trainer.callbacks.eval_samples; did you mean trainer.callbacks.evaluation.samples\?",
    ),
    "class": ("--model.objective DAPOO", r"^qerl: model.objective does not take DAPOO; did you mean DAPO\?"),
    "class of a path": ("--model.objective qerl_pl.PPO", r"does not take qerl_pl.PPO \(.* no attribute 'PPO'\); "),
    "class of a file": ("--trainer.callbacks mine.py:Mine", "not take mine.py:Mine; name it by import path, mine.Mine"),
    "class of another kind": ("--model.objective pathlib.Path", "objective does not take .*; derive it from Objective"),
    "class without methods": (
        "--rollout.engine pathlib.Path",
        "take pathlib.Path; it is no RolloutEngine, whose methods it must have with the same arguments; see",
    ),
    "class of no module": (
        "--data nowhere.Data",
        r"data does not take nowhere.Data \(No module named 'nowhere'\); name a class, such as",
    ),
    "reward": ({"rollout": {"rewards": {"a": "qerl_pl.rewards.X"}}}, "reward is a class .*'qerl_pl.rewards.X'"),
    "null for a number": ({"model": {"warmup_ratio": None}}, "model.warmup_ratio does not take null; give a number"),
    "null for a group": ({"model": {"policy": {"lora": None}}}, "model.policy.lora is a mapping of .* no keys below"),
    "no path": ("--data TableDataModule", "^qerl: data.path needs a value; got none; set it; see qerl fit"),
    "off": ("--noise off", r"False; give a class \(AdaptiveQuantizationNoise or one derived from it\) or null; see"),
    "text for a list": ("--rollout.sampling.stop END", r"stop does not take END; give a list \[VALUE\]; see"),
    "text for a choice or a list": (
        "--model.policy.lora.targets q_proj",
        r"lora.targets does not take q_proj; give a list \[VALUE\], all-linear or null; see",
    ),
    "text for a choice": ("--model.policy.dtype half", "dtype does not take half; give float32 or bfloat16; see"),
    "name of no class": ("--model.optimizer adamw", "optimizer does not take adamw; give the import path of a class;"),
    "beginning of a class": ("--trainer.logger wandb", r"logger does not take wandb; did you mean WandbLogger\?"),
    "file for data": (
        "--data rows.csv",
        r"take rows.csv .*; name a class, such as TableDataModule, and its file",
    ),
    "reward without a name": ("--rollout.rewards mine.py:f", "take mine.py:f; give each by its name, rollout.rewards."),
    "file for a group": ("--rollout.environment game.py:Game", "rollout.environment.*game.py:Game.* see qerl fit"),
    "null for a group's option": (
        "--rollout.sampling null",
        "^qerl: rollout.sampling is a mapping of keys; got null; set --rollout.sampling.KEY for some, or leave",
    ),
    "value for a group": ({"trainer": 3}, "trainer is a mapping of keys; got 3; set its keys"),
    "choice": (
        "--model.policy.quantization int8",
        "quantization must be one of nvfp4, .*, none, .*; got 'int8'; choose",
    ),
    "rate": ("--model.optimizer.init_args.lr fast", "model.optimizer.lr does not take fast; give a number; see"),
    "number of a class": ("--model.objective.correction.cap x", "correction.cap does not take x; give a number"),
    "number in a file": (
        {"data": of("TableDataModule", path="x", sets={"easy": {"path": "y", "limit": "many"}})},
        "data.sets.limit does not take many; give an integer or null; see",
    ),
    "no YAML for a group": ("--rollout.sampling {a:[", r"rollout.sampling.*\{a:\["),
    "argument of an entry": (
        "--rollout.rewards.accuracy.weight x",
        "rewards.accuracy.weight does not take x; give a nu",
    ),
    "callback's own": (
        {"trainer": {"callbacks": [of("lightning.pytorch.callbacks.Timer", interval="x")]}},
        "interval.*x",
    ),
    # Values that no type excludes.
    "negative rate": ("--model.optimizer.init_args.lr -1", "model.optimizer .* says: Invalid learning rate: -1"),
    "lost defaults": (
        "--best null --best.monitor val/loss",
        "best.monitor val/loss and no best.filename after it; rem",
    ),
    "negative seed": ("--seed_everything -1", "a seed from 0 to 4294967295; got -1; set seed_everything"),
    # The trainer's.
    "no GPU": ("--trainer.accelerator gpu", "Trainer refuses a key: No .*gpu backend"),
    "accumulation": ("--trainer.accumulate_grad_batches 2", "accumulate_grad_batches 2; raise data.batch_size, or"),
    "clipping": ("--trainer.gradient_clip_val 1.0", "model.max_grad_norm clips .*gradient_clip_val 1.0; set that one"),
    "uneven": ("--trainer.devices 3", "multiple of the number of devices; got 16 for 3; change one"),
    "processes": ("--trainer.strategy ddp", "got DDPStrategy for 1; .* key trainer.strategy at auto"),
    "no place": (f"--trainer.default_root_dir {QUICKSTART}/run", r"/run cannot be locked \(Not a directory\)"),
    "odd minibatches": ("--model.minibatches 3", "minibatches must divide .* got 3 and 128"),
    "endless completions": ("--rollout.sampling.max_tokens 1000000000", "4096 positions; got 1000000096 "),
    "no end": ("--trainer.max_epochs -1", "need a planned end; the run has none; set trainer.max_epochs"),
    "data of another training": ("--data ArithmeticConversations", "rollouts need a PromptDataModule; got Arithm"),
    "nothing scores": ("--rollout.rewards {}", "rollout.rewards names none"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_mistake_is_one_line_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """No toy policy is taught for a run that is refused, and its folder stays as it was."""
    given, message = LINES[case]
    cache, run, file = tmp_path / "cache", tmp_path / "run", tmp_path / "mine.yaml"
    monkeypatch.setenv("QERL_CACHE", str(cache))
    if isinstance(given, dict):
        file.write_text(yaml.safe_dump(given))
    words = given.split() if isinstance(given, str) else ["-c", str(file)]
    place = ["--trainer.default_root_dir", str(run), "--trainer.accelerator", "cpu"]
    assert re.search(message, complaint(capsys, "fit", "-c", QUICKSTART, *place, *words))
    assert not cache.exists() and not run.exists()


@pytest.mark.parametrize(("evaluation", "limit"), [("validate", "limit_val_batches"), ("test", "limit_test_batches")])
def test_an_evaluation_of_no_prompts_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, evaluation: str, limit: str
) -> None:
    words = [
        "--trainer.accelerator",
        "cpu",
        "--trainer.default_root_dir",
        str(tmp_path / "run"),
        f"--trainer.{limit}",
        "0",
    ]
    line = complaint(capsys, evaluation, "-c", QUICKSTART, *words)
    assert line.endswith(f"qerl {evaluation} evaluates prompts; got trainer.{limit} 0; set it to 1.0")


def test_curves_of_an_earlier_command_stay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lightning_logs" / "version_7" / "metrics.csv"
    file.parent.mkdir(parents=True)
    file.write_text("step,reward/mean\n")
    words = ["--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(tmp_path), "--trainer.logger=CSVLogger"]
    words += ["--trainer.logger.save_dir", str(tmp_path), "--trainer.logger.version", "7"]
    line = complaint(capsys, "fit", "-c", QUICKSTART, *words)
    assert f"CSVLogger begins its file anew; {file} has the curves of an earlier command; leave its version" in line
    assert file.read_text() == "step,reward/mean\n"


FILES = {
    "": "a mapping of keys to values; .*mine.yaml is empty; write some",
    "- sft\n": "mine.yaml is none; write",
    "model:\n\tpolicy: {}": r"indented with spaces; .*character '\\t' that cannot start .* line 2, column 1: ",
    "model: {policy: {path: x}\ntrainer: {}": "expected ',' or '}', but got '<scalar>' .* line 2, column 1: ",
    "model:\ntrainer: {max_steps: 8}": "model is a mapping of keys; .*mine.yaml has no keys below it; set some",
    "fit: {model: 3}": "model is a mapping of keys; ",
    "trainer:": "trainer is a mapping of keys; .*mine.yaml has no keys below it; set some",
    "fit: {rollout: {sampling: null}}": "rollout.sampling is a mapping of keys; ",
    "# für": "is YAML in UTF-8, .*mine.yaml: 'utf-8' codec can't decode byte",
    "rollout: {group_size: 4}\nrollout: {sampling: {}}": "a key stands once .*, line 2 has rollout again; put ",
    "noise: &a\n  stages: 3\n  decay: *a": "must not contain its own alias; .*, line 1 has one that does; write",
    "trainer:\n  callbacks:\n  - class_path: A\n    class_path: B": "line 4 has class_path again",
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=FILES[text]) as refused:
        check_config(str(path))
    assert str(path) in str(refused.value)


def test_only_what_a_file_system_refuses_is_a_users_file() -> None:
    line = explain(PermissionError(13, "Permission denied", "model/config.json"), ["fit"])
    assert line is not None and "model/config.json: Permission denied" in line
    assert explain(FileNotFoundError(2, "No such file or directory", "model/config.json"), ["fit"]) is None
    assert explain(OSError(5, "Input/output error"), ["fit"]) is None


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.50 GiB of which 1.20 "
                "GiB is free. Including non-PyTorch memory, this process has 21.90 GiB memory in use. Of the ..."
            ),
            "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.50 GiB of which 1.20 GiB is free. Lower",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, ...)`"),
            "cuBLAS had none for its kernels. Lower",
        ),
    ],
)
def test_a_full_gpu_is_told_in_one_line(error: Exception, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**28, 2**36))
    line = explain(error, ["fit"])
    assert line and "GPU does not have" in line and found in line and line.endswith("--resume auto") and len(line) < 360
    assert explain(RuntimeError("CUDA error: an illegal memory access was encountered"), ["fit"]) is None


def test_a_product_that_fails_with_memory_left_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`")
    for answer in (lambda: (2**35, 2**36), dead):
        monkeypatch.setattr(torch.cuda, "mem_get_info", answer)
        assert explain(error, ["fit"]) is None


# A constructor, which the parser calls, and a function of the command line.
@pytest.mark.parametrize("broken", ["qerl_pl.rollout.scoring.check_rewards", "qerl_pl.cli.main.check_devices"])
def test_what_is_no_mistake_of_the_user_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    monkeypatch.setattr(broken, operator.methodcaller("a_bug"))  # a bug's frame is ours; that of a lambda were a user's
    with pytest.raises((AttributeError, ValueError), match="has no attribute 'a_bug'"):
        main(["fit", "-c", QUICKSTART, "--trainer.default_root_dir", str(tmp_path)])


def users_module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """Name of a module of a user's, where the command is run."""
    name = f"users_{hashlib.sha256(code.encode()).hexdigest()[:8]}"
    (folder / f"{name}.py").write_text(f"from qerl_pl.datamodules import PromptDataModule, Row\n{code}")
    monkeypatch.chdir(folder)
    return name


REWARD = "class Mine:\n    name = 'mine'\n    weight = 1.0\n    def __call__(self, samples):\n        return samples\n"
USERS: dict[str, tuple[str, str, type[Exception]]] = {
    "reward": (REWARD + "    def __init__(self):\n        {}['x']\n", "rewards", KeyError),
    "module": ("1 / 0\n" + REWARD, "rewards", ZeroDivisionError),
    "data": (
        "class Mine(PromptDataModule):\n    def __init__(self):\n        raise RuntimeError('no words')\n",
        "data",
        RuntimeError,
    ),
}


@pytest.mark.parametrize("case", USERS)
def test_an_error_in_a_users_class_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    code, where, kind = USERS[case]
    module = users_module(tmp_path, monkeypatch, code)
    settings = yaml.safe_load(Path(QUICKSTART).read_text())
    if where == "data":
        settings["data"] = {"class_path": f"{module}.Mine"}
    else:
        settings["rollout"]["rewards"] = {"mine": f"{module}.Mine"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(Exception) as raised:  # jsonargparse wraps what its parsing meets
        main(["fit", "-c", str(path), "--trainer.default_root_dir", str(tmp_path / "run")])
    cause: BaseException | None = raised.value
    while cause is not None and type(cause) is not kind or cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    assert type(cause) is kind
    assert f"{module}.py" in "".join(traceback.format_exception(raised.value))


def test_commands_of_our_own_report_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "config.json" in complaint(capsys, "quantize", str(tmp_path / "a"), str(tmp_path / "b"))
    for more in ([], [str(tmp_path / "adapter"), "-c", "nowhere"]):
        assert "see qerl export --help" in complaint(capsys, "export", str(tmp_path), *more)
    assert "got exprt; did you mean export? see" in complaint(capsys, "exprt", "a")


def test_a_run_folder_may_be_below_the_home_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "-c", QUICKSTART, "--trainer.default_root_dir", "~/runs/mine", "--model.policy.toy.steps", "1"]
    (tmp_path / "runs" / "mine" / ".lock").mkdir(parents=True)
    line = complaint(capsys, *arguments)
    assert f"{tmp_path}/runs/mine cannot be locked (Is a directory)" in line and not (tmp_path / "~").exists()
