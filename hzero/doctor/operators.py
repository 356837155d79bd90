"""Codec operators of this process: the backend of each, tried against the reference."""

from __future__ import annotations

import platform
from typing import Any

import torch

from hzero.codecs import Codec, backends
from hzero.codecs.ops import OPERATORS
from hzero.config import SUMMED, CodecConfig, CodecName
from hzero.doctor.verdict import DEGRADED, GOOD, UNUSABLE, Findings

_CHUNKS = (517, 64)
_RATE = 9  # bits of a value in codec zfp: blocks that end in the middle of a byte


def examine_operators(findings: Findings) -> list[dict[str, Any]]:
    """One row per kind of device and group of codecs: backend, the reason for it, and whether it gives the reference's bits."""
    rows: list[dict[str, Any]] = []
    for kind in ("cpu", "cuda"):
        if kind == "cuda" and not torch.cuda.is_available():
            findings.add(GOOD, "gpu: torch finds none")
            continue
        device = torch.cuda.get_device_name() if kind == "cuda" else platform.processor() or platform.machine()
        chosen = backends.choice(kind)
        if chosen.fallback:
            findings.add(DEGRADED, f"{kind}: codecs run in plain torch, several times slower: {chosen.why}")
        groups: tuple[tuple[tuple[CodecName, ...], str, str], ...] = (
            (("int8", "int4", "exp"), chosen.name, chosen.why),
            (
                ("zfp", "mpc"),
                *((chosen.name, chosen.why) if kind == "cpu" else ("reference", "no kernels for devices")),
            ),
            (("none", "bf16"), "reference", "copies and casts, which torch does at the speed of memory"),
        )
        for codecs, name, why in groups:
            wrong = [f"{kind}: {text}" for codec in codecs for text in _wrong(kind, codec)]
            findings.add(UNUSABLE, *wrong)
            rows.append(
                {
                    "device": device,
                    "operators": list(OPERATORS),
                    "codecs": list(codecs),
                    "backend": name,
                    "why": why,
                    "equal_to_reference": not wrong,
                }
            )
    return rows


def _wrong(kind: str, codec: CodecName) -> list[str]:
    """Tries a codec's operators on a bucket of awkward sizes: differences from the reference on the same device."""
    plain = Codec.from_config(CodecConfig(codec=codec, block_size=128, rate=_RATE if codec == "zfp" else None))
    tried: dict[str, Codec] = {codec: plain}
    if plain.format.scale_bytes:
        tried[f"{codec} rotated"] = Codec.from_config(CodecConfig(codec=codec, block_size=128, rotation=128))
        tried[f"{codec} with coded scales"] = Codec.from_config(CodecConfig(codec=codec, block_size=64, scale="int8"))
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if codec == "exp" else torch.float32
    source = [torch.randn(4 * chunk, generator=generator).to(kind, dtype) for chunk in _CHUNKS]
    try:
        got = {f"{name} {what}": found for what, own in tried.items() for name, found in _try(own, source).items()}
    except RuntimeError as error:  # a kernel that does not compile or start
        return [f"{codec} fails: {error}"]
    with backends.reference_instead():
        want = {f"{name} {what}": found for what, own in tried.items() for name, found in _try(own, source).items()}
    return [
        f"{name} differs from the reference"
        for name, theirs in want.items()
        if not all(torch.equal(one, other) for one, other in zip(got[name], theirs, strict=True))
    ]


def _try(codec: Codec, source: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Results of every operator that the codec has: ``exp`` and ``mpc`` encode no sums."""
    sizes, strides, dtype = [2, 2], [1, 2], source[0].dtype
    message = codec.encode(source, _CHUNKS, sizes=sizes, strides=strides, outer=2)
    sums = [torch.ones(2 * chunk, device=message.device) for chunk in _CHUNKS]
    onto = [torch.ones(4 * chunk, device=message.device, dtype=dtype) for chunk in _CHUNKS]
    codec.decode_onto(message, onto, _CHUNKS, sizes=sizes, strides=strides, outer=2)
    results = {
        "encode": [message],
        "decode_onto": onto,
        "decode": codec.decode(message, _CHUNKS, dtype=dtype, sizes=sizes, strides=strides, outer=2),
        "decode_sum": codec.decode_sum(message, 2, _CHUNKS, inner=2, dtype=dtype),
        "decode_add": codec.decode_sum(message, 2, _CHUNKS, inner=2, dtype=dtype, into=sums),
    }
    if codec.name not in SUMMED:
        return results
    residuals = [torch.ones_like(tensor) for tensor in source]
    fed, left = codec.encode_feedback(source, residuals, [0.5, 2.0], _CHUNKS, sizes=sizes, strides=strides, outer=2)
    results["encode_feedback"] = [fed, *left]
    results["encode_difference"] = [codec.encode_difference(source, residuals, _CHUNKS)]
    results["decode_sum_encode"] = [
        codec.decode_sum_encode(message, 2, _CHUNKS, inner=2, dtype=dtype, to=codec, outer=2)
    ]
    return results
