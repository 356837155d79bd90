"""``hzero doctor`` on pretended nodes, files and configurations: it names what is wrong, and its status says how bad it is."""

from __future__ import annotations

import json
import pkgutil
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from hzero.files import read_json
from hzero.tools import cli
from hzero.tools.commands import doctor
from hzero.tools.commands.doctor import check_config, check_deepspeed, check_environment, check_rccl
from hzero.tools.launch import free_port
from hzero.topology.node import Node
from hzero.topology.sources import preset
from tests.forks import Command
from tests.ranks import ROOT
from tests.topology import trees

GOOD, DEGRADED, UNUSABLE = range(3)
GOOD_ENVIRONMENT = {
    one.name: one.good[0].replace("*", "x") for one in doctor.VARIABLES if {"other", "gfx90a"} & {*one.sites}
}


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert status == found["status"] and found["verdict"] == ("good", "degraded", "unusable")[status]
    return status, found


# ---- nodes ------------------------------------------------------------------------------------------------------------


def test_a_whole_node_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = _run(capsys, "--topology", str(trees.frontier(tmp_path)), "--expect", "frontier")
    assert status == GOOD and [row["device"] for row in found["ranks"]] == list(range(8))
    assert any(text.endswith(": no differences from preset frontier") for text in found["remarks"])


def test_a_missing_gcd_and_a_slow_link_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    less = trees.frontier(tmp_path / "less", missing={3})
    status, found = _run(capsys, "--topology", str(less), "--expect", "frontier")
    assert status == DEGRADED and "degraded: less: found 7 devices, expected 8 of preset frontier" in found["remarks"]
    slow = trees.frontier(tmp_path / "slow")
    for device in (4, 10):  # KFD nodes of GCDs 0 and 6, and their links to each other
        for path in (slow / f"class/kfd/kfd/topology/nodes/{device}/io_links").glob("*/properties"):
            text = path.read_text()
            if f"node_to {14 - device}\n" in text:
                path.write_text(text.replace("max_bandwidth 100000", "max_bandwidth 50000"))
    status, found = _run(capsys, "--topology", str(slow), "--expect", "frontier")
    said = "degraded: slow: 1 of 12 linked pairs: expected 2 xgmi links of 100 GB/s together, found 1 xgmi link of 50"
    assert status == DEGRADED and found["remarks"] == [f"{said} GB/s together"]


def test_a_machine_that_is_not_there_is_never_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a node from a file nor this machine, where eight devices are expected and none is there."""
    status, found = _run(capsys, "--topology", str(trees.write_kfd(tmp_path, [])), "--expect", "frontier")
    said = {
        f"unusable: {tmp_path.name}: found {text}"
        for text in ("0 devices, expected 8 of preset frontier", "0 NICs, expected 4 of 25 GB/s")
    }
    assert status == UNUSABLE and said <= set(found["remarks"])
    monkeypatch.setenv("HZERO_SYSFS", str(tmp_path))
    status, found = _run(capsys, "--expect", "frontier")
    judged = any("FI_MR_CACHE_MONITOR" in text for text in found["remarks"])
    assert status == UNUSABLE and judged, "an expected Slingshot NIC has its variables judged"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("devices: 8", "devices: 8", ""),
        ("  - {name: hsn2, kind: cxi, gb_s: 25}\n", "", "found 3 NICs, expected 4 of 25 GB/s"),
        ("{name: hsn2, kind: cxi, gb_s: 25}", "{name: hsn2, kind: cxi, gb_s: 12}", "found 4 NICs, expected 4 of 25 GB/s"),
        ("kind: MI250X", "kind: MI300X", "device 7: found MI300X, expected MI250X"),
        ("kind: MI250X", "kind: gfx90a", ""),
        ("kind: xgmi, count: 2, gb_s: 100", "kind: xgmi", "expected 2 xgmi links of 100 GB/s together, found"),
        ("kind: xgmi, count: 2, gb_s: 100", "kind: pcie, gb_s: 100", "of 100 GB/s together, found pcie"),
    ],
)  # fmt: skip
def test_what_is_expected_and_missing_or_not_known_is_named(
    old: str, new: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node, text = tmp_path / "node.yaml", (ROOT / "hzero/topology/presets/frontier.yaml").read_text()
    assert old in text
    node.write_text(text.replace(old, new))
    status, found = _run(capsys, "--topology", str(node), "--expect", "frontier")
    assert (status != 0) == bool(says) and any(says in remark for remark in found["remarks"] or [""]), found["remarks"]


def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    twice = tmp_path / "twice.json"
    twice.write_text('{"hzero": {"preset": "topo", "preset": "half"}}')
    for arguments, says in (
        (["--topology", str(tmp_path / "noise")], "noise"),
        (["--expect", "lumii"], "--expect: found no file 'lumii'"),
        (["--timeout", "nan"], "--timeout: found 'nan'"),
        (["/dev/zero"], "/dev/zero: cannot be read: not a regular file"),
        ([str(tmp_path / "noise")], "noise: byte 128 is not UTF-8"),
        ([str(twice)], "the key 'preset' is given twice"),
    ):
        assert cli.main(["doctor", *arguments]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and says in message


def test_ranks_report_their_devices_and_rank_0_prints(tmp_path: Path) -> None:
    """Two ranks of an MPI, each on a device of its own; a configuration is judged on their grid."""
    config = _write(tmp_path, {"codecs": {"except": {" ": "none"}}}, train_batch_size=3)
    arguments = ["doctor", "--json", "--expect", "frontier", str(config)]
    world = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": str(free_port())}
    world["HZERO_SYSFS"] = str(trees.frontier(tmp_path / "sys"))
    started = [
        Command(arguments, tmp_path, tmp_path / rank, {**world, "PMI_RANK": rank, "MPI_LOCALRANKID": rank})
        for rank in "01"
    ]
    (status, shown, errors), silent = [one.finish(120) for one in started]
    found = json.loads(shown)
    assert status == found["status"] == UNUSABLE, errors
    assert silent[:2] == (0, ""), silent
    ranks = [(row["rank"], row["bus"], row["package"]) for row in found["ranks"]]
    assert ranks == [(0, "0000:c1:00.0", 0), (1, "0000:c6:00.0", 0)]
    assert found["grid"] == "1 node x 1 package x 2 devices"
    said = "\n".join(found["remarks"])
    for text in ("device 2 is hidden by a cgroup or has no rank", "found an empty pattern", "3 != 1 * 1 * 2"):
        assert text in said, said


# ---- environment ------------------------------------------------------------------------------------------------------


def _judged(monkeypatch: pytest.MonkeyPatch, site: str, values: dict[str, str | None]) -> list[tuple[int, str]]:
    """What is said of an environment; None: not set."""
    for name, value in values.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    return list(check_environment(site, nodes=2, gfx90a=True))


def _software(monkeypatch: pytest.MonkeyPatch, rocm: str | None, hip: str | None, version: tuple[int, ...]) -> None:
    """Has torch say what it says in a build for ROCm."""
    monkeypatch.setattr(torch.version, "rocm", rocm, raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"NCCL_SOCKET_IFNAME": "hsn0"}, GOOD, ""),
        ({"FI_MR_CACHE_MONITOR": "memhooks"}, UNUSABLE, "is 'memhooks', expected kdreg2: memhooks deadlocks"),
        ({"FI_CXI_RX_MATCH_MODE": None}, DEGRADED, "FI_CXI_RX_MATCH_MODE is not set, expected hybrid"),
        ({"LD_LIBRARY_PATH": ""}, UNUSABLE, "RCCL stops, as NCCL_NET asks"),
        ({"LD_LIBRARY_PATH": "", "NCCL_NET": None}, DEGRADED, "RCCL falls back to TCP sockets"),
        ({"NCCL_NET_PLUGIN": "none"}, UNUSABLE, "RCCL stops, as NCCL_NET asks"),
        ({"NCCL_NET": "Libfabric"}, GOOD, ""),
        ({"NCCL_NET": "Libfabric", "LD_LIBRARY_PATH": ""}, UNUSABLE, "RCCL stops, as NCCL_NET asks"),
        ({"GPU_MAX_HW_QUEUES": "2"}, DEGRADED, "GPU_MAX_HW_QUEUES is '2', expected 8: the stage and compute have up to 7"),
        ({"HSA_NO_SCRATCH_RECLAIM": "0"}, DEGRADED, "HSA_NO_SCRATCH_RECLAIM is '0', expected 1"),
    ],
)  # fmt: skip
def test_environment(
    change: dict[str, str | None], status: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "librccl-net.so").touch()
    findings = _judged(monkeypatch, "other", {**GOOD_ENVIRONMENT, "LD_LIBRARY_PATH": str(tmp_path), **change})
    assert max((found for found, _ in findings), default=GOOD) == status
    assert any(named in text for _, text in findings) or not named


@pytest.mark.parametrize(
    ("site", "says"),
    [
        (
            "frontier",
            "NCCL_NET_GDR_LEVEL is not set, expected PHB: NICs read GCD memory directly "
            "(OLCF, PyTorch on Frontier, 2026-07-07)",
        ),
        (
            "lumi",
            "NCCL_NET_GDR_LEVEL is 'PHB', expected not set: starts on several nodes hang in LUMI's ROCm 7.0 container "
            "(LUMI-AI-Guide#97, 2026-05-05)",
        ),
    ],
)
def test_the_script_of_a_site_sets_what_is_expected_there(
    site: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = re.findall(r"^ *export (.*)", (ROOT / f"slurm/{site}.env").read_text(), re.MULTILINE)
    exported = {name: value.replace("$USER", "user") for name, value in re.findall(r"(\w+)=(\S+)", "\n".join(exports))}
    exported = {**dict.fromkeys(one.name for one in doctor.VARIABLES), **exported, "NCCL_NET": "OFI"}
    assert doctor.site_of({"SLURM_CLUSTER_NAME": site}, None) == doctor.site_of({}, preset(site)) == site
    wrong = {"frontier": None, "lumi": "PHB"}[site]
    for level, expected in ((exported["NCCL_NET_GDR_LEVEL"], []), (wrong, [says])):
        found = _judged(monkeypatch, site, {**exported, "NCCL_NET_GDR_LEVEL": level})
        assert [text for status, text in found if status and "plug-in" not in text] == expected


#: Environments as jobs have them: what torch says of ROCm, HIP and RCCL, nodes, changed variables, findings by status.
RECORDED: dict[str, Any] = {
    "without the setting, before ROCm 7.13": (*((None, "7.1.25424-4179531dcd", (2, 27, 7)), 2,
     {"HSA_NO_SCRATCH_RECLAIM": None}), {DEGRADED: ["HSA_NO_SCRATCH_RECLAIM is not set, expected 1"]}),
    "without the setting, from ROCm 7.13 on": (*((None, "7.13.26176-9e2a0a1c1", (2, 28, 3)), 2,
     {"HSA_NO_SCRATCH_RECLAIM": None}), {UNUSABLE: ["HSA_NO_SCRATCH_RECLAIM is not set, expected 1"]}),
    "the packaged RCCL of ROCm 7.14.0": (*(("7.14.0", "7.14.60850", (2, 30, 4)), 2, {}),
     {UNUSABLE: ["RCCL 2.30.4 as packaged for ROCm 7.14.0 injects faults"]}),
    "an RCCL with hierarchical all-gathers": (*(("10.0.0", "10.0.1", (2, 30, 4)), 8, {}),
     {GOOD: ["RCCL 2.30.4: all-gathers over 8 nodes or more are hierarchical"]}),
    "several at once": (*(("7.14.0", "7.14.60850", (2, 30, 4)), 16),
     {"HSA_NO_SCRATCH_RECLAIM": None, "FI_MR_CACHE_MONITOR": "memhooks", "NCCL_CROSS_NIC": None},
     {GOOD: ["RCCL 2.30.4: all-gathers"], DEGRADED: ["NCCL_CROSS_NIC is not set"],
     UNUSABLE: ["FI_MR_CACHE_MONITOR is 'memhooks'", "HSA_NO_SCRATCH_RECLAIM is not set", "RCCL 2.30.4 as packaged"]}),
}  # fmt: skip


@pytest.mark.parametrize(("stack", "nodes", "change", "expected"), RECORDED.values(), ids=RECORDED)
def test_recorded_environments(
    stack: Any,
    nodes: int,
    change: dict[str, str | None],
    expected: dict[int, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _software(monkeypatch, *stack)
    (tmp_path / "librccl-net.so").touch()
    _judged(monkeypatch, "other", {**GOOD_ENVIRONMENT, "LD_LIBRARY_PATH": str(tmp_path), **change})
    findings = [*check_environment("other", nodes, gfx90a=True), *check_rccl(nodes)]
    findings = [one for one in findings if one != (GOOD, "the environment has the settings for other")]
    assert doctor.releases()[-1] == f"RCCL {'.'.join(map(str, stack[2]))}"
    for status in range(3):
        texts, starts = [text for found, text in findings if found == status], expected.get(status, [])
        assert len(texts) == len(starts) and all(map(str.startswith, texts, starts)), (status, texts)


# ---- a DeepSpeed configuration ----------------------------------------------------------------------------------------


def _write(folder: Path, block: dict[str, Any], **config: Any) -> Path:
    path = folder / "ds_config.json"
    zero = {"stage": 3, "hzero": {"preset": "topo", **block}}
    path.write_text(
        json.dumps({"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": zero, **config})
    )
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where we are; hzero is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "autoload_off", lambda: "")
    return tmp_path


EIGHT = {"nodes": 2, "packages_per_node": 2, "devices_per_package": 2}


@pytest.mark.parametrize(
    ("block", "config", "nodes", "effect"),
    [
        ({"topology": {"nodes": 2, "packages_per_node": 2}}, {}, None,
         "topo on 2 nodes x 2 packages x 1 device; weights over the node, gradients over the node; int8 / int4"),
        ({"topology": EIGHT},
         {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 8, "gradient_accumulation_steps": 2}, None,
         "int8 / int4; data parallel over 4 of 8 ranks (2 nodes x 2 packages x 2 devices)"),
        ({"topology": EIGHT, "unit": "module"}, {}, None, 'int8 / int4; gathers by module (unit "module")'),
        ({}, {}, None, "topo, on the grid of the ranks that are started"),
        ({}, {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2}, 4, "topo on 4 nodes x 4 packages x 2 devices;"),
        ({"topology": "node.yaml"}, {}, 80, "topo on 16 groups x 5 nodes x 2 packages x 2 devices"),
        ({"topology": "frontier"}, {}, 64, "topo on 8 groups x 8 nodes x 4 packages x 2 devices"),
    ],
)  # fmt: skip
def test_a_configuration_is_shown_as_it_will_be_used(
    block: Any, config: Any, nodes: int | None, effect: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("node.yaml").write_text("devices: 4\npackages: [[0, 1], [2, 3]]\nswitch_nodes: 20\n")
    more = ["--nodes", str(nodes)] if nodes else []
    status, found = _run(capsys, str(_write(folder, block, **config)), "--topology", "frontier", *more)
    assert status == GOOD and any("ds_config.json: topo" in one and effect in one for one in found["remarks"]), found


CHANGES: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    ({}, {"zero_optimization": {"stage": 2, "hzero": {}}}, UNUSABLE, "zero_optimization.stage: found 2"),
    ({}, {"zero_optimization": {"stage": 3, "stge": 3, "hzero": {}}}, UNUSABLE, "found key 'stge'"),
    ({}, {"data_types": {"grad_acum_dtype": "fp32"}}, DEGRADED, "data_types: found key 'grad_acum_dtype'; expected"),
    ({}, {"zero_optimization": {"stage": 3}}, DEGRADED, 'no "hzero" block'),
    ({}, {"gradient_clip": 1.0}, DEGRADED, "found key 'gradient_clip'; expected"),
    ({"preset": "tpoo"}, {}, UNUSABLE, "hzero.preset: found 'tpoo'; expected fit, zero1"),
    ({"codecs": {"pipeline": "int8"}}, {}, DEGRADED, "hzero.codecs.pipeline has no effect but for a PipelineModule"),
    # Topologies.
    ({"topology": "broken.yaml"}, {}, UNUSABLE, "broken.yaml: line 2: is neither YAML nor JSON"),
    ({"topology": "ambiguous.yaml"}, {}, UNUSABLE, "ambiguous"),
    ({"topology": {**EIGHT, "nodes_per_group": 3}}, {}, UNUSABLE, "nodes_per_group: found 3"),
    ({"topology": "none.yaml"}, {}, UNUSABLE, "found no devices in 'none.yaml'"),
    # Values that DeepSpeed keeps as they are.
    ({}, {"data_types": {"grad_accum_dtype": "foo"}}, UNUSABLE, "data_types.grad_accum_dtype: found 'foo'"),
    ({}, {"gradient_clipping": "x"}, UNUSABLE, "gradient_clipping: found 'x'; expected a number"),
    ({}, {"prescale_gradients": "yes"}, UNUSABLE, "prescale_gradients: found 'yes'; expected true or false"),
    # Batch sizes: on 8 ranks, and on an unknown number of ranks.
    ({"topology": EIGHT}, {"train_batch_size": 12}, UNUSABLE, "12 != 1 * 1 * 8"),
    ({"topology": EIGHT}, {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3}, UNUSABLE, "accumulation steps: 0"),
    ({}, {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, UNUSABLE,
     "10 != 3 * 2 * 1"),
    ({}, {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, GOOD, ""),
    # Names.
    ({}, {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": -1}}}, UNUSABLE, "Invalid learning rate: -1"),
    ({}, {"optimizer": {"type": "AdamW", "params": {"foo": 1}}}, UNUSABLE, "unexpected keyword argument 'foo'"),
    ({}, {"optimizer": {"type": "NAdam"}, "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9}}}, GOOD, ""),
    ({}, {"scheduler": {"type": "WarmupRL"}}, UNUSABLE, "scheduler.type: found 'WarmupRL'; expected"),
    # AutoTP.
    ({"codecs": {"tensor": {"inter_node": "int8"}}, "topology": EIGHT}, {"tensor_parallel": {"autotp_size": 2}}, UNUSABLE,
     "hzero.codecs.tensor: found none on the tiers that tensor groups of 2 ranks cross (intra_package)"),
    ({"topology": EIGHT}, {"tensor_parallel": {"autotp_size": 3}}, UNUSABLE,
     "tensor_parallel.autotp_size: found 3; expected a divisor of 8 ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "config", "status", "says"), CHANGES)
def test_what_is_wrong_with_a_configuration_is_named(
    block: dict[str, Any], config: dict[str, Any], status: int, says: str, folder: Path
) -> None:
    Path("broken.yaml").write_text("devices: [8\n")
    Path("ambiguous.yaml").write_text("devices: 4\nlinks: [{kind: xgmi, count: 2, pairs: [[0, 1], [2, 3]]}]\n")
    Path("none.yaml").write_text("devices: 0\n")
    path = _write(folder, block, **config)
    worst, findings = _worst(path)
    assert worst == status and any(says in text for text in findings or [""]), findings
    assert len(findings) <= 1 or worst < UNUSABLE, "one fault is one finding"
    assert all(text.startswith(str(path)) and text.isprintable() for text in findings)


def _worst(path: Path) -> tuple[int, list[str]]:
    """The verdict on a configuration, and the findings."""
    findings = [one for one in check_config(path, read_json(path), Node("none", ()), None, None) if one[0]]
    return max((found for found, _ in findings), default=GOOD), [text for _, text in findings]


def test_what_keeps_a_configuration_from_taking_effect_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = metadata.EntryPoint("hzero", "hzero_autoload:autoload", "torch.backends")
    monkeypatch.setattr(doctor, "entry_points", lambda group: [entry])
    for name in ("HZERO_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    path = _write(tmp_path, {})
    for variable, value, status, says in (
        ("", "", GOOD, ""),
        ("HZERO_AUTOLOAD", "0", DEGRADED, "off by HZERO_AUTOLOAD"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", DEGRADED, "off by TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        ("ACCELERATE_USE_CPU", "true", UNUSABLE, "Accelerate trains DDP"),
    ):
        with monkeypatch.context() as changed:
            if variable:
                changed.setenv(variable, value)
            worst, findings = _worst(path)
        assert worst == status and (not says or says in "".join(findings))


def test_a_deepspeed_that_differs_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    from hzero.deepspeed import versions

    (said,) = check_deepspeed()
    assert said[0] == GOOD and said[1].startswith(f"deepspeed {metadata.version('deepspeed')}: stage 3 is supported"), (
        "a release whose sources have changed: read the changes, then scripts/deepspeed_sources.py adds it"
    )
    body = "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.step"
    with monkeypatch.context() as changed:
        changed.setitem(versions.RELEASES["methods"]["stage3"][body], "sources", {"0123456789ab": "0.18.6 0.19.8"})
        changed.setitem(versions.RELEASES["attributes"]["stage3"], "runtime.engine:DeepSpeedEngine", ["no_such"])
        findings = list(check_deepspeed())
    assert [status for status, _ in findings] == [DEGRADED, DEGRADED, GOOD]
    assert "DeepSpeedZeroOptimizer_Stage3.step has another body than in deepspeed" in findings[0][1]
    assert "DeepSpeedEngine has no attribute no_such" in findings[1][1]
    stage3 = pkgutil.resolve_name("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3")
    monkeypatch.setattr(stage3, "partition_grads", lambda self, others: None)
    findings = list(check_deepspeed())
    assert "has another DeepSpeedZeroOptimizer_Stage3.partition_grads" in findings[0][1]
    assert findings[0][0] == UNUSABLE
    monkeypatch.setattr(versions.deepspeed, "__version__", "0.19.7")
    assert "pipeline stages (deepspeed >=0.19.8)" in versions.describe()
    for version, supported in (("0.18.5", False), ("0.18.6", True), ("0.19.9+rocm", True), ("0.20.0", False)):
        monkeypatch.setattr(versions.deepspeed, "__version__", version)
        said = list(check_deepspeed())[-1][1]
        assert (f"found {version}; hzero supports deepspeed >=0.18.6,<0.20" in said) != supported


def test_codecs_equal_the_reference() -> None:
    """Each codec, also those that a shard alone cannot be encoded in."""
    assert [level for level, _ in doctor.check_codecs()] == [doctor.GOOD]
