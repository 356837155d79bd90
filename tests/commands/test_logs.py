"""``hzero doctor --log`` on the sentences of public issues, with hosts, users, paths and addresses replaced."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hzero.tools import cli
from hzero.tools.commands.logs import CAUSES

GOOD, DEGRADED, UNUSABLE = range(3)
#: Lines by the issue that shows them.
ISSUES = {
    "ROCm/rccl-tests#163": "node1:11:18 [2] NCCL INFO Using network Socket",
    "ROCm/rccl#1454": "node1:11:11 [0] NCCL INFO NET/Plugin: No plugin found (librccl-net.so)\nnode1:11:11 [0] NCCL INFO "
    "NET/Plugin: Plugin load returned 2 : librccl-net.so: cannot open shared object file: No such file or directory : when "
    "loading librccl-net.so",
    "NVIDIA/nccl#1925": "node1:11:11 [3] NCCL INFO NET/Plugin: Could not find: libnccl-net.so",
    "eth-cscs/cscs-docs#75": "node1:11:27 [1] net.cc:626 NCCL WARN Error: network AWS Libfabric not found.",
    "lumi-ai-factory/laifs-container-recipes#28": "node1:11:27 [0] NCCL INFO Connected all rings",
    "NVIDIA/nccl#1235": "node1:11:27 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n\nnode1:11:27 [3] "
    "include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
    "NVIDIA/nccl#1232": "NCCL WARN socketProgress: Connection closed by remote peer node2<42830>",
    "pytorch/pytorch#118369": "[E ProcessGroupNCCL.cpp:458] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=96120, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25624887 milliseconds before timing out.",
    "NVIDIA/nccl-tests#166": "node1:11:27 [3] misc/shmutils.cc:112 NCCL WARN Error while creating shared memory segment "
    "/dev/shm/nccl-AAAAAA (size 5967872)",
    "argonne-lcf/user-guides#315": "libfabric:11:1701636928::cxi:core:cxip_cq_eq_progress():531<warn> node1: Cassini Event "
    "Queue overflow detected.",
    "ofiwg/libfabric#9286": "PE 0: MPICH WARNING: OFI is failing to make progress on posting a receive. MPICH suspects a hang "
    "due to completion queue exhaustion. Setting environment variable FI_CXI_DEFAULT_CQ_SIZE to a higher number might "
    "circumvent this scenario. OFI retry continuing...",
    "ofiwg/libfabric#9003": "#2  0x00007ffff0000000 in ofi_import_monitor_notify () from /opt/lib64/libfabric.so.1",
    "ofiwg/libfabric#9594": "#15 0x00007ffff0000000 in ofi_intercept_handler (addr=0x7fff00000000, len=458752) at "
    "prov/util/src/util_mem_hooks.c:423",
    "olcf/olcf-user-docs#947": "FI_MR_CACHE_MONITOR=memhooks",
    "aws/aws-ofi-nccl#801": "libfabric:11:1741146011::cxi:fabric:cxip_nic_get_rgroup_vni():253<warn> : Failed to find valid "
    "default rgroup and vni for cxi0",
    "ofiwg/libfabric#10072": "MPIDI_OFI_handle_cq_error(1075): OFI poll failed (ofi_events.c:1077:MPIDI_OFI_handle_cq_error:"
    "Input/output error - PTLTE_NOT_FOUND)",
    "gyselax/gyselalibxx#479": "MPICH ERROR [Rank 0] [job id ] [node1] - Abort(-1) (rank 0 in comm 0): MPIDI_CRAY_init: "
    "GPU_SUPPORT_ENABLED is requested, but GTL library is not linked",
    "ROCm/legacy-rocm-build#2804": "Memory access fault by GPU node-2 (Agent handle: 0x5640a8000000) on address "
    "0x7feea0000000. Reason: Page not present or supervisor privilege.",
    "ROCm/legacy-rocm-build#4208": "RuntimeError: HIP error: invalid device function",
    "ROCm/tensorflow-upstream#1419": "MIOpen(HIP): Warning [FindWinogradSolutions] /src/sqlite_db.cpp:212: Internal error "
    "while accessing SQLite database: disk I/O error",
    "ROCm/MIOpen#2214": "Internal error while accessing SQLite database: locking protocol",
    "NVIDIA/nccl#983": "Primary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction, "
    "the job has been aborted.",
    "chrisknewman/tusas#149": "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been "
    "OOM Killed.",
    "desihub/desitarget#628": "slurmstepd: error: *** STEP 1.0 ON node1 CANCELLED AT 2020-07-03T02:59:56 DUE TO TIME LIMIT ***",
    "nebius/soperator#854": "salloc: error: Node failure on node1",
    "pytorch/pytorch#159007": "[W724 18:22:38.909218572 socket.cpp:200] [c10d] The hostname of the client socket cannot be "
    "retrieved. err=-3",
}


def _run(capsys: pytest.CaptureFixture[str], *files: Path) -> tuple[int, dict[str, Any]]:
    status = cli.main(["doctor", "--json", "--log", *map(str, files)])
    found = json.loads(capsys.readouterr().out)
    assert status == found["status"] and found["verdict"] == ("good", "degraded", "unusable")[status]
    return status, found


@pytest.mark.parametrize("issue", ISSUES)
def test_the_sentence_of_an_issue_is_found_with_its_source(
    issue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"step 1: loss 9.1\n{ISSUES[issue]}\nstep 2: loss 9.0\n")
    status, found = _run(capsys, log)
    (said,) = (text for text in found["remarks"] if f"{log}:2: " in text)
    assert len(found["remarks"]) == 2 and issue in said
    assert status == (UNUSABLE if next(one for one in CAUSES if issue in one.source).fatal else DEGRADED)


def test_a_start_whose_trees_came_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RCCL says of each communicator what it has connected. Later versions connect trees when they use them."""
    rings, trees, whole = (
        "NCCL INFO Connected all rings\n",
        "NCCL INFO Connected all trees\n",
        "NCCL INFO Init COMPLETE\n",
    )
    log = tmp_path / "job.log"
    for text in (2 * rings + 2 * trees + 2 * whole, 2 * whole + 2 * rings):
        log.write_text(text)
        assert _run(capsys, log)[0] == GOOD
    log.write_text(2 * rings + 2 * trees + 2 * whole + 2 * rings)  # the second one hangs
    assert _run(capsys, log)[0] == UNUSABLE


def test_causes_come_in_order_counted_over_files_that_are_not_read_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "train-0.log", tmp_path / "train-1.log"
    line = "x" * 199 + "\n"
    first.write_text(line * 100_000 + "NCCL INFO Using network Socket\n" + line)  # 20 MB, in 20 pieces
    # A rank that was killed has not ended its last line.
    second.write_text("Using network Socket\nslurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\nstep 1")
    tracemalloc.start()
    status, found = _run(capsys, first, second)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6
    assert status == UNUSABLE and len(found["remarks"]) == 3
    for text in (
        "files: 2, lines: 100,005, known causes: 2",
        f"{first}:100001: 'Using network Socket', times: 2: ",
        f"{second}:2: 'oom_kill event', times: 1: ",
    ):
        assert any(text in remark for remark in found["remarks"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.log"], "missing.log: no such file or directory"),
        (["."], "--log: . is not a regular file; expected a text file"),
        (["packed.gz"], "--log: packed.gz is binary; expected a text file, unpacked"),
        (["packed.gz", "--nodes", "2"], "--log: found with CONFIG, --topology, --expect or --nodes; expected it alone"),
    ],
)
def test_a_file_that_is_no_log_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packed.gz").write_bytes(b"\x1f\x8b\x08\0\0\0")
    assert cli.main(["doctor", "--log", *arguments]) == 2
    assert capsys.readouterr().err == f"hzero: error: {message}\n"
