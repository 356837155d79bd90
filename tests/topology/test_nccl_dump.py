"""The reader of RCCL's and NCCL's topology dumps: real ones, small ones, and hostile ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hzero.topology.machine import Machine
from hzero.topology.readers import nccl_dump, read_file
from hzero.topology.tiers import packages_of, tiers_of
from hzero.validation import ConfigError
from tests.ranks import ROOT
from tests.topology.hostile import machine_or_error, mutated
from tests.topology.trees import FRONTIER_LINKS

DUMPS = ROOT.parent / "shared" / "topologies"

PAIR = """<system version="2">
  <cpu numaid="3" arch="x86_64">
    <pci busid="0000:c0:01.0" class="0x060400">
      <pci busid="0000:c1:00.0" class="0x038000" device="0x740c">
        <gpu dev="4" sm="110" gcn="910" rank="0" gdr="1">
          <xgmi target="0000:c6:00.0" count="4" tclass="0x038000"/>
        </gpu>
      </pci>
      <pci busid="0000:c4:00.0" class="0x020000" vendor="0x17db">
        <nic><net name="cxi0" dev="0" speed="200000" port="1" guid="0x1" maxconn="64" gdr="1"/></nic>
      </pci>
    </pci>
    <pci busid="0000:c6:00.0" class="0x038000" device="0x740c">
      <gpu dev="5" sm="110" gcn="gfx90a:sramecc+:xnack-" rank="1" gdr="1">
        <xgmi target="0000:c1:00.0" count="4" tclass="0x038000"/>
      </gpu>
    </pci>
  </cpu>
</system>
"""

SWITCHED = """<system version="1">
  <cpu host_hash="0x16fe" numaid="0">
    <pci busid="0000:18:00.0" class="0x030200" device="0x2335">
      <gpu dev="0" sm="90" rank="0" gdr="1">
        <nvlink target="0000:07:00.0" count="5" tclass="0x068000"/>
        <nvlink target="0000:06:00.0" count="4" tclass="0x068000"/>
      </gpu>
    </pci>
    <pci busid="0000:2a:00.0" class="0x030200" device="0x2335">
      <gpu dev="1" sm="90" rank="1" gdr="1">
        <nvlink target="0000:07:00.0" count="5" tclass="0x068000"/>
        <nvlink target="0000:06:00.0" count="4" tclass="0x068000"/>
        <nvlink target="0000:00:00.0" count="2" tclass="0x068001"/>
      </gpu>
    </pci>
    <nic><net name="eth0" dev="0" speed="10000" port="0" guid="0x0" maxconn="65536" gdr="0"/></nic>
  </cpu>
  <cpu host_hash="0x16fe" numaid="1">
    <nic><net name="eth0" dev="0" speed="10000" port="0" guid="0x0" maxconn="65536" gdr="0"/></nic>
  </cpu>
</system>
"""


def read(tmp_path: Path, text: str) -> Machine:
    path = tmp_path / "dump.xml"
    path.write_text(text)
    return nccl_dump.read(path)


def real_dump(name: str) -> Machine:
    if not DUMPS.is_dir():
        pytest.skip("the dumps are not next to this checkout")
    return read_file(DUMPS / name)


def test_mi250x_dump() -> None:
    machine = real_dump("topo_8p1h.xml")
    gcd = (0, 1, 4, 5, 6, 7, 2, 3)  # Frontier's number by the dump's
    pairs = {tuple(sorted((gcd[link.a], gcd[link.b]))): link.count for link in machine.links}
    assert pairs == FRONTIER_LINKS
    assert packages_of(machine) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert [(nic.name, nic.kind, nic.gb_s) for nic in machine.nics] == [
        (f"mlx5_{number}", "ib", 25.0) for number in (0, 2, 4, 6)
    ]


@pytest.mark.parametrize(
    ("name", "devices", "tiers", "gb_s"),
    [
        ("topo_16p1h.xml", 16, {"gcd": 2, "gpu": 8}, {"gcd": 200.0, "node": 12.5}),
        ("topo_8p_90a.xml", 8, {"gpu": 8}, {"gpu": 50.0}),
        ("topo_8p_940.xml", 8, {"gpu": 8}, {"gpu": 64.0, "node": 50.0}),
        ("topo_4p3l_2h.xml", 8, {"hive": 4, "gpu": 2}, {"hive": 46.0}),
    ],
)
def test_real_dumps(name: str, devices: int, tiers: dict[str, int], gb_s: dict[str, float]) -> None:
    machine = real_dump(name)
    found = {tier.name: tier for tier in tiers_of(machine)}
    assert len(machine.devices) == devices
    assert {tier.name: tier.size for tier in found.values() if tier.size > 1} == tiers
    assert {level: found[level].gb_s for level in gb_s} == gb_s


def test_nearest_nics_of_a_dump() -> None:
    machine = real_dump("topo_8p_940.xml")
    assert [device.nic for device in machine.devices] == [f"mlx5_{number}" for number in range(8)]
    assert [device.numa for device in machine.devices] == [0] * 4 + [1] * 4


def test_a_pair(tmp_path: Path) -> None:
    machine = read(tmp_path, PAIR)
    assert [(d.number, d.bus, d.kind, d.numa, d.nic) for d in machine.devices] == [
        (4, "0000:c1:00.0", "MI250X", 3, "cxi0"),
        (5, "0000:c6:00.0", "MI250X", 3, "cxi0"),
    ]
    assert [(link.a, link.b, link.kind, link.count, link.gb_s) for link in machine.links] == [(4, 5, "xgmi", 4, 200.0)]
    assert [(nic.name, nic.bus, nic.kind, nic.gb_s, nic.numa) for nic in machine.nics] == [
        ("cxi0", "0000:c4:00.0", "cxi", 25.0, 3)
    ]


def test_a_link_that_one_end_does_not_list_is_a_contradiction(tmp_path: Path) -> None:
    one = PAIR.replace('<xgmi target="0000:c1:00.0" count="4" tclass="0x038000"/>', "")
    with pytest.raises(ConfigError, match=r"device \d lists a link to \d, which lists none back"):
        read(tmp_path, one)


def test_switched_nvlinks(tmp_path: Path) -> None:
    machine = read(tmp_path, SWITCHED)
    assert [(link.kind, link.count, link.gb_s) for link in machine.links] == [("nvswitch", 9, 225.0)]
    assert [(nic.name, nic.bus, nic.numa) for nic in machine.nics] == [("eth0", "", None)]
    assert [device.nic for device in machine.devices] == ["eth0", "eth0"]
    for hidden in ("fffffff:ff:ff.0", "fffffff:ffff:ff"):  # containers do not see the switches
        assert read(tmp_path, SWITCHED.replace("0000:07:00.0", hidden)).links == machine.links


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('target="0000:c6:00.0"', 'target="0000:aa:00.0"', "dump.xml:6: xgmi leads to 0000:aa:00.0, which is no gpu"),
        ('target="0000:c6:00.0"', 'target="0000:c1:00.0"', "dump.xml:6: device 4 is linked to itself"),
        ('target="0000:c6:00.0" count="4"', 'target="0000:c6:00.0" count="2"', "dump.xml:15: the two ends of link 4-5"),
        ('count="4"', 'count="-4"', "dump.xml:6: found count '-4'"),
        ('count="4"', 'count="99999999999999999999999"', "dump.xml:6: found count"),
        ('count="4" ', "", "dump.xml:6: xgmi has no attribute count"),
        ('dev="5"', 'dev="4"', "dump.xml:14: gpu 4 at 0000:c6:00.0 is also in line 5"),
        ('dev="5"', 'dev="NaN"', "dump.xml:14: found dev 'NaN'"),
        ('busid="0000:c1:00.0"', 'busid="../../etc"', r"dump.xml:5: found '../../etc', expected a PCI bus id"),
        ('speed="200000"', 'speed="-1"', "dump.xml:10: found speed '-1'"),
        ('version="2"', 'version="3"', "dump.xml:1: found version '3', possible: 1, 2"),
        ("</system>", "", "dump.xml:20: is not valid XML"),
        ("<cpu numaid", '<cpu host_hash="1"/><cpu host_hash="2" numaid', "dump.xml:2: a second host begins"),
        ("<system", "<graphs/><system", "dump.xml:1: found the element 'graphs', expected system"),
    ],
)
def test_contradictions_name_the_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PAIR
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, PAIR.replace(old, new, 1))


BOMB = "".join(f'<!ENTITY l{level} "{f"&l{level - 1};" * 10}">' for level in range(1, 12))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (f'<!DOCTYPE system [<!ENTITY l0 "lol">{BOMB}]>', ":1: has a DOCTYPE"),
        ('<!DOCTYPE system SYSTEM "file:///etc/passwd">', ":1: has a DOCTYPE"),
        ('<!DOCTYPE system [<!ENTITY % x SYSTEM "http://127.0.0.1:1/x"> %x;]>', ":1: has a DOCTYPE"),
        ("<a>" * 100_000, ":1: found the element 'a'"),
        ('<system version="1">' + "<a>" * 100_000, ":1: elements are nested deeper"),
        ("&undeclared;", ":1: is not valid XML"),
    ],
)
def test_bombs(tmp_path: Path, head: str, message: str) -> None:
    path = tmp_path / "bomb.xml"
    path.write_text(head + PAIR)
    assert machine_or_error(nccl_dump.read, path) is None
    with pytest.raises(ConfigError, match=message):
        nccl_dump.read(path)


def test_many_gpus_on_many_switches_end_soon(tmp_path: Path) -> None:
    links = "".join(f'<nvlink target="0000:{switch:02x}:00.0" count="1" tclass="0x068000"/>' for switch in range(32))
    gpus = "".join(
        f'<pci busid="{number:04x}:00:00.0"><gpu dev="{number}" sm="90">{links}</gpu></pci>' for number in range(1100)
    )
    path = tmp_path / "large.xml"
    path.write_text(f'<system version="1"><cpu numaid="0">{gpus}</cpu></system>')
    assert machine_or_error(nccl_dump.read, path) is None


@pytest.mark.parametrize("noise", [b"\x00" * 2**20, b"<" * 2**20, b"<gpu>" * 2**18, b"\xff\xfe" * 2**19, b""])
def test_noise(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "noise"
    path.write_bytes(noise)
    assert machine_or_error(nccl_dump.read, path) is None
    assert machine_or_error(read_file, path) is None


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(mutated(PAIR), mutated(SWITCHED)))
def test_any_change_gives_a_machine_or_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "dump.xml"
    path.write_bytes(content)
    machine_or_error(nccl_dump.read, path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.xml: cannot be read: no such file"):
        read_file(tmp_path / "nowhere.xml")
    with pytest.raises(ConfigError, match="is a folder without class/kfd"):
        read_file(tmp_path)
    (tmp_path / "latin").write_bytes(b"<system name='\xe9'/>")
    with pytest.raises(ConfigError, match="latin: byte 14 is not UTF-8"):
        read_file(tmp_path / "latin")
    (tmp_path / "poem").write_text("Shall I compare thee to a summer's day?\n")
    with pytest.raises(ConfigError, match="poem: is of no known kind; readable are: an XML dump"):
        read_file(tmp_path / "poem")
    with pytest.raises(ConfigError, match="null: is not a regular file"):
        read_file(Path("/dev/null"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(Path("a\0b"))


def test_a_file_larger_than_any_dump(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(33 * 2**20)  # sparse: takes no room
    with pytest.raises(ConfigError, match="large: larger than 8388608 bytes"):
        read_file(path)


BUSES = st.sampled_from(["0000:c1:00.0", "0000:c6:00.0", "0000:c9:00.0", "0000:07:00.0", "fffffff:ff:ff.0", "c1", ""])
NUMBERS = st.sampled_from(["0", "1", "2", "4", "-1", "9" * 25, "NaN", "1.5", ""])
CLASSES = st.sampled_from(["0x038000", "0x068000", "0x068001", "0x030200", ""])
LINKS = st.lists(st.tuples(st.sampled_from(["xgmi", "nvlink"]), BUSES, NUMBERS, CLASSES), max_size=4)
GPUS = st.lists(st.tuples(BUSES, NUMBERS, st.sampled_from(["910", "gfx942", "906", "", "x"]), LINKS), max_size=4)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gpus=GPUS, numa=NUMBERS, speed=NUMBERS)
def test_any_wiring_gives_a_machine_or_an_error(
    tmp_path: Path, gpus: list[tuple[str, str, str, list[tuple[str, str, str, str]]]], numa: str, speed: str
) -> None:
    """Well-formed dumps whose links may be cyclic, lead to their own device or nowhere, or contradict each other."""
    lines = [f'<system version="2"><cpu numaid="{numa}">']
    for bus, number, gcn, links in gpus:
        lines.append(f'<pci busid="{bus}" device="{number}"><gpu dev="{number}" gcn="{gcn}">')
        lines += [f'<{tag} target="{to}" count="{count}" tclass="{kind}"/>' for tag, to, count, kind in links]
        lines.append(f'</gpu><nic><net name="n{number}" speed="{speed}"/></nic></pci>')
    path = tmp_path / "dump.xml"
    path.write_text("\n".join([*lines, "</cpu></system>"]))
    machine = machine_or_error(nccl_dump.read, path)
    if machine is not None:
        assert len(machine.devices) == len(gpus)
