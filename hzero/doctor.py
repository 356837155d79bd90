"""``hzero doctor``: what this machine runs hzero on, and whether that is what it could."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hzero import __version__
from hzero.codecs import Codec, backends
from hzero.config import CodecConfig

STATES = ("good", "degraded", "unusable")
OPERATORS = ("encode", "encode_feedback", "decode", "decode_sum", "decode_sum_encode")
_CHUNKS = (517, 64)
_PACKAGES = ("torch", "deepspeed", "cupy-rocm-7-0", "cupy-cuda13x", "mpi4py", "numpy")
_EXAMPLES = """exit status: 0 good, 1 degraded (works, slower than this machine could), 2 unusable

examples:
  hzero doctor
  hzero doctor --json
  HZERO_BACKEND=hip hzero doctor        fails where the HIP kernels cannot be used"""


def run_doctor(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments; the exit status is the place of the verdict in `STATES`."""
    parser = argparse.ArgumentParser(
        prog="hzero doctor",
        description="Tells which backend computes each codec operator here and why, tries them, and lists versions.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parsed = parser.parse_args(list(arguments))
    found = examine()
    if parsed.json:
        print(json.dumps(found, indent=1))
    else:
        _show(found, Console())
    return STATES.index(found["verdict"])


def examine() -> dict[str, Any]:
    """What ``hzero doctor --json`` prints: versions, operators of each kind of device, verdict and remarks."""
    operators: list[dict[str, Any]] = []
    remarks, verdict = [], 0
    for kind in ("cpu", "cuda"):
        if kind == "cuda" and not torch.cuda.is_available():
            remarks.append("gpu: torch finds none")
            continue
        device = torch.cuda.get_device_name() if kind == "cuda" else platform.processor() or platform.machine()
        chosen = backends.choice(kind)
        if chosen.fallback:
            verdict = max(verdict, 1)
            remarks.append(f"{kind}: codecs run in plain torch, several times slower: {chosen.why}")
        for codecs, name, why in (
            (("int8", "int4"), chosen.name, chosen.why),
            (("none", "bf16"), "reference", "copies and casts, which torch does at the speed of memory"),
        ):
            wrong = [f"{kind}: {text}" for codec in codecs for text in _wrong(kind, codec)]
            if wrong:
                verdict = 2
            remarks += wrong
            operators.append(
                {
                    "device": device,
                    "operators": list(OPERATORS),
                    "codecs": list(codecs),
                    "backend": name,
                    "why": why,
                    "equal_to_reference": not wrong,
                }
            )
    return {
        "verdict": STATES[verdict],
        "remarks": remarks,
        "versions": {"hzero": __version__, "python": platform.python_version(), **_versions()},
        "operators": operators,
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _wrong(kind: str, codec: str) -> list[str]:
    """Tries a codec's operators on a bucket of awkward sizes: what differs from the reference on the same device."""
    own = Codec.from_config(CodecConfig(codec=codec, block_size=128))
    generator = torch.Generator().manual_seed(0)
    source = [torch.randn(4 * chunk, generator=generator).to(kind) for chunk in _CHUNKS]
    try:
        got = _try(own, source)
    except RuntimeError as error:  # a kernel that does not compile or start
        return [f"{codec} fails: {error}"]
    with backends.reference_instead():
        want = _try(own, source)
    return [
        f"{name} {codec} is not what the reference gives"
        for name in OPERATORS
        if not all(torch.equal(ours, theirs) for ours, theirs in zip(got[name], want[name]))
    ]


def _try(codec: Codec, source: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Results of every operator."""
    sizes, strides = [2, 2], [1, 2]
    message = codec.encode(source, _CHUNKS, sizes=sizes, strides=strides, outer=2)
    residuals = [torch.ones_like(tensor) for tensor in source]
    fed, left = codec.encode_feedback(source, residuals, [0.5, 2.0], _CHUNKS, sizes=sizes, strides=strides, outer=2)
    return {
        "encode": [message],
        "encode_feedback": [fed, *left],
        "decode": codec.decode(message, _CHUNKS, dtype=torch.float32, sizes=sizes, strides=strides, outer=2),
        "decode_sum": codec.decode_sum(message, 2, _CHUNKS, inner=2, dtype=torch.float32),
        "decode_sum_encode": [
            codec.decode_sum_encode(message, 2, _CHUNKS, inner=2, dtype=torch.float32, to=codec, outer=2)
        ],
    }


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table(title="codec operators", title_justify="left")
    for column in ("device", "codecs", "backend", "tried", "why"):
        table.add_column(column, overflow="fold", no_wrap=column != "why")
    for row in found["operators"]:
        tried = "-" if row["backend"] == "reference" else "equal" if row["equal_to_reference"] else "WRONG"
        table.add_row(row["device"], ", ".join(row["codecs"]), row["backend"], tried, row["why"])
    console.print(table)
    versions = [f"{name} {number or '-'}" for name, number in found["versions"].items()]
    console.print("versions: " + ", ".join(versions), highlight=False)
    for remark in found["remarks"]:
        console.print(remark, highlight=False, markup=False)
    console.print(f"verdict: {found['verdict']}", highlight=False)
