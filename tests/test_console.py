"""What `qerl` answers without PyTorch, where its output goes, and its lines about wrong words and files."""

import json
import os
import subprocess
import sys
from argparse import ArgumentError
from pathlib import Path

import pytest

from qerl_pl.cli.commands import COMMAND_HELP, answered, give_flags_values
from qerl_pl.cli.configs import check_config
from qerl_pl.cli.error_messages import explain
from qerl_pl.cli.export import export
from qerl_pl.cli.main import COMMANDS, QeRLCLI, main
from qerl_pl.errors import UserError
from qerl_pl.runtime.checkpoint_io import verify
from qerl_pl.runtime.import_path import load_named

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("process_state")


# Without PyTorch ------------------------------------------------------------------------------------------------------

ANSWERS = {
    "configs": (0, "quickstart "),
    "configs dapo copy.yaml": (0, "wrote copy.yaml"),
    "configs --help": (0, "usage: qerl configs [-h] [name] [dst]"),
    "--help": (0, "    validate     Evaluate"),
    "-h": (0, "    export       Write"),
    "--version": (0, "qerl "),
    "-V": (0, "qerl "),
    "": (2, "got none; see qerl --help"),
    "-c sft": (2, "got none; see qerl --help"),
    "ft -c sft": (2, "got ft; did you mean fit? see"),
    "train -c sft": (2, "got train; did you mean fit? see"),
    "version": (2, "got version; did you mean --version? see"),
    "--versoin": (2, "got --versoin; did you mean --version? see"),
    "fit -c quickstrt": (2, "got quickstrt, which is neither; did you mean quickstart? `qerl configs`"),
    "test --noise null --config eval": (2, "got eval, which is neither"),
    "fit quickstart": (2, "qerl fit takes options; got quickstart; write -c quickstart, if it is"),
    "configs dapo copy.yaml more": (2, "unrecognized arguments: more; see qerl configs --help"),
    "configs --all": (2, "unrecognized arguments: --all; see qerl configs --help"),
}
PROGRAM = """
import contextlib, gc, io, json, sys
from qerl_pl.__main__ import main
found = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["qerl", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        sys.stdout.fileno = sys.__stdout__.fileno
        try:
            status = main()
        except SystemExit as end:
            status = end.code
    found[words] = status, out.getvalue() + error.getvalue()
answering = list(sys.modules)
sys.argv = ["qerl", "fit", "-c", "quickstart", "--print_config"]
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    sys.stdout.fileno = sys.__stdout__.fileno
    main()
assert "group_size" in out.getvalue() and gc.isenabled() and gc.get_freeze_count()
print(json.dumps({"found": found, "answering": answering, "parsing": list(sys.modules)}))
"""
NOT_IMPORTED = {
    "answering": ("torch", "lightning", "transformers", "numpy", "datasets", "peft", "vllm"),
    "parsing": (
        *("peft", "bitsandbytes", "networkx", "transformers.trainer_utils", "torch._inductor.compile_fx"),
        *("datasets", "pandas", "pyarrow", "scipy", "sklearn", "math_verify", "latex2sympy2_extended"),
        *("vllm", "llmcompressor", "wandb", "fla", "flash_attn", "tensorflow", "qerl_kernels.triton_launch"),
    ),
}
"""Modules that are imported when something uses them: not by an answer, and not by reading a configuration."""


def test_what_is_answered_imports_no_pytorch_and_a_configuration_only_what_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(ANSWERS))]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    printed = json.loads(done.stdout)
    for stage, modules in NOT_IMPORTED.items():
        assert sorted({*modules} & {*printed[stage]}) == [], stage
    found = printed["found"]
    for words, (status, text) in ANSWERS.items():
        assert found[words][0] == status and text in found[words][1], (words, found[words])
        assert status == 0 or found[words][1].startswith("qerl: ") and found[words][1].count("\n") == 1


def test_every_command_has_its_line_of_help() -> None:
    assert COMMAND_HELP.keys() == {"compare", "completions", "configs", *COMMANDS, *QeRLCLI.subcommands()}


@pytest.mark.parametrize("words", ["fit", "-c gsm8k fit", "validate -c gsm8k", "export a b", "quantize --help"])
def test_what_needs_pytorch_is_left_to_the_command_line(words: str) -> None:
    assert answered(words.split()) is None


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["configs", "--help", "--version", "configs --help"])
def test_a_reader_that_has_gone_ends_the_program_without_a_word(words: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-m", "qerl_pl", *words.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


FLAGS = {
    "": "",
    "run dst --merge": "run dst --merge=true",
    "--merge run dst": "--merge=true run dst",
    "run dst --merge --checkpoint x.ckpt": "run dst --merge=true --checkpoint x.ckpt",
    "run dst --merge true": "run dst --merge true",
    "run dst --merge=false": "run dst --merge=false",
    "run dst --checkpoint x.ckpt": "run dst --checkpoint x.ckpt",
}


@pytest.mark.parametrize("words", FLAGS)
def test_a_switch_needs_no_value(words: str) -> None:
    assert " ".join(give_flags_values(export, words.split())) == FLAGS[words]


# Lines ----------------------------------------------------------------------------------------------------------------

NEAREST = {
    "model.lr": "model.optimizer.lr",
    "lr": "model.optimizer.lr",
    "model.lora.rank": "model.policy.lora.rank",
    "rollout.max_turns": "rollout.environment.max_turns",
    "max_steps": "trainer.max_steps",
    "batch_size": "data.batch_size",
    "model.optimiser.lr": "model.optimizer.lr",
    "num_generations": None,
    "rollout.sampling.temprature": "rollout.sampling.temperature",
    "sampling.max_tokens": "rollout.sampling.max_tokens",
    "dry_run": "dry-run",
    "resum": "resume",
    "version": None,
    "model.zzz": None,
}


@pytest.mark.parametrize("key", NEAREST)
def test_an_unknown_key_is_answered_with_the_nearest(key: str) -> None:
    line = explain(ArgumentError(None, f"unrecognized arguments: --{key} 1"), ["fit"])
    meant = f" did you mean {NEAREST[key]}?;" if NEAREST[key] else ""
    assert line == f"there is no key {key};{meant} see qerl fit --help"


CLASSES = {
    "model: {objective: {class_path: GRPO, beta: 0.1}}": "line 1 has beta beside",
    "model:\n  optimizer:\n    class_path: torch.optim.AdamW\n    lr: 0.1": "line 4 has lr beside",
    "rollout: {rewards: {format: {class_path: Format, weight: 0.3}}}": "has weight beside",
    "trainer: {callbacks: [{class_path: CompletionLog, jsonl: true}]}": "has jsonl beside",
}


@pytest.mark.parametrize("text", CLASSES)
def test_arguments_beside_the_name_of_a_class_are_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="stand under init_args; .*mine.yaml, line ") as refused:
        check_config(str(path))
    assert CLASSES[text] in str(refused.value)
    path.write_text("{a: {class_path: A, init_args: {class_path: B}, dict_kwargs: {c: 1}}, b: {init_args: {d: 1}}}")
    assert check_config(str(path)) is None
    path.write_text("model: {class_path: SFTModule, policy: {path: x}}")
    assert check_config(str(path)) == "SFTModule"


CODE = {
    "no colon": b"def reward(completions)\n    return [1.0]\n",
    "not UTF-8": b"def reward(c):\n    return 'f\xfcr'\n",
    "null bytes": b"def reward(c):\n    return '\0'\n",
}


@pytest.mark.parametrize("case", CODE)
def test_a_file_of_python_that_does_not_parse_is_named(tmp_path: Path, case: str) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(CODE[case])
    with pytest.raises(UserError, match=r"mine.py:reward' cannot be imported \(.*\); correct the name or the file"):
        load_named(f"{path}:reward", "rule", "remedy", "reward")
    wrapped = ArgumentError(None, 'Parser key "data":\n  Given value: mine.Data')
    wrapped.__cause__ = SyntaxError("expected ':'", ("mine.py", 1, 4, "class Data"))
    line = explain(wrapped, ["fit"])
    found = "data does not take mine.Data (expected ':' (mine.py, line 1))"
    assert line == f"{found}; correct the name or the file; see qerl fit --help"


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_configuration_without_training_rows_is_to_evaluate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = refusal(
        capsys, *("fit", "-c", "evaluate", "--trainer.default_root_dir", str(tmp_path / "run"), "--rollout.engine"),
        *("TransformersEngine", "--trainer.accelerator", "cpu"),
    )  # fmt: skip
    assert "returns in train_rows; PromptDataModule has no such method; define it, set data to a module that" in line


# Folders --------------------------------------------------------------------------------------------------------------


def test_a_path_to_resume_from_is_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "best", tmp_path / "checkpoints" / "step=32.ckpt"):
        with pytest.raises(UserError, match=f"{path} is not a file; name one, .* or give --resume auto"):
            verify(path)


@pytest.mark.parametrize("made", ["", "runs/mine", "runs/mine/first"])
def test_a_run_that_is_refused_leaves_no_folders_and_keeps_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, made: str
) -> None:
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    before = [*tmp_path.rglob("*")]
    run = tmp_path / "runs" / "mine" / "first"
    refusal(capsys, "validate", "-c", "quickstart", "--trainer.default_root_dir", str(run), "--resume", "auto")
    assert [*tmp_path.rglob("*")] == before


@pytest.mark.parametrize(
    ("command", "below"), [("fit", ""), ("fit", "checkpoints"), ("validate", ""), ("test", ""), ("test", "checkpoints")]
)
def test_a_folder_that_takes_no_files_is_refused_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, below: str
) -> None:
    (tmp_path / "checkpoints").mkdir()
    allowed = os.access  # of the superuser, who may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / below and allowed(path, mode))
    line = refusal(capsys, command, "-c", "quickstart", "--trainer.default_root_dir", str(tmp_path))
    assert f"a run writes to its folder; {tmp_path / below} is read-only; choose another" in line
