"""Prints the files of `qerl_pl` that a prompt passes in a rollout, in their order: `python tools/prompt_path.py`.

A call counts if an argument is the prompt or what became of it (`CARRIERS`). It adds its caller's file and its own to
the path. A stay is a change of file on the path, a return a stay in a file that had one before; a file that is returned
to without another such call has no stay. Other calls are left out with all that they call, as are the inside of the
engine and the carriers' own methods. The rollout is the toy policy's third, when no parity check is due.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer

import qerl_pl
from qerl_pl.callbacks import RolloutCallback
from qerl_pl.datamodules import ArithmeticDataModule
from qerl_pl.modules import PolicyConfig, QeRLModule
from qerl_pl.rewards import GSM8KAnswer

CARRIERS = "PromptBatch Prompt RolloutRequest Completion RewardSample Group Scores Tensor Experience".split()
ROOT, path = Path(qerl_pl.__file__).parent, list[str]()
stack: list[str | None] = []  # of each open call its file, "" between two files, or None where nothing is followed


def carries(value: Any) -> bool:
    """Whether a value is the prompt or what became of it, or holds it."""
    if isinstance(value, Mapping | list | tuple) and value:
        return carries(next(iter(value.values() if isinstance(value, Mapping) else value)))
    return type(value).__name__ in CARRIERS


def follow(frame: FrameType, event: str, _: Any) -> None:
    """A profile function that extends the path at each call that counts."""
    if event == "call":
        code, file, ended = frame.f_code, Path(frame.f_code.co_filename), stack[-1:] == [None]
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        followed: str | None = ""
        if not ended and file.is_relative_to(ROOT) and not code.co_name.startswith("<"):
            own = code.co_varnames[:1] == ("self",) and carries(given[0])
            followed = str(file.relative_to(ROOT)) if any(map(carries, given)) and not own else None
            path.extend([*[name for name in reversed(stack) if name][:1], followed] if followed else [])
        stack.append(None if ended or followed is None or followed.startswith("engines/") else followed)
    elif event == "return" and stack:
        stack.pop()


class Traced(RolloutCallback):
    def on_train_batch_start(self, *args: Any) -> None:
        sys.setprofile(follow if args[-1] == 2 else None)
        super().on_train_batch_start(*args)
        sys.setprofile(None)


callback = Traced([GSM8KAnswer()])
with TemporaryDirectory() as run:
    trainer = Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=callback,
        default_root_dir=run,
    )
    trainer.fit(QeRLModule(PolicyConfig(dtype="float32")), datamodule=ArithmeticDataModule(batch_size=4, val_size=1))
stays = [name for index, name in enumerate(path) if path[index - 1 : index] != [name]]
print(*(f"{name}{' (return)' * (name in stays[:index])}" for index, name in enumerate(stays)), sep="\n")
print(f"{len(stays)} stays in {len(set(stays))} files, {len(stays) - len(set(stays))} returns")
