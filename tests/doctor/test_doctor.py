"""``hzero doctor`` on pretended nodes and on dumps: it names what is missing, and its status states how bad that is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hzero import cli
from hzero.doctor.configuration import examine_configuration, examine_deepspeed
from hzero.doctor.environment import VARIABLES, examine_environment
from hzero.doctor.verdict import DEGRADED, GOOD, UNUSABLE, Findings
from tests.ranks import ROOT, mpiexec
from tests.topology import trees
from tests.topology.test_exchange import environment

DUMPS = ROOT.parent / "shared" / "topologies"
GOOD_ENVIRONMENT = {
    variable.name: variable.good[0].replace("*", "x") for variable in VARIABLES if "other" in variable.sites
}


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    status = cli.main(["doctor", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_a_whole_node_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = _run(capsys, "--topology", str(trees.frontier(tmp_path)))
    assert status == 0 and found["verdict"] == "good"
    assert [row["package"] for row in found["ranks"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found["links"][0]["tiers"]["gcd"] == {"size": 2, "gb_s": 200.0}
    assert {pair["state"] for pair in found["links"][0]["pairs"]} == {"good"}
    relied = {tuple(pair["pair"]) for pair in found["links"][0]["pairs"] if pair["relied_on"]}
    assert {(0, 1), (0, 6), (0, 2)} <= relied and (0, 3) not in relied


def test_a_missing_gcd_and_a_slow_link_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = _run(capsys, "--topology", str(trees.frontier(tmp_path / "less", missing={3})))
    assert status == 1 and any("ce:00.0" in remark for remark in found["remarks"])
    slow = tmp_path / "slow"
    trees.frontier(slow)
    for device in (4, 10):  # KFD nodes of GCDs 0 and 6, and their links to each other
        properties = slow / f"class/kfd/kfd/topology/nodes/{device}/io_links"
        for path in properties.glob("*/properties"):
            text = path.read_text()
            if f"node_to {14 - device}\n" in text:
                path.write_text(text.replace("max_bandwidth 100000", "max_bandwidth 50000"))
    status, found = _run(capsys, "--topology", str(slow))
    assert status == 1
    assert found["remarks"] == [
        f"{slow.name}: 0-6: expected 2 xgmi links of 100 GB/s together, found 1 xgmi link of 50 GB/s together"
    ]


def test_an_ambiguous_node_is_unusable_and_says_what_to_declare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = tmp_path / "node.yaml"
    node.write_text("devices: 4\nlinks: [{kind: xgmi, count: 2, pairs: [[0, 1], [2, 3]]}]\n")
    status, found = _run(capsys, "--topology", str(node))
    assert status == 2 and any(
        "ambiguous" in remark and "packages: [[0, 1], [2, 3]]" in remark for remark in found["remarks"]
    )


@pytest.mark.parametrize(
    "dump", ["topo_8p1h.xml", "topo_8p_940.xml", "topo_4p3l_2h.xml", "topo_16p1h.xml", "topo_8p_90a.xml"]
)
def test_dumps_are_good(dump: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not (DUMPS / dump).exists():
        pytest.skip("the dumps are not part of the project")
    assert cli.main(["doctor", "--topology", str(DUMPS / dump)]) == 0
    assert "verdict: good" in capsys.readouterr().out


def test_a_machine_that_is_not_there_is_never_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a node from a file nor this machine, where eight devices are expected and none is there."""
    status, found = _run(capsys, "--topology", str(trees.no_gpu(tmp_path)), "--expect", "frontier")
    assert status == 2 and found["remarks"][-1] == f"{tmp_path.name}: no devices found, preset frontier has 8"
    assert sum("missing: NIC hsn" in remark for remark in found["remarks"]) == 4
    monkeypatch.setenv("HZERO_SYSFS", str(tmp_path))
    status, found = _run(capsys, "--expect", "frontier")
    assert status == 2 and "this node: no devices found, preset frontier has 8" in found["remarks"]
    assert found["environment"], "an expected Slingshot NIC has its variables judged"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("devices: 8", "devices: 8", ""),
        ("{name: hsn2, kind: cxi, gb_s: 25}", "{name: eth2, kind: ethernet, gb_s: 25}", "missing: NIC hsn2 (cxi)"),
        ("{name: hsn2, kind: cxi, gb_s: 25}", "{name: cxi2, kind: cxi, gb_s: 25}", ""),
        ("{name: hsn2, kind: cxi, gb_s: 25}", "{name: hsn2, kind: cxi}", "NIC hsn2: found no rate, expected 25 GB/s"),
        ("{name: hsn2, kind: cxi, gb_s: 25}", "{name: hsn2, kind: cxi, gb_s: 12}", "NIC hsn2: found 12 GB/s"),
        ("kind: MI250X", "kind: MI300X", "device 7: found MI300X, expected MI250X"),
        ("kind: MI250X", "kind: gfx90a", ""),
        ("kind: MI250X", "kind: null", "device 0: found no kind, expected MI250X"),
        ("kind: xgmi, count: 2, gb_s: 100", "kind: xgmi", "0-6: expected 2 xgmi links of 100 GB/s together, found xgmi links"),
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


def test_expecting_another_machine_is_degraded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = _run(capsys, "--topology", str(trees.frontier(tmp_path)), "--expect", "mi300x")
    assert status == 1 and found["links"][0]["expected"] == "preset mi300x"


def test_this_machine_is_read_from_the_tree_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HZERO_SYSFS", str(trees.frontier(tmp_path)))
    monkeypatch.setenv("COLUMNS", "140")
    for name in GOOD_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    for text in (
        "0000:c1:00.0",
        "hsn3",
        "28 of 28 pairs",
        "0 of 19 settings",
        "memhooks deadlocks",
        "verdict: degraded",
    ):
        assert text in shown, text


def test_ranks_of_mpi_try_a_compressed_collective(tmp_path: Path) -> None:
    done = subprocess.run(
        [mpiexec(), "-n", "3", sys.executable, "-m", "hzero", "doctor", "--json"],
        env=environment(HZERO_SYSFS=str(tmp_path), DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = json.loads(done.stdout)  # of rank 0 alone
    assert done.returncode == found["status"] and len(found["ranks"]) == 3, done.stderr
    assert found["mpi"]["thread_multiple"] and not found["mpi"]["gpu_aware"] and found["mpi"]["all_reduce_us"] > 0
    assert "MPI" in found["mpi"]["library"].upper() and not any("transport" in remark for remark in found["remarks"])


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({}, GOOD, ""),
        ({"NCCL_SOCKET_IFNAME": "hsn0"}, GOOD, ""),
        (
            {"FI_MR_CACHE_MONITOR": "memhooks"},
            UNUSABLE,
            "FI_MR_CACHE_MONITOR is 'memhooks', expected kdreg2: memhooks deadlocks",
        ),
        ({"FI_CXI_RX_MATCH_MODE": None}, DEGRADED, "FI_CXI_RX_MATCH_MODE is not set, expected hybrid"),
        ({"GPU_MAX_HW_QUEUES": "12", "NCCL_MIN_NCHANNELS": "32"}, GOOD, ""),
        (
            {"GPU_MAX_HW_QUEUES": None},
            DEGRADED,
            "GPU_MAX_HW_QUEUES is not set, expected 8: streams of tiers share queues",
        ),
        ({"NCCL_MIN_NCHANNELS": "112"}, DEGRADED, "NCCL_MIN_NCHANNELS is '112', expected 16"),
        ({"LD_LIBRARY_PATH": ""}, UNUSABLE, "RCCL stops, as NCCL_NET asks"),
        ({"LD_LIBRARY_PATH": "", "NCCL_NET": None}, DEGRADED, "RCCL falls back to TCP sockets"),
    ],
)
def test_environment(change: dict[str, str | None], status: int, named: str, tmp_path: Path) -> None:
    (tmp_path / "librccl-net.so").touch()
    environ = {**GOOD_ENVIRONMENT, "LD_LIBRARY_PATH": str(tmp_path), **change}
    findings = Findings()
    examine_environment(findings, {name: value for name, value in environ.items() if value is not None})
    assert findings.status == status
    assert any(named in remark for remark in findings.remarks) or not named


@pytest.mark.parametrize(
    ("site", "level", "says"),
    [
        ("frontier", None, "NCCL_NET_GDR_LEVEL is not set, expected PHB: NICs read GCD memory directly"),
        ("frontier", "PHB", ""),
        ("lumi", "3", "NCCL_NET_GDR_LEVEL is '3', expected not set: starts on several nodes hang in LUMI's ROCm 7.0"),
        ("lumi", "PHB", "NCCL_NET_GDR_LEVEL is 'PHB', expected not set"),
        ("lumi", None, ""),
        ("elsewhere", "PHB", ""),
        ("elsewhere", None, ""),
    ],
)
def test_what_is_expected_depends_on_the_site(
    site: str, level: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Of the variables that the job script of a site sets, changed in one. Other machines with Slingshot have most of them."""
    script = "" if site == "elsewhere" else (ROOT / f"slurm/{site}.env").read_text()
    exported = dict(re.findall(r"(\w+)=(\S+)", "\n".join(re.findall(r"^ *export (.*)", script, re.MULTILINE))))
    environ = {**(exported or GOOD_ENVIRONMENT), "NCCL_NET": "Socket"}
    environ = {name: value.replace("$USER", "user") for name, value in environ.items()}
    for name in {variable.name for variable in VARIABLES} | {"SLURM_CLUSTER_NAME", "LMOD_SYSTEM_NAME"}:
        monkeypatch.delenv(name, raising=False)
    for name in environ.keys() & {variable.name for variable in VARIABLES}:
        monkeypatch.setenv(name, environ[name])
    monkeypatch.delenv("NCCL_NET_GDR_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("NCCL_NET_GDR_LEVEL", level)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", site)
    monkeypatch.setenv("HZERO_SYSFS", str(trees.frontier(tmp_path)))
    _, found = _run(capsys)
    remarks = [row["remark"] for row in found["environment"] if row["remark"]]
    assert len(remarks) == bool(says) and says in "".join(remarks), remarks
    assert remarks == [remark for remark in found["remarks"] if "_" in remark.partition(" ")[0]]
    if says and site == "lumi":
        monkeypatch.delenv("SLURM_CLUSTER_NAME")
        monkeypatch.setenv("NCCL_NET_GDR_LEVEL", level or "")
        assert _run(capsys, "--expect", "lumi")[1]["environment"] == found["environment"]


def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    twice = tmp_path / "twice.json"
    twice.write_text('{"hzero": {"preset": "topo", "preset": "mild"}}')
    for arguments, says in (
        (["--topology", "frontie"], "topology: unknown source 'frontie'"),
        (["--topology", str(tmp_path / "noise")], "noise"),
        (["--expect", "lumii"], "--expect: unknown source 'lumii'"),
        (["--expect", "nothing.yaml"], "nothing.yaml"),
        (["--timeout", "nan"], "--timeout: found nan"),
        (["nothing.json"], "nothing.json: No such file or directory"),
        ([str(tmp_path / "noise")], "noise: "),
        ([str(twice)], "the key 'preset' is given twice"),
        ([str(_ds_config(tmp_path, preset="tpoo"))], "did you mean 'topo'"),
    ):
        assert cli.main(["doctor", *arguments]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and says in message


def test_part_of_a_node_is_not_held_against_it(tmp_path: Path) -> None:
    """A job on three of the eight devices: what joins the others is not known, and nothing is missing."""
    from hzero.doctor.links import examine_links
    from hzero.topology.rank_report import node_of, report_of
    from hzero.topology.readers import kfd

    node = kfd.read(trees.frontier(tmp_path))
    reports = [report_of(rank, 3, "n", node, node.device(device)) for rank, device in enumerate((0, 1, 6))]
    findings = Findings()
    found = examine_links("n", node_of(reports)[1], None, findings, ranks=True)
    assert found is not None and found["expected"] == "preset frontier"
    assert findings.status == GOOD and {pair["state"] for pair in found["pairs"]} == {"good"}


def test_ranks_on_part_of_an_expected_node_are_not_good(tmp_path: Path) -> None:
    """With ``--expect``, devices without a rank are missing, and links that a cgroup hides are not known."""
    from hzero.doctor.links import examine_links
    from hzero.topology.preset import preset
    from hzero.topology.rank_report import node_of, report_of
    from hzero.topology.readers import kfd

    node, statuses = kfd.read(trees.frontier(tmp_path)), []
    for used in ((0, 1, 6), range(8)):
        reports = [report_of(rank, len(used), "n", node, node.device(device)) for rank, device in enumerate(used)]
        findings = Findings()
        examine_links("n", node_of(reports)[1], preset("frontier"), findings, ranks=True)
        statuses.append(findings.status)
        if len(used) == 3:
            said = "\n".join(findings.remarks)
            assert "pairs of devices are hidden by a cgroup" in said and "NIC hsn" in said, said
    assert statuses == [DEGRADED, GOOD]


def _ds_config(folder: Path, **block: object) -> Path:
    path = folder / "ds_config.json"
    zero = {"stage": 3, "hzero": {"preset": "topo", **block}}
    path.write_text(json.dumps({"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": zero}))
    return path


EIGHT = {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}


def beside_autotp(size: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "hzero": block}, "tensor_parallel": {"autotp_size": size}}


def test_a_configuration_is_shown_as_it_will_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 1}
    source = str(trees.frontier(tmp_path / "node"))
    _, found = _run(capsys, str(_ds_config(tmp_path, topology=grid)), "--topology", source)
    shown = found["configuration"]
    assert shown["place"] == "zero_optimization.hzero"
    assert shown["in_effect"] == (
        "topo on 2 nodes x 2 GPUs x 1 GCD; weights over the node, gradients over the node; int8 / int4"
    )
    assert shown["auto"] == ["bf16.enabled", "train_batch_size"]
    beside = _ds_config(tmp_path, topology=EIGHT)
    beside.write_text(json.dumps({**json.loads(beside.read_text()), "tensor_parallel": {"autotp_size": 2}}))
    _, tensor = _run(capsys, str(beside), "--topology", source)
    assert tensor["configuration"]["in_effect"].endswith(
        "int8 / int4; data parallel over 4 of 8 ranks (2 nodes x 2 GPUs x 2 GCDs)"
    )
    assert any("weights are sharded over the node" in remark for remark in found["remarks"])
    _, found = _run(capsys, str(_ds_config(tmp_path)), "--topology", source)
    assert found["configuration"]["in_effect"] == "topo, on the grid of the ranks that are started"


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        (lambda c: c["zero_optimization"].update(stage=2), UNUSABLE, "needs zero_optimization.stage 3, found 2"),
        (lambda c: c["zero_optimization"].update(stage=1, hzero={"guard": 3}), UNUSABLE, "hzero.guard: given with"),
        (lambda c: c["zero_optimization"].update(stge=3), UNUSABLE, "DeepSpeed refuses it"),
        (lambda c: c.update(optimizer="AdamW"), UNUSABLE, "DeepSpeed refuses it"),
        (lambda c: c.update(train_micro_batch_size_per_gpu=-3), UNUSABLE, "DeepSpeed refuses it"),
        (lambda c: c.update(zero_optimization={"stage": 3, "hzer": {}}), UNUSABLE, "DeepSpeed refuses it"),
        (lambda c: c["zero_optimization"].update(zero_hpz_partition_size=2), UNUSABLE, "zero_hpz_partition_size: found 2"),
        (lambda c: c["zero_optimization"].pop("hzero"), DEGRADED, 'no "hzero" block'),
        (lambda c: c.update(hzero=c["zero_optimization"].pop("hzero")), GOOD, "is at the top level"),
        (
            lambda c: c["zero_optimization"]["hzero"].update(codecs={"pipeline": "int8"}),
            DEGRADED,
            "hzero.codecs.pipeline has no effect but for a PipelineModule",
        ),
        (
            lambda c: c.update(beside_autotp(2, {"codecs": {"tensor": "exp"}}), bf16={"enabled": False}),
            UNUSABLE,
            "hzero.codecs.tensor.gcd: found 'exp', which holds bfloat16 numbers, without bf16.enabled",
        ),
        (
            lambda c: c.update(beside_autotp(2, {"codecs": {"tensor": {"node": "int8"}}, "topology": EIGHT})),
            UNUSABLE,
            "hzero.codecs.tensor: none on the tiers that tensor groups of 2 ranks can cross (gcd, hive, gpu)",
        ),
        (
            lambda c: c.update(beside_autotp(3, {"topology": EIGHT})),
            UNUSABLE,
            "tensor_parallel.autotp_size: found 3, which does not divide 8 ranks",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_configuration_is_named(
    change: Callable[[dict], None], status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hzero.doctor.configuration.autoload_state", lambda environ: "on")
    path = _ds_config(tmp_path)
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    findings = Findings()
    examine_configuration(path, None, 1, findings, {})
    assert findings.status == status and any(says in remark for remark in findings.remarks), findings.remarks


def test_what_keeps_a_configuration_from_taking_effect_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = metadata.EntryPoint("hzero", "hzero_autoload:autoload", "torch.backends")
    monkeypatch.setattr("hzero.doctor.configuration.entry_points", lambda group: [entry])
    for environ, status, says in (
        ({}, GOOD, "on"),
        ({"HZERO_AUTOLOAD": "0"}, DEGRADED, "off by HZERO_AUTOLOAD=0"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, DEGRADED, "off by TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        ({"ACCELERATE_USE_CPU": "true"}, UNUSABLE, "on"),
    ):
        findings = Findings()
        found = examine_configuration(_ds_config(tmp_path), None, 1, findings, environ)
        assert (findings.status, found["autoload"]) == (status, says)


def test_a_deepspeed_that_differs_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    from hzero.zero import versions

    findings = Findings()
    assert examine_deepspeed(findings).startswith(f"{metadata.version('deepspeed')}: stage 3 is supported")
    assert findings.status == GOOD
    monkeypatch.setattr(versions.DeepSpeedZeroOptimizer_Stage3, "partition_grads", lambda self, others: None)
    assert "has another DeepSpeedZeroOptimizer_Stage3.partition_grads" in examine_deepspeed(findings)
    assert findings.status == UNUSABLE
    assert "deepspeed has another DeepSpeedZeroOptimizer_Stage3.partition_grads" in findings.remarks[0]


def test_doctor_names_what_another_version_of_deepspeed_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from hzero.zero import versions

    findings = Findings()
    monkeypatch.delattr(versions.DeepSpeedZeroOptimizer, "_build_compact_grad_partition_buffer", raising=False)
    assert "pipeline stages (deepspeed >=0.19.8)" in examine_deepspeed(findings)
    assert findings.status == GOOD
    monkeypatch.setattr(versions.deepspeed, "__version__", "0.18.5")
    assert examine_deepspeed(findings) == "deepspeed: found 0.18.5; hzero supports deepspeed >=0.18.6,<0.20"
    assert findings.status == UNUSABLE
