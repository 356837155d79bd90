"""Runs the assembly of gfx90a that hipcc makes of the kernels, wave by wave, in numpy: what an MI250X would compute and how.

It knows the instructions that the kernels use and stops at any other. A division, which takes some ten instructions, is exact
at its last one. Everything else follows "AMD Instinct MI200 Instruction Set Architecture". Memory is the process's own.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

LANES = np.arange(64)
_VCC, _EXEC = 106, 126
_ALL = 2**32 - 1


def _floats(bits: Any) -> Any:
    return np.asarray(bits, np.uint32).view(np.float32)


def _bits(values: Any) -> Any:
    return np.asarray(values, np.float32).view(np.uint32)


def _signed(bits: Any) -> Any:
    return np.asarray(bits, np.uint32).view(np.int32)


def _wide(bits: Any) -> Any:
    return np.asarray(bits, np.uint32).astype(np.uint64)


def _fused(a: Any, b: Any, c: Any) -> Any:
    """A * b + c, rounded once: the product is exact in 64 bits, the sum is rounded to odd there."""
    product, c = _floats(a).astype(np.float64) * _floats(b).astype(np.float64), _floats(c).astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.view(np.uint64) & 1) == 0
    odd = np.where(np.isfinite(error) & (error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return _bits(odd.astype(np.float32))


def _permuted(a: Any, b: Any, selector: Any) -> Any:
    source = _wide(a) << np.uint64(32) | _wide(b)
    result = np.zeros(64, np.uint64)
    for byte in range(4):
        index = _wide(selector) >> np.uint64(8 * byte) & np.uint64(255)
        assert ((index < 8) | (index == 12)).all()  # 12: zero
        taken = np.where(index < 8, source >> (index % 8 * np.uint64(8)) & np.uint64(255), np.uint64(0))
        result |= taken << np.uint64(8 * byte)
    return result.astype(np.uint32)


def _to_integer(low: int, high: int) -> Callable[[Any], Any]:
    return lambda a: np.clip(np.nan_to_num(_floats(a).astype(np.float64)), low, high).astype(np.int64).astype(np.uint32)


def _field(a: Any, start: Any, width: Any) -> Any:
    width = _wide(width) & np.uint64(31)
    return (_wide(a) >> (_wide(start) & np.uint64(31)) & ((np.uint64(1) << width) - np.uint64(1))).astype(np.uint32)


def _signed_field(a: Any, start: Any, width: Any) -> Any:
    field, width = _field(a, start, width).astype(np.int64), _wide(width).astype(np.int64) & 31
    top = np.where(width > 0, np.int64(1) << np.maximum(width - 1, 0), 0)
    return ((field ^ top) - top).astype(np.uint32)


def _class(a: Any, wanted: Any) -> Any:
    """Whether a float is of a wanted class: NaN, and of each sign infinity, normal, subnormal and zero."""
    size = a & np.uint32(0x7FFFFFFF)
    negative = np.select([size == 0x7F800000, size >= 0x800000, size > 0], [2, 3, 4], 5)
    place = np.where(size > 0x7F800000, 1, np.where(a >> 31 > 0, negative, 11 - negative))
    return (_wide(wanted) >> place.astype(np.uint64) & np.uint64(1)) > 0


#: Vector instructions with one result of 32 bits, of sources as uint32.
VECTOR: dict[str, Callable[..., Any]] = {
    "mov_b32": lambda a: a,
    "not_b32": lambda a: ~a,
    "add_u32": lambda a, b: a + b,
    "sub_u32": lambda a, b: a - b,
    "subrev_u32": lambda a, b: b - a,
    "add3_u32": lambda a, b, c: a + b + c,
    "lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
    "xad_u32": lambda a, b, c: (a ^ b) + c,
    "lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "and_or_b32": lambda a, b, c: a & b | c,
    "or3_b32": lambda a, b, c: a | b | c,
    "and_b32": lambda a, b: a & b,
    "or_b32": lambda a, b: a | b,
    "xor_b32": lambda a, b: a ^ b,
    "bfrev_b32": lambda a: np.array([int(f"{x:032b}"[::-1], 2) for x in a], np.uint32),
    "bfi_b32": lambda a, b, c: a & b | ~a & c,
    "lshlrev_b32": lambda a, b: b << (a & 31),
    "lshrrev_b32": lambda a, b: b >> (a & 31),
    "ashrrev_i32": lambda a, b: (_signed(b) >> _signed(a & 31)).view(np.uint32),
    "bfe_u32": _field,
    "bfe_i32": _signed_field,
    "alignbit_b32": lambda a, b, c: (
        ((_wide(a) << np.uint64(32) | _wide(b)) >> _wide(c & 31)) & np.uint64(_ALL)
    ).astype(np.uint32),
    "perm_b32": _permuted,
    "mul_lo_u32": lambda a, b: a * b,
    "mul_hi_u32": lambda a, b: (_wide(a) * _wide(b) >> np.uint64(32)).astype(np.uint32),
    "mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "min_u32": np.minimum,
    "max_u32": np.maximum,
    "max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "min_i32": lambda a, b: np.minimum(_signed(a), _signed(b)).view(np.uint32),
    "max_i32": lambda a, b: np.maximum(_signed(a), _signed(b)).view(np.uint32),
    "med3_i32": lambda a, b, c: np.sort(np.stack([_signed(a), _signed(b), _signed(c)]), axis=0)[1].view(np.uint32),
    "ffbl_b32": lambda a: np.array([(int(x) & -int(x)).bit_length() - 1 for x in a], np.int64).astype(np.uint32),
    "cvt_f32_u32": lambda a: _bits(a.astype(np.float32)),
    "cvt_f32_i32": lambda a: _bits(_signed(a).astype(np.float32)),
    **{f"cvt_f32_ubyte{i}": lambda a, i=i: _bits((a >> 8 * i & 255).astype(np.float32)) for i in range(4)},
    "cvt_u32_f32": _to_integer(0, _ALL),
    "cvt_i32_f32": _to_integer(-(2**31), 2**31 - 1),
    "cvt_f16_f32": lambda a: _floats(a).astype(np.float16).view(np.uint16).astype(np.uint32),
    "cvt_f32_f16": lambda a: _bits((a & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)),
    "mul_f32": lambda a, b: _bits(_floats(a) * _floats(b)),
    "add_f32": lambda a, b: _bits(_floats(a) + _floats(b)),
    "sub_f32": lambda a, b: _bits(_floats(a) - _floats(b)),
    "subrev_f32": lambda a, b: _bits(_floats(b) - _floats(a)),
    "fma_f32": _fused,
    "fmac_f32": _fused,
    "mac_f32": _fused,
    "div_fmas_f32": _fused,
    "div_fixup_f32": lambda a, b, c: _bits(_floats(c) / _floats(b)),
    "rcp_f32": lambda a: _bits(np.float32(1) / _floats(a)),
    "rcp_iflag_f32": lambda a: _bits(np.float32(1) / _floats(a)),
    "floor_f32": lambda a: _bits(np.floor(_floats(a))),
    "max_f32": lambda a, b: _bits(np.fmax(_floats(a), _floats(b))),
    "min_f32": lambda a, b: _bits(np.fmin(_floats(a), _floats(b))),
    "med3_f32": lambda a, b, c: _bits(
        np.fmax(np.fmin(_floats(a), _floats(b)), np.fmin(np.fmax(_floats(a), _floats(b)), _floats(c)))
    ),
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "neq": lambda a, b: a != b,
    "lg": lambda a, b: (a < b) | (a > b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "nlt": lambda a, b: ~(a < b), "nle": lambda a, b: ~(a <= b), "ngt": lambda a, b: ~(a > b), "nge": lambda a, b: ~(a >= b),
    "o": lambda a, b: (a == a) & (b == b), "u": lambda a, b: (a != a) | (b != b),
}  # fmt: skip
TYPES: dict[str, tuple[int, Any]] = {
    "u32": (1, np.uint32), "i32": (1, np.int32), "f32": (1, np.float32), "u64": (2, np.uint64), "i64": (2, np.int64),
    "i16": (1, np.int32),
}  # fmt: skip
#: Scalar instructions of two sources: the result, and SCC unless it only says that the result is not zero.
SCALAR: dict[str, Callable[[int, int, int], tuple[int, int | None]]] = {
    "add_u32": lambda a, b, _: (a + b, a + b > _ALL),
    "addc_u32": lambda a, b, scc: (a + b + scc, a + b + scc > _ALL),
    "sub_u32": lambda a, b, _: (a - b, a < b),
    "subb_u32": lambda a, b, scc: (a - b - scc, a < b + scc),
    "add_i32": lambda a, b, _: (a + b, 0),  # SCC is the overflow, which does not occur here
    "sub_i32": lambda a, b, _: (a - b, 0),
    "and": lambda a, b, _: (a & b, None),
    "or": lambda a, b, _: (a | b, None),
    "xor": lambda a, b, _: (a ^ b, None),
    "andn2": lambda a, b, _: (a & ~b, None),
    "orn2": lambda a, b, _: (a | ~b, None),
    "nor": lambda a, b, _: (~(a | b), None),
    "lshl": lambda a, b, _: (a << (b & 63), None),
    "lshr": lambda a, b, _: (a >> (b & 63), None),
    "bfe_u32": lambda a, b, _: (a >> (b & 31) & (1 << (b >> 16 & 127)) - 1, None),
}


class Wave:
    """Registers of one wave, and how often it has run which instruction."""

    def __init__(self, counts: Counter[str], accesses: Counter[tuple[str, int]]) -> None:
        self.v = np.zeros((256, 64), np.uint32)
        self.s = [0] * 128
        self.scc, self.pc = 0, 0
        self.counts, self.accesses = counts, accesses
        self.set(_EXEC, 2**64 - 1, 2)

    def set(self, register: int, value: int, words: int) -> None:
        """Writes a number into successive scalar registers."""
        for word in range(words):
            self.s[register + word] = value >> 32 * word & _ALL

    def get(self, register: int, words: int) -> int:
        """The number in successive scalar registers."""
        return sum(self.s[register + word] << 32 * word for word in range(words))

    def mask(self, register: int = _EXEC) -> Any:
        """A bit for each lane, by default whether it is active."""
        return (self.get(register, 2) >> LANES.astype(object) & 1).astype(bool)


class Operand:
    """An operand of an instruction, with its modifiers."""

    def __init__(self, text: str) -> None:
        self.negative = text.startswith("-") and not re.fullmatch(r"-[\d.]+", text)
        text = text.removeprefix("-") if self.negative else text
        self.magnitude, self.extends = text.startswith("|"), text.startswith("sext(")
        text = text.strip("|").removeprefix("sext(").removesuffix(")")
        self.kind, self.register, self.words, self.constant = "", 0, 1, 0
        if found := re.fullmatch(r"([vs])(\d+)", text):
            self.kind, self.register = found[1], int(found[2])
        elif found := re.fullmatch(r"([vs])\[(\d+):(\d+)\]", text):
            self.kind, self.register = found[1], int(found[2])
            self.words = int(found[3]) - self.register + 1
        elif text.partition("_")[0] in ("vcc", "exec", "m0"):
            name, _, part = text.partition("_")
            self.kind, self.register = "s", {"vcc": _VCC, "exec": _EXEC, "m0": 124}[name] + (part == "hi")
            self.words = 1 if part or name == "m0" else 2
        elif text != "off":
            self.kind = "c"
            exact = re.fullmatch(r"-?(\d+|0x[0-9a-f]+)", text)
            self.constant = int(text, 0) if exact else struct.unpack("<I", struct.pack("<f", float(text)))[0]

    def vector(self, wave: Wave, word: int = 0) -> Any:
        """A word of it in all lanes, uint32."""
        if self.kind == "v":
            bits = wave.v[self.register + word]
        else:
            bits = np.full(64, self.scalar(wave, 2) >> 32 * word & _ALL, np.uint32)
        if self.magnitude:
            bits = bits & np.uint32(0x7FFFFFFF)
        return bits ^ np.uint32(0x80000000) if self.negative else bits

    def scalar(self, wave: Wave, words: int = 1) -> int:
        """Its value, of a constant or of scalar registers."""
        if self.kind == "c":
            return self.constant & (1 << 32 * words) - 1
        return wave.get(self.register, min(words, max(self.words, 1)))


def _selected(bits: Any, select: str, extends: bool) -> Any:
    """SDWA: a byte or half of a source."""
    if select == "DWORD":
        return bits
    width, index = (8 if select.startswith("BYTE") else 16), int(select[-1])
    return (_signed_field if extends else _field)(bits, np.full(64, index * width), np.full(64, width))


def _lanes_of(options: dict[str, str]) -> Any:
    """DPP: which lane each one reads, -1 for none."""
    if "quad_perm" in options:
        order = np.array([int(i) for i in options["quad_perm"].strip("[]").split(",")])
        return LANES // 4 * 4 + order[LANES % 4]
    if "row_mirror" in options:
        return LANES // 16 * 16 + 15 - LANES % 16
    if "row_half_mirror" in options:
        return LANES // 8 * 8 + 7 - LANES % 8
    assert options.get("wave_shr") == "1", options
    return LANES - 1


_WIDTHS = {"byte": 1, "ubyte": 1, "short": 2, "ushort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_OPTION = re.compile(r"\b([a-z]\w*):(\[[^\]]*\]|\S+)|\b(row_mirror|row_half_mirror|clamp|glc)\b")


def _decoded(line: str, labels: dict[str, int]) -> Callable[[Wave], None]:
    """A function that does what an instruction says."""
    name, _, rest = line.partition(" ")
    options = {found[1] or found[3]: found[2] or "" for found in _OPTION.finditer(rest)}
    texts = re.split(r",\s*(?![^\[]*\])", _OPTION.sub("", rest).strip()) if rest.strip() else []
    texts = (
        [word for text in texts for word in text.split()] if name.startswith("global") else [t.strip() for t in texts]
    )
    name = re.sub(r"_(e32|e64|sdwa|dpp)$", "", name)
    if name.startswith(("s_branch", "s_cbranch")):
        return _branch(name, labels[texts[0]])
    if name in ("s_waitcnt", "s_nop", "s_endpgm"):
        return lambda wave: None
    operands = [Operand(text) for text in texts]
    if name.startswith("s_"):
        return _scalar(name[2:], operands)
    if name.startswith("global_"):
        return _memory(name, operands, int(options.get("offset", "0"), 0))
    if name == "ds_bpermute_b32":
        return lambda wave: _write(wave, operands[0], wave.v[operands[2].register][operands[1].vector(wave) // 4 % 64])
    return _vector(name[2:], operands, options)


def _write(wave: Wave, to: Operand, bits: Any, word: int = 0) -> None:
    np.copyto(wave.v[to.register + word], bits, where=wave.mask())


def _lane_bits(wave: Wave, condition: Any) -> int:
    return int(sum(1 << int(i) for i in np.flatnonzero(condition & wave.mask())))


def _branch(name: str, target: int) -> Callable[[Wave], None]:
    def run(wave: Wave) -> None:
        kind = name.rpartition("_")[2]
        vcc, execs = wave.get(_VCC, 2), wave.get(_EXEC, 2)
        taken = {"branch": True, "scc0": not wave.scc, "scc1": wave.scc, "vccz": not vcc, "vccnz": vcc}
        taken |= {"execz": not execs, "execnz": execs}
        if taken[kind]:
            wave.pc = target

    return run


def _scalar(name: str, operands: list[Operand]) -> Callable[[Wave], None]:
    words = 2 if name.endswith("64") else 1
    stem = re.sub(r"_[biu](32|64)$", "", name)

    def run(wave: Wave) -> None:
        if name.startswith("load_dword"):
            count = int(name.partition("x")[2] or 1)
            address = operands[1].scalar(wave, 2) + operands[2].scalar(wave)
            value = int.from_bytes(ctypes.string_at(address, 4 * count), "little")
            wave.set(operands[0].register, value, count)
            return
        # Instructions with k have a constant of 16 bits, whose sign counts.
        values = [one.scalar(wave, words) for one in operands[0 if stem.startswith(("cmp", "bitcmp")) else 1 :]]
        if stem.endswith("k") or stem.startswith("cmpk"):
            values[-1] = ((values[-1] & 0xFFFF ^ 0x8000) - 0x8000) & _ALL
        if stem.startswith("cmp"):
            one, other = values
            if "_i" in name:
                one, other = ((x ^ 1 << 31) - (1 << 31) for x in values)
            wave.scc = int(COMPARE[stem.partition("_")[2]](one, other))
        elif stem.startswith("bitcmp"):
            wave.scc = int((values[0] >> values[1] % 32 & 1) == int(stem[-1]))
        elif stem.endswith("_saveexec"):
            wave.set(operands[0].register, before := wave.get(_EXEC, 2), 2)
            result, _ = SCALAR[stem.removesuffix("_saveexec")](values[0], before, 0)
            wave.set(_EXEC, result, 2)
            wave.scc = int(wave.get(_EXEC, 2) != 0)
        elif name == "bcnt1_i32_b64":
            wave.set(operands[0].register, count := values[0].bit_count(), 1)
            wave.scc = int(count > 0)
        elif stem in ("mulk", "addk"):
            before = operands[0].scalar(wave)
            wave.set(operands[0].register, before * values[0] if stem == "mulk" else before + values[0], 1)
        elif stem in ("mov", "movk", "brev", "mul", "mul_hi", "cselect", "not"):
            a, b = values[0], values[1:]
            constant: dict[str, Callable[[], int]] = {
                "mov": lambda: a,
                "movk": lambda: a,
                "not": lambda: ~a,
                "mul": lambda: a * b[0],
            }
            constant |= {"mul_hi": lambda: a * b[0] >> 32, "cselect": lambda: a if wave.scc else b[0]}
            constant |= {"brev": lambda: int(f"{a:032b}"[::-1], 2)}
            wave.set(operands[0].register, constant[stem](), words)
            if stem == "not":
                wave.scc = int(wave.get(operands[0].register, words) != 0)
        elif stem in ("max", "min"):
            result = max(values) if stem == "max" else min(values)
            assert "_u" in name
            wave.scc = int(result == values[0])
            wave.set(operands[0].register, result, words)
        elif stem == "ashr":
            bits = 32 * words
            wave.set(operands[0].register, ((values[0] ^ 1 << bits - 1) - (1 << bits - 1)) >> values[1] % bits, words)
            wave.scc = int(wave.get(operands[0].register, words) != 0)
        else:
            operation = SCALAR.get(name) or SCALAR[stem]
            result, scc = operation(values[0], values[1], wave.scc)
            wave.set(operands[0].register, result, words)
            wave.scc = int(wave.get(operands[0].register, words) != 0 if scc is None else scc)

    return run


def _memory(name: str, operands: list[Operand], offset: int) -> Callable[[Wave], None]:
    _, kind, what, *half = name.split("_")
    loads, high = kind == "load", half[-1:] == ["hi"]
    size = _WIDTHS.get(what, 8 if half[-1:] == ["x2"] else 4)  # of an atomic addition

    def run(wave: Wave) -> None:
        at = operands[1 if loads else 0]
        base = next((one.scalar(wave, 2) for one in operands if one.kind == "s"), None)
        address = _wide(wave.v[at.register])
        if base is None:
            address = address | _wide(wave.v[at.register + 1]) << np.uint64(32)
        data = operands[0 if loads else 1]
        wave.accesses[kind, size] += int(wave.mask().sum())
        for lane in np.flatnonzero(wave.mask()):
            place = (int(address[lane]) + (base or 0) + offset) % 2**64
            if loads:
                read = ctypes.string_at(place, size).ljust(-(-size // 4) * 4, b"\0")
                wave.v[data.register : data.register + len(read) // 4, lane] = np.frombuffer(read, np.uint32)
                continue
            source = wave.v[data.register : data.register + max(size // 4, 1), lane].tobytes()[2 * high :][:size]
            if kind == "atomic":
                total = int.from_bytes(source, "little") + int.from_bytes(ctypes.string_at(place, size), "little")
                source = (total % 2**64).to_bytes(size, "little")
            ctypes.memmove(place, source, size)

    return run


def _vector(name: str, operands: list[Operand], options: dict[str, str]) -> Callable[[Wave], None]:
    stem, _, kind = name.rpartition("_")

    def source(wave: Wave, index: int, word: int = 0) -> Any:
        bits = operands[index].vector(wave, word)
        place = index - 1
        if place == 0 and any(key in options for key in ("quad_perm", "row_mirror", "row_half_mirror", "wave_shr")):
            lanes = _lanes_of(options)
            there = (lanes >= 0) & wave.mask()[lanes]  # bound_ctrl: zero from elsewhere
            bits = np.where(there, bits[lanes], np.uint32(0))
        return _selected(bits, options.get(f"src{place}_sel", "DWORD"), operands[index].extends)

    def pair(wave: Wave, index: int) -> Any:
        low, high = source(wave, index), operands[index].vector(wave, 1)
        if operands[index].kind == "s" and operands[index].words == 1:
            high = np.zeros(64, np.uint32)
        return _wide(low) | _wide(high) << np.uint64(32)

    def put(wave: Wave, value: Any) -> None:
        _write(wave, operands[0], (value & np.uint64(_ALL)).astype(np.uint32))
        _write(wave, operands[0], (value >> np.uint64(32)).astype(np.uint32), 1)

    def run(wave: Wave) -> None:
        if name == "cmp_class_f32":
            wave.set(operands[0].register, _lane_bits(wave, _class(source(wave, 1), source(wave, 2))), 2)
        elif name == "readfirstlane_b32":
            first = int(np.flatnonzero(wave.mask())[0]) if wave.get(_EXEC, 2) else 0
            wave.set(operands[0].register, int(operands[1].vector(wave)[first]), 1)
        elif stem.startswith("cmp_"):
            words, dtype = TYPES[kind]
            if kind == "i16":  # of the low halves
                a, b = (
                    _signed_field(source(wave, index), np.full(64, 0), np.full(64, 16)).view(dtype) for index in (1, 2)
                )
            else:
                a, b = ((source if words == 1 else pair)(wave, index).view(dtype) for index in (1, 2))
            wave.set(operands[0].register, _lane_bits(wave, COMPARE[stem.removeprefix("cmp_")](a, b)), 2)
        elif name == "cndmask_b32":
            _write(wave, operands[0], np.where(wave.mask(operands[3].register), source(wave, 2), source(wave, 1)))
        elif "co_u32" in name:
            a, b = _wide(source(wave, 2)), _wide(source(wave, 3))
            carry = _wide(wave.mask(operands[4].register)) if len(operands) > 4 else np.uint64(0)
            a, b = (b, a) if "rev" in name else (a, b)
            total = a + b + carry if name.startswith("add") else a - b - carry
            _write(wave, operands[0], (total & np.uint64(_ALL)).astype(np.uint32))
            wave.set(operands[1].register, _lane_bits(wave, total > _ALL), 2)
        elif name == "mad_u64_u32":
            put(wave, _wide(source(wave, 2)) * _wide(source(wave, 3)) + pair(wave, 4))
        elif kind in ("b64", "i64") and stem in ("lshlrev", "lshrrev", "ashrrev"):
            value, by = pair(wave, 2), _wide(source(wave, 1)) & np.uint64(63)
            shifted = {"lshlrev": value << by, "lshrrev": value >> by}
            shifted["ashrrev"] = (value.view(np.int64) >> by.view(np.int64)).view(np.uint64)
            put(wave, shifted[stem])
        elif stem.startswith("pk_"):
            packed(wave)
        elif name == "swap_b32":
            first, second = (operands[index].vector(wave).copy() for index in (0, 1))
            _write(wave, operands[0], second)
            _write(wave, operands[1], first)
        elif name == "div_scale_f32":
            _write(wave, operands[0], source(wave, 2))
            wave.set(operands[1].register, 0, 2)
        else:
            sources = [source(wave, index) for index in range(1, len(operands))]
            if name in ("fmac_f32", "mac_f32"):
                sources.append(operands[0].vector(wave))
            result = VECTOR[name](*sources)
            if "clamp" in options:
                assert name == "sub_u32"
                result = np.where(sources[0] < sources[1], np.uint32(0), result)
            select = options.get("dst_sel", "DWORD")
            if select != "DWORD":
                width, index = (8 if select.startswith("BYTE") else 16), int(select[-1])
                keeps = np.uint32(((1 << width) - 1) << index * width)
                placed = (result << np.uint32(index * width)) & keeps
                rest = operands[0].vector(wave) if options["dst_unused"] == "UNUSED_PRESERVE" else np.uint32(0)
                result = placed | rest & ~keeps
            _write(wave, operands[0], result)

    def packed(wave: Wave) -> None:
        count = len(operands) - 1
        low, high = (
            [int(i) for i in options.get(key, f"[{','.join(default * count)}]").strip("[]").split(",")]
            for key, default in (("op_sel", "0"), ("op_sel_hi", "1"))
        )
        if stem == "pk_mov":  # the first source gives the low word, the second one the high word
            results = [source(wave, 1, low[0]), source(wave, 2, low[1])]
        else:
            results = []
            for half, select in (("neg_lo", low), ("neg_hi", high)):
                negative = [int(i) for i in options.get(half, f"[{','.join('0' * count)}]").strip("[]").split(",")]
                sources = [
                    operands[i + 1].vector(wave, select[i] if operands[i + 1].kind != "c" else 0)
                    ^ np.uint32(negative[i] << 31)
                    for i in range(count)
                ]
                results.append(VECTOR[f"{stem.removeprefix('pk_')}_f32"](*sources))
        for word, bits in enumerate([bits.copy() for bits in results]):
            _write(wave, operands[0], bits, word)

    return run


class Kernel:
    """One kernel of an assembly listing."""

    def __init__(self, text: str, name: str) -> None:
        body = re.search(rf"^{name}:.*?\n(.*?)^\.Lfunc_end", text, re.DOTALL | re.MULTILINE)
        assert body, name
        self.lines: list[str] = []
        labels: dict[str, int] = {}
        for line in body[1].splitlines():
            line = re.sub(r"\s+", " ", line.partition(";")[0]).strip()
            if line.endswith(":"):
                labels[line[:-1]] = len(self.lines)
            elif line and not line.startswith("."):
                self.lines.append(line)
        self.steps = [_decoded(line, labels) for line in self.lines]
        self.names = [line.partition(" ")[0] for line in self.lines]
        described = re.search(rf"\.amdhsa_kernel {name}\n(.*?)\.end_amdhsa_kernel", text, re.DOTALL)
        assert described
        user = dict(re.findall(r"\.amdhsa_user_sgpr_(\w+) (\d+)", described[1]))
        #: User registers in their order; the pointer to the arguments and, behind them all, the workgroup's index.
        before = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2}
        self.argument = sum(size for key, size in before.items() if user.get(key) == "1")
        later = {"kernarg_segment_ptr": 2, "dispatch_id": 2, "flat_scratch_init": 2, "private_segment_size": 1}
        self.group = self.argument + sum(size for key, size in later.items() if user.get(key) == "1")

    def run(self, bucket: np.ndarray, workgroup: int, wave_index: int, counts: Any, accesses: Any) -> None:
        """Runs one wave to its end."""
        wave = Wave(counts, accesses)
        wave.set(self.argument, bucket.ctypes.data, 2)
        wave.s[self.group] = workgroup
        wave.v[0] = LANES + 64 * wave_index
        while self.names[wave.pc] != "s_endpgm":
            index = wave.pc
            wave.pc += 1
            counts[self.names[index]] += 1
            self.steps[index](wave)


class Simulated:
    """Starts kernels of gfx90a on this processor, a wave at a time.

    Args:
        assembly: The text of a family's listing.
    """

    on_device, kind = True, "cpu"

    def __init__(self, assembly: Callable[[str], str]) -> None:
        self.assembly = functools.cache(assembly)
        self._kernel = functools.cache(lambda family, name: Kernel(self.assembly(family), name))
        self.counts: Counter[str] = Counter()
        self.accesses: Counter[tuple[str, int]] = Counter()
        self.waves = 0

    def kernel(self, family: str, name: str) -> Any:
        """The launcher of a kernel."""
        return functools.partial(self.launch, family, name)

    def launch(self, family: str, kernel: str, bucket: np.ndarray, workgroups: int, device: torch.device) -> None:
        """Runs all waves of a launch, one after the other."""
        code = self._kernel(family, kernel)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            for group in range(workgroups):
                for wave in range(4):
                    code.run(bucket, group, wave, self.counts, self.accesses)
                    self.waves += 1
