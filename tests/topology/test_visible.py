"""Visible devices: AMD's and NVIDIA's lists against plain models of the vendors' rules."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.topology.machine import Device
from hzero.topology.visible import own_device, runtime_bus_id, visible_devices
from hzero.validation import ConfigError

BUSES = [f"0000:{bus}:00.0" for bus in ("c1", "c6", "c9", "ce", "d1", "d6", "d9", "de")]
GCDS = [Device(n, bus, "MI250X", uuid=f"GPU-{0x7A5C30E2F1B40D00 + 0x1000000 * n:016x}") for n, bus in enumerate(BUSES)]
H200S = [
    Device(n, bus, "NVIDIA H200", uuid=f"GPU-{n}932f937-d72c-4106-c12f-20bd9faed9f6") for n, bus in enumerate(BUSES)
]
#: Frontier binds ranks 0..7 of a node to these (OLCF's guide).
OLCF = [4, 5, 2, 3, 6, 7, 0, 1]


def text(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


remaps = st.permutations(range(8)).flatmap(lambda order: st.integers(0, 8).map(lambda count: order[:count]))


@st.composite
def two_lists(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A list of ROCr's and one of HIP's on what is left; HIP's may go on to devices that are not there."""
    rocr = draw(remaps)
    return rocr, draw(st.lists(st.integers(-1, 9), unique=True, max_size=8))


@given(two_lists(), st.sampled_from(["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "both"]), st.booleans())
def test_rocr_then_hip(lists: tuple[list[int], list[int]], second: str, by_uuid: bool) -> None:
    rocr, hip = lists
    names = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] if second == "both" else [second]
    environ = {name: text(hip) for name in names}
    environ["ROCR_VISIBLE_DEVICES"] = ", ".join(GCDS[n].uuid if by_uuid else str(n) for n in rocr)
    expected = []
    for index in hip:
        if not 0 <= index < len(rocr):
            break
        expected.append(rocr[index])
    assert visible_devices(environ, GCDS) == expected
    assert visible_devices({"ROCR_VISIBLE_DEVICES": environ["ROCR_VISIBLE_DEVICES"]}, GCDS) == rocr


@given(st.lists(st.integers(-2, 9), unique=True), st.booleans())
def test_nvidia_ends_at_the_first_invalid_entry(numbers: list[int], by_uuid: bool) -> None:
    entries = [f"GPU-{number}932F937" if by_uuid and number >= 0 else str(number) for number in numbers]
    expected = []
    for number in numbers:
        if not 0 <= number < 8:
            break
        expected.append(number)
    # AMD's variables mean nothing to CUDA.
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(entries), "ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "5"}
    assert visible_devices(environ, H200S) == expected


@pytest.mark.parametrize(
    ("environ", "devices", "expected"),
    [
        ({}, GCDS, list(range(8))),
        ({}, [], []),
        ({"GPU_DEVICE_ORDINAL": "3"}, GCDS, list(range(8))),  # OpenCL's
        ({"ROCR_VISIBLE_DEVICES": ""}, GCDS, []),
        ({"ROCR_VISIBLE_DEVICES": "-1"}, GCDS, []),
        ({"ROCR_VISIBLE_DEVICES": "2,-1,3"}, GCDS, [2]),
        ({"ROCR_VISIBLE_DEVICES": "3, 4"}, GCDS, [3, 4]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-7a5c30e2f6"}, GCDS, [5]),
        ({"HIP_VISIBLE_DEVICES": ""}, GCDS, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, GCDS, []),
        ({"CUDA_VISIBLE_DEVICES": "0,2,-1,1"}, H200S, [0, 2]),  # the guide's own example
        ({"CUDA_VISIBLE_DEVICES": ""}, H200S, []),
        ({"CUDA_VISIBLE_DEVICES": "1,nonsense,2"}, H200S, [1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, H200S, []),
        # Sources without kinds: ROCr's variable tells the vendor. Numbers may have gaps; indices have none.
        ({"ROCR_VISIBLE_DEVICES": "1"}, [Device(7), Device(3)], [7]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [Device(7), Device(3)], [7]),
    ],
)
def test_single_lists(environ: dict[str, str], devices: list[Device], expected: list[int]) -> None:
    assert visible_devices(environ, devices) == expected


@pytest.mark.parametrize(
    ("environ", "devices", "message"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,8"}, GCDS, "ROCR_VISIBLE_DEVICES='0,8': no device 8; possible: 0 to 7"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, [], None),
        ({"ROCR_VISIBLE_DEVICES": "GPU-beef"}, GCDS, "entry 'GPU-beef': no device has it; UUIDs: GPU-7a5c30e2f1b40d00"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-7a5c"}, GCDS, "entry 'GPU-7a5c': 8 devices begin so"),
        ({"ROCR_VISIBLE_DEVICES": "04"}, GCDS, "entry '04' is neither an index nor GPU-<UUID>"),
        ({"ROCR_VISIBLE_DEVICES": "one"}, GCDS, "entry 'one' is neither an index nor GPU-<UUID>"),
        ({"ROCR_VISIBLE_DEVICES": "1,,2"}, GCDS, "entry '' is neither an index"),
        ({"ROCR_VISIBLE_DEVICES": "1,2,1"}, GCDS, "entry '1' names a device that the list has already"),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, H200S, "names a device that the list has already"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-0932f937/1/2"}, H200S, "is a part of a GPU"),
        (
            {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"},
            GCDS,
            "HIP_VISIBLE_DEVICES='0,1' and CUDA_VISIBLE_DEVICES='0' contradict each other",
        ),
    ],
)
def test_lists_that_cannot_be_meant(environ: dict[str, str], devices: list[Device], message: str | None) -> None:
    if message is None:
        with pytest.raises(ConfigError, match="possible: none"):
            visible_devices({**environ, "HIP_VISIBLE_DEVICES": "0"}, devices)
        return
    with pytest.raises(ConfigError) as raised:
        visible_devices(environ, devices)
    assert message in str(raised.value)


@given(
    st.dictionaries(st.sampled_from(["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]), st.text())
)
def test_noise_is_a_list_or_a_clear_error(environ: dict[str, str]) -> None:
    for devices in (GCDS, H200S, [], [Device(0)]):
        try:
            seen = visible_devices(environ, devices)
        except ConfigError as error:
            assert "_VISIBLE_DEVICES" in str(error)
        else:
            assert len(set(seen)) == len(seen)
            assert set(seen) <= {device.number for device in devices}


@pytest.mark.parametrize("local", range(8))
def test_own_device_in_every_kind_of_launch(local: int) -> None:
    gcd = OLCF[local]
    # --gpus-per-task=1 --gpu-bind=closest: one visible device, which is the process' device 0.
    bound = {"ROCR_VISIBLE_DEVICES": str(gcd)}
    assert own_device(bound, GCDS, 0, None) == own_device(bound, GCDS, 0, BUSES[gcd]) == gcd
    # All visible, in the order of the kernel or in another one.
    assert own_device({}, GCDS, local, None) == own_device({}, GCDS, local, BUSES[local]) == local
    remapped = {"ROCR_VISIBLE_DEVICES": text(OLCF)}
    assert own_device(remapped, GCDS, local, None) == own_device(remapped, GCDS, local, BUSES[gcd]) == gcd
    assert own_device({**remapped, "HIP_VISIBLE_DEVICES": str(local)}, GCDS, 0, BUSES[gcd]) == gcd


def test_the_runtime_decides() -> None:
    """Sources number devices in orders of their own: a dump of a job numbers the visible ones."""
    assert own_device({"ROCR_VISIBLE_DEVICES": "4"}, GCDS, 0, BUSES[2]) == 2


def test_own_device_refuses_to_guess() -> None:
    with pytest.raises(
        ConfigError, match=r"index 2 \(LOCAL_RANK\) among the 1 visible devices \(ROCR_VISIBLE_DEVICES='4'\)"
    ):
        own_device({"ROCR_VISIBLE_DEVICES": "4"}, GCDS, 2, None)
    with pytest.raises(
        ConfigError, match=r"bus id 0000:aa:00.0, which no device of the node has; there are: 0000:c1:00.0, "
    ):
        own_device({}, GCDS, 0, "0000:aa:00.0")
    with pytest.raises(ConfigError, match="no device with index 0"):
        own_device({}, [], 0, None)
    with pytest.raises(ConfigError, match="expected a PCI bus id"):
        own_device({}, GCDS, 0, "nonsense")


def test_functions_of_one_device() -> None:
    """torch states no function: it finds a device whose function is not 0, but not one of several."""
    assert own_device({}, [Device(0, "0000:01:00.1", "MI300X")], 0, "0000:01:00.0") == 0
    parts = [Device(n, f"0000:01:00.{n + 1}", "MI300X") for n in range(2)]
    with pytest.raises(ConfigError, match="which devices 0, 1 share"):
        own_device({}, parts, 0, "0000:01:00.0")


def test_runtime_bus_id(monkeypatch: pytest.MonkeyPatch) -> None:
    properties: list[Any] = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC9, pci_device_id=0),
        SimpleNamespace(name="old"),
    ]
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=properties.__getitem__
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert runtime_bus_id(0) == "0000:c9:00.0"
    assert runtime_bus_id(1) is None
    assert runtime_bus_id(2) is None
    cuda.is_available = lambda: False
    assert runtime_bus_id(0) is None
