"""The reader of AMD SMI, on an object with the functions of its Python package."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.topology.machine import TopologyError
from hzero.topology.readers import amd_smi
from hzero.topology.tiers import packages_of
from tests.topology.trees import FRONTIER_BUSES, FRONTIER_LINKS


class LinkType(IntEnum):
    AMDSMI_LINK_TYPE_INTERNAL = 0
    AMDSMI_LINK_TYPE_PCIE = 1
    AMDSMI_LINK_TYPE_XGMI = 2


class LibraryError(Exception):
    """As amdsmi's own exceptions, its text has several lines."""

    def __str__(self) -> str:
        return "Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED"


class Library:
    """A Frontier node as AMD SMI tells it. Names and results are those of amdsmi 7.0."""

    AmdSmiLinkType = LinkType

    def __init__(self, **broken: Any) -> None:
        self.broken = broken
        self.open = 0

    def _answer(self, name: str, value: Any) -> Any:
        answer = self.broken.get(name, value)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def amdsmi_init(self) -> None:
        self._answer("init", None)
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> list[int]:
        return self._answer("handles", list(range(8)))

    def amdsmi_get_gpu_device_bdf(self, gpu: int) -> str:
        return self._answer("bdf", f"0000:{FRONTIER_BUSES[gpu]}:00.0")

    def amdsmi_topo_get_numa_node_number(self, gpu: int) -> int:
        return self._answer("numa", (3, 1, 0, 2)[gpu // 2])

    def amdsmi_get_gpu_asic_info(self, gpu: int) -> dict[str, Any]:
        asic = {"market_name": "AMD Instinct MI250X", "device_id": "0x740c", "target_graphics_version": "gfx90a"}
        return self._answer("asic", asic)

    def amdsmi_get_gpu_enumeration_info(self, gpu: int) -> dict[str, Any]:
        return self._answer("identity", {"hip_id": gpu, "hip_uuid": f"GPU-{gpu:016x}"})

    def amdsmi_topo_get_link_type(self, one: int, other: int) -> dict[str, int]:
        return self._answer("type", {"hops": 1, "type": 2})

    def amdsmi_topo_get_link_weight(self, one: int, other: int) -> int:
        return self._answer("weight", 15 if (one, other) in FRONTIER_LINKS else 30)

    def amdsmi_get_minmax_bandwidth_between_processors(self, one: int, other: int) -> dict[str, int]:
        count = FRONTIER_LINKS.get((one, other), 0)
        least = 50000 if count else 0
        return self._answer("bandwidth", {"min_bandwidth": least, "max_bandwidth": 50000 * count})


def test_a_frontier_node() -> None:
    library = Library()
    machine = amd_smi.query(library)
    assert {(link.a, link.b): link.count for link in machine.links} == FRONTIER_LINKS
    assert [(d.bus, d.numa, d.kind) for d in machine.devices[:1]] == [("0000:c1:00.0", 3, "MI250X")]
    assert machine.devices[5].uuid == "GPU-0000000000000005"
    assert packages_of(machine) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert library.open == 0 and machine.remarks == ()


def test_what_a_driver_does_not_support_is_left_open() -> None:
    broken = dict.fromkeys(["bandwidth", "numa", "identity", "asic"], LibraryError())
    machine = amd_smi.query(Library(**broken))
    assert {link.count for link in machine.links} == {None} and len(machine.links) == len(FRONTIER_LINKS)
    assert {(device.numa, device.uuid, device.kind) for device in machine.devices} == {(None, "", "")}
    assert "amdsmi device 0: LibraryError" in machine.remarks[0] and "\n" not in machine.remarks[0]
    assert machine.remarks[-1].startswith("no bandwidths")


@pytest.mark.parametrize(
    ("asic", "kind"),
    [
        ({"market_name": "N/A", "device_id": "0x74a1"}, "MI300X"),
        ({"market_name": "N/A", "device_id": "N/A", "target_graphics_version": "gfx90a"}, "gfx90a"),
        ({}, ""),
    ],
)
def test_kinds(asic: dict[str, str], kind: str) -> None:
    assert amd_smi.query(Library(asic=asic, type={"hops": 1, "type": 1})).devices[0].kind == kind


def test_pairs_over_pcie_have_no_link() -> None:
    assert amd_smi.query(Library(type={"hops": 2, "type": 1})).links == ()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"init": LibraryError()}, "amdsmi: no driver answers: LibraryError"),
        ({"handles": LibraryError()}, "amdsmi: LibraryError 'Error code: 2"),
        ({"bdf": "nonsense"}, "amdsmi device 0: found 'nonsense', expected a PCI bus id"),
        ({"bdf": "0000:c1:00.0"}, "amdsmi: PCI bus id 0000:c1:00.0 is there twice"),
        ({"weight": -1}, "amdsmi devices 0 and 1: found weight '-1'"),
        ({"bandwidth": {"min_bandwidth": 3, "max_bandwidth": 100}}, "amdsmi devices 0 and 1: found a bandwidth of 3"),
        ({"type": {}}, "amdsmi: KeyError"),
        ({"handles": list(range(2000))}, "amdsmi: 2000 GPUs in one node"),
    ],
)
def test_errors_are_ours(broken: dict[str, Any], message: str) -> None:
    library = Library(**broken)
    with pytest.raises(TopologyError, match=message):
        amd_smi.query(library)
    assert library.open == 0


def test_a_missing_package_or_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(TopologyError, match="amdsmi: the Python package cannot be imported"):
        amd_smi.query()

    def fails(name: str) -> None:
        print("Unable to find libamd_smi.so")
        raise KeyError("libamd_smi.so")

    monkeypatch.setattr(amd_smi.importlib, "import_module", fails)
    with pytest.raises(TopologyError, match=r"amdsmi: the package is there, but libamd_smi.so cannot be loaded"):
        amd_smi.query()
    assert capsys.readouterr().out == ""


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just(LibraryError())
)


@settings(max_examples=100, deadline=None)
@given(
    broken=st.dictionaries(
        st.sampled_from(["bdf", "numa", "asic", "identity", "type", "weight", "bandwidth", "handles"]),
        st.one_of(
            ANYTHING,
            st.lists(ANYTHING, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    ["type", "hops", "min_bandwidth", "max_bandwidth", "market_name", "device_id", "hip_uuid"]
                ),
                ANYTHING,
            ),
        ),
        min_size=1,
    )
)
def test_any_answer_gives_a_machine_or_an_error(broken: dict[str, Any]) -> None:
    try:
        amd_smi.query(Library(**broken))
    except TopologyError as error:
        assert "amdsmi" in str(error) and "\n" not in str(error)
