"""What a user's terminal shows: what is loading, rollouts, the table; of other libraries what a user can act on."""

import errno
import io
import logging
import os
import pty
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from fit_helpers import configuration, fit, free_port, processes
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny_run import Tiny

from qerl_pl.cli import terminal
from qerl_pl.cli.main import QeRLCLI, main
from qerl_pl.cli.terminal import StandardError, configure_terminal
from qerl_pl.policy.activation_checkpointing import ActivationCheckpointing
from qerl_pl.rewards.math_answer import MathPool


def on_a_terminal(*words: str) -> tuple[int, str]:
    """Exit status of a command that runs on a terminal, and all that it wrote there."""
    child, descriptor = pty.fork()
    if child == 0:
        os.execvp(words[0], words)
    written = b""
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # Linux's way to say that the other side has gone
            break
        if not chunk:
            break
        written += chunk
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), written.decode()


OURS = r"INFO qerl_pl[.\w]*: | {2}[a-z/,' ]+ +\d+\.\d{3} GiB$"
TABLE = r" +8 rollouts, base nvfp4$|[┏┃┡│└]"


def test_a_run_shows_what_is_loading_a_line_a_rollout_and_the_table_last(tiny_policy_dir: Path, tmp_path: Path) -> None:
    settings = configuration(tiny_policy_dir, tmp_path / "run")
    settings["trainer"] |= {"enable_progress_bar": True, "num_sanity_val_steps": -1}
    best = {"monitor": "val/accuracy", "filename": "best-{rollouts:.0f}"}
    settings["trainer"]["callbacks"].append(
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": best}
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {"PYTHONPATH": ":".join(paths), "QERL_CACHE": str(tmp_path / "cache")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "600"}  # wide enough for every line
    command = ("env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-m", "qerl_pl")
    status, written = on_a_terminal(*command, "fit", "-c", str(tmp_path / "run.yaml"))
    lines = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", written).splitlines()
    lines = [line.rstrip() for line in lines if line.strip()]
    screen = "\n".join(lines)
    assert status == 0, screen
    before, after = lines[:-13], lines[-13:]
    assert all(re.match(OURS, line) for line in before), screen
    said = [f"rollout {number}/8: reward " for number in range(1, 9)]
    said += ["quantizing ", "starting TransformersEngine on cpu", "loading the trainer's base on cpu"]
    assert [sum(text in line for line in before) for text in said] == [1] * 11, screen
    assert "validation after 8 rollouts: greedy accuracy " in before[-1], screen
    assert all(re.match(TABLE, line) for line in after[:-3]), screen
    assert re.match(r"\d+ s of training: sync", after[-3]) and after[-1].startswith("watch it: "), screen
    for foreign in ("litlogger", "litmodels", "weights_only", "Loading weights", "Warning", "GPU available"):
        assert foreign not in written  # nor for a moment


def nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = os.fdopen(writer, "w")


def test_the_adapter_is_written_although_nobody_reads_the_table(tiny_policy_dir: Path, tmp_path: Path) -> None:
    settings = configuration(tiny_policy_dir, tmp_path / "run")
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": 1}
    status, output = fit(settings, prepare=nobody_reads)
    assert status != 0 and (tmp_path / "run" / "adapter" / "adapter_config.json").is_file(), output


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[warnings.WarningMessage]]:
    """The warnings that are shown after `configure_terminal`; what that sets is taken back."""
    loggers = [logging.getLogger(name) for name in (*terminal.LEVELS, *terminal.LOG_MESSAGES)]
    kept = [(logger, logger.level, list(logger.filters)) for logger in loggers]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        configure_terminal()
        yield shown
    for logger, level, filters in kept:
        logger.setLevel(level)
        logger.filters[:] = filters
    transformers.utils.logging.set_tqdm_hook(None)


def test_the_barrier_of_vllms_process_group_is_no_news_and_other_warnings_are(
    configured: list[warnings.WarningMessage],
) -> None:
    mute = "You can specify `device_id` in `init_process_group` to mute this warning."
    warnings.warn(f"barrier(): using the device under current context. {mute}", stacklevel=2)
    assert not configured
    for text in ("barrier(): the group has gone", "`weights_only` is ignored", "sync_dist=True has no effect"):
        warnings.warn(text, stacklevel=2)
    assert len(configured) == 3


@pytest.mark.usefixtures("configured")
def test_a_profilers_report_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    SimpleProfiler().describe()
    assert "Profiler Report" in caplog.text


def test_a_resumed_run_hears_nothing_of_the_checkpoints_it_has(
    configured: list[warnings.WarningMessage], tmp_path: Path
) -> None:
    (tmp_path / "step=1.ckpt").touch()
    quiet = {"enable_model_summary": False, "enable_progress_bar": False}
    trainer = Trainer(logger=False, accelerator="cpu", callbacks=[best := ModelCheckpoint(tmp_path)], **quiet)
    best.setup(trainer, LightningModule(), "fit")
    assert not configured


def test_a_run_that_ends_before_its_first_validation_hears_nothing_of_the_best_checkpoint(
    configured: list[warnings.WarningMessage], tmp_path: Path
) -> None:
    quiet = {"enable_model_summary": False, "enable_progress_bar": False, "logger": False}
    best = ModelCheckpoint(tmp_path / "best", monitor="val/accuracy")
    Trainer(accelerator="cpu", max_steps=2, default_root_dir=tmp_path, callbacks=[best], **quiet).fit(Tiny())
    assert not [warning for warning in configured if "ModelCheckpoint" in str(warning.message)]
    wrong = ModelCheckpoint(tmp_path / "best", monitor="val/acuracy")
    with pytest.raises(MisconfigurationException, match="val/acuracy"):
        Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, callbacks=[wrong], **quiet).fit(Tiny())


def test_a_kernel_that_vllm_compiles_late_is_no_news_and_its_other_warnings_are(
    configured: list[warnings.WarningMessage], caplog: pytest.LogCaptureFixture
) -> None:
    late = "Triton kernel JIT compilation during inference: _kernel. This causes a latency spike; consider extending "
    seed = "The global random seed is set to 0. Since VLLM_ENABLE_V1_MULTIPROCESSING is set to False, this may affect "
    with caplog.at_level(logging.INFO):
        for name in ("vllm.utils.jit_monitor", "vllm.triton_utils.jit_monitor"):
            logging.getLogger(name).warning(late + "warmup to cover this shape/config.")
        arguments = logging.getLogger("vllm.engine.arg_utils")
        arguments.warning(seed + "the random state of the Python process that launched vLLM.")
        marlin = logging.getLogger("vllm.model_executor.kernels.linear.nvfp4.marlin")
        marlin.warning("Your GPU does not have native support for FP4 computation but FP4 quantization is being used.")
        assert not caplog.records
        logging.getLogger("vllm.utils.jit_monitor").error("compiled in vain")
        arguments.warning("This model does not officially support disabling chunked prefill.")
        logging.getLogger("vllm.worker").warning("out of memory")
        logging.getLogger("lightning.pytorch").warning("stopped early")
    assert len(caplog.records) == (4 if logging.getLogger("lightning.pytorch").propagate else 3)


def test_bars_of_weights_are_not_drawn_and_others_are(
    configured: list[warnings.WarningMessage], capsys: pytest.CaptureFixture[str]
) -> None:
    bar = transformers.utils.logging.tqdm
    for name in ("Loading weights", "Writing model shards"):
        assert list(bar(range(3), desc=name)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    list(bar(range(3), desc="Downloading"))
    assert "Downloading" in capsys.readouterr().err


def test_log_lines_go_where_standard_error_is_now(capsys: pytest.CaptureFixture[str]) -> None:
    handler = StandardError(sys.__stderr__)
    handler.handle(logging.LogRecord("qerl_pl", logging.INFO, "", 0, "above the bar", None, None))
    assert capsys.readouterr().err == "above the bar\n"


def test_lightning_asks_for_nothing_of_ours_where_vllm_has_a_process_group(
    configured: list[warnings.WarningMessage], tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = configuration(tiny_policy_dir, tmp_path / "run")
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": 1}
    monkeypatch.setattr("sys.argv", ["qerl"])
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        QeRLCLI({"subcommand": "fit", "fit": settings})
        QeRLCLI({"subcommand": "validate", "validate": settings})
    finally:
        torch.distributed.destroy_process_group()
    assert not [str(one.message) for one in configured if issubclass(one.category, PossibleUserWarning)]
    warnings.warn("It is recommended to use `self.log('mine', ..., sync_dist=True)`", PossibleUserWarning, stacklevel=2)
    assert "mine" in str(configured[-1].message)


def warn_on_the_second_rank(policy: Path, rank: int, port: int, errors: Path) -> None:
    """One of two ranks, the second of which runs out of memory, and meets an answer that takes too long to grade."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    configure_terminal()
    torch.distributed.init_process_group("gloo")
    if rank == 1:
        model = transformers.AutoModelForCausalLM.from_pretrained(policy)
        choice = ActivationCheckpointing(model, "auto", False, torch.float32)
        choice.load("false")
        attempts = iter([torch.OutOfMemoryError("no room")])

        def work() -> None:
            for error in attempts:
                raise error

        choice.run_with_oom_fallback(work, [])
        MathPool(0.3, 0.3, 1).equivalent([("1", "5^{9^{9^9}}")])
    torch.distributed.barrier()


def test_what_only_one_rank_has_met_is_told_by_that_rank_once(tiny_policy_dir: Path, tmp_path: Path) -> None:
    port, errors = free_port(), [tmp_path / f"rank{rank}.log" for rank in range(2)]
    ranks = [
        processes().Process(target=warn_on_the_second_rank, args=(tiny_policy_dir, rank, port, errors[rank]))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=800)
        process.kill()
    printed = [path.read_text() for path in errors]
    assert [process.exitcode for process in ranks] == [0, 0], printed
    warned = [[line for line in text.splitlines() if "qerl_pl" in line and "WARNING" in line] for text in printed]
    assert warned == [
        [],
        [
            "WARNING qerl_pl.policy.activation_checkpointing: rank 1: gradient_checkpointing auto goes on with "
            "selective, for false "
            "ran out of memory: no room",
            "WARNING qerl_pl: rank 1: an answer counts as wrong, as it cannot be graded within the limits: "
            "'5^{9^{9^9}}'",
        ],
    ]


@pytest.mark.usefixtures("configured")
def test_a_locale_without_a_letter_of_the_table_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="ascii"))
    configure_terminal()
    print("noise σ", flush=True)
    assert written.getvalue() == b"noise ?\n"


@pytest.mark.usefixtures("configured")
def test_the_exit_status_stays_where_the_terminal_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sys, "stderr", Gone())
    assert main(["fit", "--no_such_key", "1"]) == 2
