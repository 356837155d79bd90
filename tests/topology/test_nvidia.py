"""The reader of nvidia-smi's matrix."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from hzero.topology.machine import Machine
from hzero.topology.readers import nvidia, read_file
from hzero.topology.tiers import tiers_of
from hzero.validation import ConfigError
from tests.topology.hostile import machine_or_error, mutated

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tPIX\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNODE\tNODE\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tSYS\tPXB\t56-111,168-223\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tNODE\tPXB\tSYS\t X \t\t\t\t\n" + LEGEND
)
DEVICES = (
    "0, 00000000:1B:00.0, NVIDIA H200, GPU-0febe11b-b4ad-5301-abfb-86f6c3c11e7f\n"
    "1, 00000000:43:00.0, NVIDIA H200, GPU-75d55e49-c25b-5f4a-82d9-bc3e4e4b2eca\n"
    "2, 00000000:9D:00.0, NVIDIA H200, GPU-c2abb56f-520b-5212-b4c8-30187532ac5e\n"
)


def read(tmp_path: Path, text: str) -> Machine:
    path = tmp_path / "topo.txt"
    path.write_text(text)
    return nvidia.read(path)


def test_a_matrix(tmp_path: Path) -> None:
    machine = read(tmp_path, MATRIX)
    assert [(d.number, d.bus, d.numa, d.nic) for d in machine.devices] == [
        (0, "", 0, "mlx5_0"),
        (1, "", 0, ""),
        (2, "", 1, "mlx5_1"),
    ]
    assert [(link.a, link.b, link.kind, link.count, link.gb_s) for link in machine.links] == [
        (0, 1, "nvlink", 18, None),
        (0, 2, "nvlink", 18, None),
        (1, 2, "nvlink", 18, None),
    ]
    assert [nic.name for nic in machine.nics] == ["mlx5_0", "mlx5_1"]
    assert {tier.name: tier.size for tier in tiers_of(machine) if tier.size > 1} == {"gpu": 3}
    assert read_file(tmp_path / "topo.txt") == machine


def test_products_give_bus_ids_and_rates(tmp_path: Path) -> None:
    machine = read(tmp_path, MATRIX + DEVICES)
    assert [(device.bus, device.kind) for device in machine.devices] == [
        (f"0000:{bus}:00.0", "NVIDIA H200") for bus in ("1b", "43", "9d")
    ]
    assert machine.devices[0].uuid == "GPU-0febe11b-b4ad-5301-abfb-86f6c3c11e7f"
    assert {link.gb_s for link in machine.links} == {450.0}


@pytest.mark.parametrize(
    ("product", "gb_s"), [("Tesla V100-SXM2-16GB", 450.0), ("NVIDIA GB200", 900.0), ("NVIDIA GeForce RTX 3090", None)]
)
def test_rates(tmp_path: Path, product: str, gb_s: float | None) -> None:
    machine = read(tmp_path, MATRIX + DEVICES.replace("NVIDIA H200", product))
    assert {link.gb_s for link in machine.links} == {gb_s}


def test_one_gpu_and_older_columns(tmp_path: Path) -> None:
    (device,) = read(tmp_path, "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n" + LEGEND).devices
    assert (device.number, device.numa) == (0, 0)
    old = (
        "\tGPU0\tGPU1\tmlx4_0\tCPU Affinity\nGPU0\t X \tPIX\tPHB\t0-9\nGPU1\tPIX\t X \tSOC\t0-9\nmlx4_0\tPHB\tSOC\t X\n"
    )
    machine = read(tmp_path, old)
    assert [(device.numa, device.nic) for device in machine.devices] == [(None, "mlx4_0"), (None, "mlx4_0")]
    assert machine.links == ()


def test_an_empty_column_leaves_the_numa_domain_open(tmp_path: Path) -> None:
    machine = read(tmp_path, MATRIX.replace("\t0-55,112-167\t0\t\tN/A", "\t\t0\t\tN/A"))
    assert [device.numa for device in machine.devices] == [None, None, 1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("GPU1\tNV18\t X ", "GPU1\tNV12\t X ", "the two ends of link 0-1 contradict"),
        ("GPU0\t X ", "GPU0\tNV4", ":2: GPU0 is linked to itself"),
        ("NV18", "NV0", ":2: found number of links '0'"),
        ("NV18", "NV999999", ":2: found number of links '999999'"),
        ("NV18", "WAT", ":2: row of GPU0: found 'WAT'"),
        ("GPU2\tNV18", "GPU1\tNV18", ":4: GPU1 is also in line 3"),
        ("GPU2\tNV18\tNV18\t X \tSYS\tPXB\t56-111,168-223\t1\t\tN/A\n", "", "has no row of GPU2"),
        ("\tGPU1\tGPU2", "\tGPU1\tGPU1", ":1: found the column 'GPU1'"),
        (
            "\t X \tNV18\tNV18\tPIX\tSYS\t0-55,112-167\t0\t\tN/A",
            "\t X \tNV18",
            ":2: row of GPU0: found 2 cells, expected 5",
        ),
        ("00000000:43:00.0", "00000000:1B:00.0", "0000:1b:00.0 occurs twice"),
    ],
)
def test_contradictions_name_the_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MATRIX + DEVICES
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, (MATRIX + DEVICES).replace(old, new, 1))
    assert "topo.txt" in str(caught.value)


@pytest.mark.parametrize(
    "noise",
    [
        "",
        "\x00" * 2**20,
        "GPU0 " * 2**17,
        "\tGPU0\tGPU1\n" * 2**16,
        "NV1 " * 2**18,
        "\x1b[" + "1;" * 2**19,
        "9, " * 2**18,
    ],
)
def test_noise(tmp_path: Path, noise: str) -> None:
    path = tmp_path / "noise"
    path.write_text(noise)
    assert machine_or_error(nvidia.read, path) is None
    assert machine_or_error(read_file, path) is None


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutated(MATRIX + DEVICES))
def test_any_change_gives_a_machine_or_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "topo.txt"
    path.write_bytes(content)
    machine_or_error(nvidia.read, path)


def test_query_asks_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "matrix").write_text(MATRIX)
    (tmp_path / "devices").write_text(DEVICES)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nif [ "$1" = topo ]; then cat {tmp_path}/matrix; else cat {tmp_path}/devices; fi\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    machine = nvidia.query()
    assert machine.source == "nvidia-smi" and {link.gb_s for link in machine.links} == {450.0}
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nvidia-smi topo -m: cannot be run: no such file"):
        nvidia.query()
