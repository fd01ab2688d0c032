"""Tables on the pages: figures against their files, defaults and options against the code."""

import inspect
import re
from dataclasses import asdict, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import get_args

import pages
import pytest
import torch
import yaml
from pages import ROOT

import qerl_pl.algorithm
from qerl_pl.algorithm import Objective, RolloutCorrection
from qerl_pl.algorithm.advantages import AdvantageNorm
from qerl_pl.algorithm.off_policy import PRESETS
from qerl_pl.cli.quantize import quantize
from qerl_pl.models.memory import GIB, GRADIENT, MASTER, optimizer_bytes
from qerl_pl.models.memory_plan import MicroBatch, RunPlan, longest_completion, run_memory
from qerl_pl.models.shape import Shape

README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])")


def numbers(text: str) -> list[Decimal]:
    return [Decimal(found) for found in NUMBER.findall(text)]


def sources(path: Path, text: str) -> str:
    """Text of the results that a section links to."""
    targets = re.findall(r"\]\(([^)\s]*(?:benchmarks/results|studies)/[^)\s]+\.(?:md|json))\)", text)
    return "\n".join((path.parent / target).read_text() for target in targets)


SECTIONS = [(MEASURED, title) for title in pages.sections(MEASURED)] + [
    (ROOT / "docs" / "distillation.md", "Recovering what quantization lost"),
    (ROOT / "docs" / "your-own-model.md", "Mixtures of experts"),
]


@pytest.mark.parametrize(("path", "title"), SECTIONS, ids=[f"{path.stem}: {title}" for path, title in SECTIONS])
def test_every_figure_of_a_table_is_in_a_file_that_its_section_names(path: Path, title: str) -> None:
    text = pages.sections(path)[title]
    known = numbers(sources(path, text))
    figures = [figure for _, *cells in pages.rows(text)[1:] for figure in numbers(" ".join(cells))]
    assert figures
    for figure in figures:
        assert any(one.quantize(Decimal((0, (1,), figure.as_tuple().exponent))) == figure for one in known), figure


def test_every_figure_of_the_readme_is_on_the_page_of_measurements_or_planned() -> None:
    sections, measured = pages.sections(README), MEASURED.read_text()
    speed = pages.rows(sections["Speed"])
    beside_others = set(re.findall(r"[\d.]+", pages.sections(MEASURED)["Speed beside others"]))
    found = {figure for row in speed[1:] for cell in row[1:] for figure in re.findall(r"[\d.]+", cell)}
    assert len(speed) == 7 and len(found) > 20 and found <= beside_others
    curve = pages.rows(README.read_text().partition("## Install")[0])[1:]
    assert len(curve) == 2 and all(f"| {cell}" in measured for row in curve for cell in row[1:])
    assert re.findall(r"\b0\.\d+", sections["16 or 4 bits?"])[0] in measured


def small_card(shape: str, quantization: str) -> float:
    """GiB of GSM8K with `small_card`, as `--dry-run` counts them."""
    sizes = replace(shape_of(shape), tied=shape in ("1.5B", "3B"))
    batch = MicroBatch(4096, 4, checkpointing="offload", mlp_tile_tokens=4096, rank=32)
    plan = RunPlan(
        sizes, batch, 7, quantization, kv_cache_gib=2.0, prompt_tokens=4096,
        prefill_tokens=2048, max_num_seqs=16,
    )  # fmt: skip
    return run_memory(plan).peak / GIB


def test_what_fits_by_the_readme_is_what_the_estimate_says() -> None:
    """A card has less than its name says (79.1 GiB on an H100 of 80 GB, 23.6 on a card of 24); 0.3 GiB stay free."""
    (header, *rows), usable = pages.rows(pages.sections(README)["Your model, your data"]), [15.6, 23.6, 47.4, 79.1]
    sizes = ["1.5B", "3B", "7B", "14B", "32B"]
    assert [cell.split()[0] for cell in header[1:]] == ["16", "24", "48", "80"]
    for quantization, row in zip(("nvfp4", "none"), rows, strict=True):
        for card, cell in zip(usable, row[1:], strict=True):
            assert cell == [size for size in sizes if small_card(size, quantization) <= card - 0.3][-1], (
                quantization,
                card,
            )
    shown = pages.sections(README)["16 or 4 bits?"].splitlines()
    for quantization, line in (("none", shown[1]), ("nvfp4", shown[2])):
        found = re.findall(r"([\d.]+B) (?:needs )?(\d+\.\d)", line)
        assert len(found) >= 3
        for size, needed in found:
            assert float(needed) == pytest.approx(small_card(size, quantization), abs=0.06), (quantization, size)


def test_objectives_have_the_defaults_that_the_page_gives() -> None:
    header, *rows = pages.rows(pages.sections(ROOT / "docs" / "objectives-and-noise.md")["The objective"])
    assert len(rows) == sum(kind.__module__ == Objective.__module__ for kind in Objective.__subclasses__())
    for name, *cells in rows:
        objective = getattr(qerl_pl.algorithm, name.strip("`").removeprefix("qerl_pl.algorithm."))()
        assert {field.name for field in fields(objective)} >= set(header[3:])
        for key, cell in zip(header[1:], cells, strict=True):
            value = getattr(objective, key)
            assert cell == str(value).lower() or (isinstance(value, float) and float(cell) == value), (name, key)


def test_presets_of_the_correction_are_those_of_the_page() -> None:
    header, *rows = pages.rows(pages.sections(ROOT / "docs" / "objectives-and-noise.md")["The correction"])
    assert {name.strip("`") for name, *_ in rows} == set(PRESETS)
    shown = set(header[1:])
    for name, *cells in rows:
        found = asdict(PRESETS[name.strip("`")])
        given = dict(zip(header[1:], map(yaml.safe_load, cells), strict=True))
        assert given == {key: found[key] for key in shown}, name
        assert RolloutCorrection(**given) == PRESETS[name.strip("`")]


def test_norms_of_the_advantages_are_those_of_the_page() -> None:
    rows = pages.rows(pages.sections(ROOT / "docs" / "objectives-and-noise.md")["Advantages"])[1:]
    assert [name.strip("`") for name, *_ in rows] == list(get_args(AdvantageNorm))


def test_memory_of_full_fine_tuning_is_what_the_check_before_a_run_counts() -> None:
    """In GiB of 2 ** 30 bytes: the engine's 16 bits, what is held by each optimizer, what that leaves of a GPU."""
    eight = pytest.importorskip("bitsandbytes.optim").AdamW8bit
    header, *rows = pages.rows(pages.sections(ROOT / "docs" / "your-own-model.md")["Memory of full fine-tuning"])
    assert [row[0] for row in rows] == ["1.5B", "3B", "7B"]
    for _, billions, engine, *cells in rows:
        weights = float(billions) * 1e9 / GIB
        assert float(engine) == pytest.approx(2 * weights, abs=0.06)
        for optimizer, (held, *left) in ((eight, cells[:3]), (torch.optim.AdamW, cells[3:])):
            needed = (MASTER + GRADIENT + optimizer_bytes(optimizer, torch.device("cpu"))) * weights
            assert float(held) == pytest.approx(needed, abs=0.06)
            for name, cell in zip(header[4:6], left, strict=True):
                free = float(name.removeprefix("left of ")) - 2 * weights - needed
                assert cell == "none" if free < 0 else float(cell) == pytest.approx(free, abs=0.06)


SHAPES = {  # layers, hidden size, MLP, heads, elements of keys, norms of heads
    "1.5B": (28, 1536, 8960, 12, 256, False),
    "3B": (36, 2048, 11008, 16, 256, False),
    "7B": (28, 3584, 18944, 28, 512, False),
    "8B (Qwen3)": (36, 4096, 12288, 32, 1024, True),
    "14B": (48, 5120, 13824, 40, 1024, False),
    "32B": (64, 5120, 27648, 40, 1024, False),
}


def shape_of(name: str) -> Shape:
    layers, hidden, inner, heads, keys, norms = SHAPES[name]
    vocabulary = 152064 if name in ("7B", "14B", "32B") else 151936
    return Shape(hidden, inner, layers, heads, hidden, keys, vocabulary, False, norms)


def test_completions_that_fit_are_those_that_the_estimate_says() -> None:
    header, *rows = pages.rows(pages.sections(ROOT / "docs" / "memory.md")["What fits where"])
    assert [row[0] for row in rows] == list(SHAPES)[1:]
    for name, *cells in rows:
        for size, cell in zip(header[1:], cells, strict=True):
            for mode, shown in zip(("offload", True), cell.split(" / "), strict=True):
                batch = MicroBatch(1, checkpointing=mode, mlp_tile_tokens=4096, rank=32)
                plan = RunPlan(shape_of(name), batch, 8, kv_cache_gib=0.0, prompt_tokens=256, max_num_seqs=8)
                longest = longest_completion(plan, 256, float(size.removesuffix(" GiB")) / 1.08)
                assert shown == (str(longest // 1000) if longest >= 1000 else "–"), (name, size, mode)


def long_plan(shape: str, length: int, rank: int, mode: bool | str, dtype: str, bits: int, at_once: int) -> RunPlan:
    """A row of the table of long completions."""
    tokens, sizes = 256 + length, shape_of(shape)
    batch = MicroBatch(tokens, checkpointing=mode, rank=rank)
    plan = RunPlan(
        replace(sizes, tied=True) if shape == "3B" else sizes,
        batch,
        8,
        kv_dtype={"fp8": torch.float8_e4m3fn, "auto": None}[dtype],
        prompt_tokens=256,
        max_num_seqs=8,
        **{32: {}, 8: {"state_bytes": 2.03125, "step_bytes": 0.0}}[bits],
    )
    return replace(plan, kv_cache_gib=at_once * plan.sequence_kv_bytes(tokens) / GIB)


def test_long_completions_need_what_the_page_says() -> None:
    header, *rows = pages.rows(pages.sections(ROOT / "docs" / "memory.md")["Long completions, small cards"])
    assert len(header) == 11 and len(rows) == 7
    for shape, completion, card, rank, mode, dtype, bits, at_once, *needs in rows:
        length, gib, count = int(completion.replace(",", "")), float(card), int(at_once)
        saved = {"true": True, "offload": "offload"}[mode.strip("`")]
        found = [
            run_memory(long_plan(shape, length, int(rank), saved, dtype.strip("`"), int(bits), sequences))
            for sequences in (count, count + 1)
        ]
        sums = [sum(phase.values()) / GIB for phase in (found[0].rollout, found[0].update)]
        left = gib - max(sums)
        assert [float(cell) for cell in needs] == pytest.approx([*sums, left], abs=0.06), (shape, sums, left)
        assert left >= 0.3 and (count == 8 or found[1].peak / GIB > gib - 0.3), shape  # no more at once


def test_options_of_quantize_are_those_of_the_page() -> None:
    rows = pages.rows(pages.sections(ROOT / "docs" / "your-own-model.md")["Quantizing"])[1:]
    options = {option.strip("`-"): values for option, values in rows}
    parameters = inspect.signature(quantize).parameters
    assert set(options) == set(parameters) - {"src", "dst"}
    for name, text in options.items():
        default = "null" if parameters[name].default is None else str(parameters[name].default).lower()
        assert f"`{default}`" in text or default == "false", name
