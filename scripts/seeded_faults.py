#!/usr/bin/env python3
"""Seeds faults in a copy of the checkout, one at a time, and records which tests find them.

    python scripts/seeded_faults.py                 all faults, each with the tests that it names
    python scripts/seeded_faults.py NAME ...        some faults; the record keeps the others
    python scripts/seeded_faults.py --all NAME ...  with the whole suite
    python scripts/seeded_faults.py --check         only whether each text still occurs once, in a second

A change of the tests must still find every fault that the record says is found. A test counts if it fails with the fault and
passes without it. Faults of C++ sources need cmake and a C++ compiler.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_suffix(".json")
LIBRARY = "hzero/native/libhzero_host.so"
#: Maximum seconds of the named tests. A fault may make ranks wait for each other, which ends only after minutes.
TIMEOUT_S = 300.0
#: The same with the whole suite.
TIMEOUT_ALL_S = 3600.0
#: Follows tests that were ended, since a fault can make ranks wait for each other.
NO_END = ": no end in time"


class Fault(NamedTuple):
    """A fault.

    Attributes:
        name: Its name in the record. It says what goes wrong.
        file: The file to change.
        old: The text to replace, which occurs once.
        new: The wrong text.
        tests: Arguments of pytest for the tests that are most likely to find it, the most likely ones first. One argument may
            have its own ``-k``; a run of pytest has only one, so it is a run of its own.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


STAGE, FSDP, TIERED = "tests/deepspeed/test_stage.py", "tests/fsdp/test_fsdp.py", "tests/comm/test_tiered.py"
CODECS, KERNELS = "tests/codecs", "tests/kernels/test_kernels.py"
#: Without emulated devices, which are compiled for minutes.
HOST = f"{KERNELS} -k not wave"
ENGINE, CHECKPOINT = "tests/engine/test_engine.py", "tests/deepspeed/test_checkpoint.py"
PARITY = "tests/parity/test_parity.py"

# fmt: off
FAULTS = (
    # ---- CPU kernels; library.cpp first, so that the other files are compiled once -----------------------------------
    Fault("fingerprint-ignores-the-order-of-tensors", "hip_kernels/host/library.cpp",
          "place += (*bytes + 3) / 4;", "place += 0;",
          ("tests/comm/test_checksum.py", f"{HOST} and checksum", f"{FSDP} -k writes")),
    Fault("threads-leave-out-a-block-between-them", "hip_kernels/host/library.cpp",
          "work(count * k / parts, count * (k + 1)", "work(count * k / parts + 1, count * (k + 1)",
          (f"{KERNELS} -k threads and not wave", HOST)),
    Fault("residual-of-a-block-that-is-not-finite", "hip_kernels/host/codec.cpp",
          "or_zero(load<Floats>(sums + i) - codes * scales[i / size])",
          "load<Floats>(sums + i) - codes * scales[i / size]", (f"{KERNELS} -k special and not wave", HOST, CODECS)),
    Fault("scales-of-stochastic-codes-rounded-to-nearest", "hip_kernels/host/codec.cpp",
          "((Words)x + 0xffff) & 0xffff0000", "((Words)x + 0x7fff) & 0xffff0000",
          ("tests/codecs/test_codec_payload.py -k bit_for_bit", HOST, CODECS)),
    Fault("zfp-fills-a-short-block-with-another-value", "hip_kernels/host/zfp.h",
          "values[3] = values[0];", "values[3] = values[2];", ("tests/codecs/test_zfp.py", HOST)),
    Fault("part-of-a-block-is-rotated", "hip_kernels/host/rotation.h",
          "count % size ? count / bucket.block_size * bucket.block_size : count",
          "count / size * size", ("tests/codecs/test_codec_payload.py -k bit_for_bit", HOST, CODECS)),
    # ---- codecs -----------------------------------------------------------------------------------------------------
    Fault("noise-repeats-in-every-tensor", "hzero/codecs/blocks.py",
          "_noise(quotients, seed, first_block * fmt.block_size)", "_noise(quotients, seed, 0)",
          ("tests/codecs/test_codec_numerics.py -k noise or seed",
           "tests/codecs/test_codec_payload.py -k bit_for_bit", HOST)),
    Fault("scale-limit-for-the-highest-code", "hzero/codecs/formats.py",
          "FLOATS[source].largest / self.levels", "FLOATS[source].largest / self.codes.highest",
          ("tests/codecs/test_codec_numerics.py -k largest", "tests/codecs/test_codec_payload.py -k limits", HOST,
           CODECS)),
    Fault("last-rank-owns-an-element-of-padding", "hzero/codecs/formats.py",
          "max(numel - rank * chunk, 0), chunk)", "max(numel - rank * chunk + 1, 0), chunk)",
          (f"{ENGINE} -k padding", ENGINE)),
    Fault("checksum-places-restart-in-each-slice", "hzero/codecs/reference.py",
          "torch.arange(start // 4 + 1, start // 4 + 1 + words.shape[1]", "torch.arange(1, 1 + words.shape[1]",
          ("tests/comm/test_checksum.py", f"{HOST} and checksum", f"{CODECS}/test_codec_operators.py")),
    Fault("library-of-other-sources-is-used", "hzero/codecs/launchers.py",
          "hash_files(sources) if sources else built[2]", "built[2]", ("tests/kernels/test_backends.py",)),
    Fault("length-of-an-mpc-record-unchecked", "hzero/codecs/mpc.py",
          "if not 0 < length <= min(row_bytes, len(sent)) or length % 16:", "if length % 16:",
          ("tests/codecs/test_mpc.py", "tests/kernels/test_hostile_payloads.py", f"{TIERED} -k mpc")),
    # ---- comm -------------------------------------------------------------------------------------------------------
    Fault("checksums-not-compared", "hzero/comm/lanes.py",
          'would have to wait."""\n        comparison.check()\n', 'would have to wait."""\n',
          ("tests/comm/test_checksum.py", f"{TIERED} -k checksums")),
    Fault("hops-share-their-noise", "hzero/comm/runtime.py",
          "* _SALT if index and", "* 0 if index and", (f"{TIERED} -k codec or error", CODECS, ENGINE, f"{PARITY} -k codecs")),
    Fault("copies-coded-again-with-a-seed-of-each-rank", "hzero/comm/runtime.py",
          "seed = call.seed if stage else call.first_seed", "seed = call.first_seed",
          (f"{TIERED} -k same_bits or hold_alike", ENGINE)),
    Fault("residuals-of-a-skipped-step-are-kept", "hzero/comm/runtime.py",
          "            kept.values.zero_()\n", "            kept.scale *= 1.0\n",
          (f"{STAGE} -k residual", f"{FSDP} -k not_finite or residuals")),
    Fault("failed-hop-does-not-stop-its-lane", "hzero/comm/lanes.py",
          "if not started and lane is not None:  # peers", "if started and index < 0:  # peers", ("tests/comm/test_order.py",)),
    Fault("drain-waits-for-nothing", "hzero/comm/lanes.py",
          "            for chain in under_way:\n                chain.wait()\n", "            break\n",
          (f"{TIERED} -k draining", "tests/comm/test_order.py")),
    Fault("strict-order-is-an-order-of-each-lane", "hzero/comm/lanes.py",
          'place = lane if self.order == "lanes" else None', "place = lane",
          ("tests/comm/test_order.py", f"{STAGE} -k order")),
    Fault("ranks-with-other-settings-are-accepted", "hzero/comm/peers.py",
          "if len({digest for _, digest in every}) > 1:", "if not every:", (f"{TIERED} -k settings",)),
    Fault("rank-that-is-behind-hides-one-that-is-gone", "hzero/comm/watchdog.py",
          "unequal or gone or blamed or behind", "unequal or behind or gone or blamed",
          ("tests/comm/test_watchdog.py",)),
    Fault("halves-of-an-all-reduce-share-residuals", "hzero/comm/communicator.py",
          'residual=f"{copying[0].tier} again"', "residual=copying[0].tier",
          (f"{TIERED} -k error_feedback",)),
    # ---- engine -----------------------------------------------------------------------------------------------------
    Fault("write-on-one-rank-is-not-refreshed", "hzero/engine/engine.py",
          "numbers, dist.ReduceOp.MAX", "numbers, dist.ReduceOp.MIN",
          (f"{PARITY} -k edits", "tests/faults/test_between_steps.py")),
    Fault("payloads-read-as-if-adjacent", "hzero/engine/weights.py",
          "if payload.storage_offset() != end or payload", "if payload",
          (ENGINE, "tests/deepspeed/test_units.py", "tests/faults/test_between_steps.py")),
    Fault("gather-of-the-former-size-is-cached", "hzero/engine/weights.py",
          "* param.code_bytes != param.chunk:", "* param.code_bytes < 0:",
          (ENGINE, f"{PARITY} -k edits or exceptions", "tests/faults/test_kinds.py")),
    Fault("write-behind-encoded-changes-goes-unnoticed", "hzero/engine/weights.py",
          "exact.encode(new, old, one.record)\n            self._take_fingerprints(one.params)",
          "exact.encode(new, old, one.record)", (f"{ENGINE} -k write_behind", ENGINE)),
    Fault("changes-of-a-weight-that-was-edited", "hzero/engine/weights.py",
          "            param.known = False\n", "", (f"{ENGINE} -k found",)),
    Fault("new-weights-are-not-compared-with-the-senders", "hzero/engine/weights.py",
          "(self.sent != self.arrived).any(dim=1)", "(self.sent != self.sent).any(dim=1)", (f"{ENGINE} -k found",)),
    Fault("float16-divided-after-the-sum", "hzero/engine/gradients.py",
          "divisor.bit_count() == 1 and dtype != torch.float16", "divisor.bit_count() == 1",
          (ENGINE, f"{STAGE} -k fp16", f"{PARITY} -k 16")),
    Fault("window-goes-on-after-an-error", "hzero/engine/gradients.py",
          "            self._error = error\n            self._drop()", "            self._drop()",
          (f"{STAGE} -k window",)),
    Fault("ranks-round-gradients-alike", "hzero/engine/gradients.py",
          "seed_of(self.reductions, self._plan.rank)", "seed_of(self.reductions)",
          (ENGINE, f"{STAGE} -k rounds", FSDP)),
    Fault("guard-counts-steps-that-are-not-in-a-row", "hzero/engine/guard.py",
          "        self.steps += 1\n        self._discarded = 0", "        self.steps += 1",
          ("tests/deepspeed/test_guard.py",)),
    Fault("audit-compares-a-copy-with-itself", "hzero/engine/guard.py",
          "!= mine).any(dim=0)", "!= mine).all(dim=0)", (f"{STAGE} -k differs or audit", f"{FSDP} -k audit")),
    Fault("resume-without-the-seeds-of-gradients", "hzero/engine/engine.py",
          'self.weights.version, self.gradients.reductions = seeds["weights"], seeds["gradients"]',
          'self.weights.version = seeds["weights"]', (f"{STAGE} -k resumed",)),
    # ---- DeepSpeed --------------------------------------------------------------------------------------------------
    Fault("gradient-of-the-last-window-is-stepped-again", "hzero/deepspeed/stage.py",
          "shards[param.ds_id].zero_()", "shards[param.ds_id].detach()", (f"{PARITY} -k silent", f"{STAGE} -k given_up")),
    Fault("resume-loses-the-end-of-a-shard", "hzero/deepspeed/resharding.py",
          "-(-last // step))", "last // step)", (CHECKPOINT,)),
    Fault("some-files-of-a-checkpoint-unchecked", "hzero/deepspeed/checkpoint.py",
          "[rank::world]", "[rank :: world + 1]", ("tests/faults/test_stops.py -k disk or kill", CHECKPOINT,
           f"{STAGE} -k damaged_checkpoint")),
    Fault("stock-load-may-run-code", "hzero/deepspeed/safe_loading.py",
          'os.environ[forces] = "1"', 'os.environ[forces] = "0"', (CHECKPOINT, "tests/clients/test_resume.py")),
    Fault("writes-into-shards-are-not-followed", "hzero/deepspeed/stage_state.py",
          "self.weights.follows_writes = device is None", "self.weights.follows_writes = False",
          (f"{PARITY} -k edits",)),
    Fault("copies-of-a-tensor-group-diverge", "hzero/deepspeed/pipeline.py",
          "if tensors and lossy and dist", "if tensors and not lossy and dist", (f"{STAGE} -k lossy or pipelines",)),
    Fault("unused-key-of-a-pipeline-is-accepted", "hzero/deepspeed/refusals.py",
          "if stage == 1 and unused:", "if stage == 1 and len(unused) > 1:", (f"{STAGE} -k refused",)),
    Fault("muon-keeps-a-momentum-that-is-not-finite", "hzero/deepspeed/muon.py",
          "momentum.copy_(torch.where(torch.isfinite(update).all(), momenta.pop(number), momentum))",
          "momentum.copy_(momenta.pop(number))", (f"{PARITY} -k muon",)),
    Fault("muon-owner-takes-shards-in-another-order", "hzero/engine/muon.py",
          "self._by_rank = self._senders.argsort()", "self._by_rank = self._senders.sort().values",
          (f"{FSDP} -k torchs_muon",)),
    Fault("muon-forgets-its-weight-decay", "hzero/fsdp/muon.py",
          'local.mul_(1 - lr * group["weight_decay"])', "local.mul_(1)", (f"{FSDP} -k torchs_muon",)),
    # ---- FSDP2 ------------------------------------------------------------------------------------------------------
    Fault("step-that-is-not-finite-is-applied", "hzero/fsdp/state.py",
          "flat.owner.module.drop_gradients(flat.members)", "flat.owner.module.gradients(flat.members)",
          (f"{FSDP} -k not_finite",)),
    Fault("second-use-in-a-forward-is-not-compared", "hzero/fsdp/state.py",
          "phase != self._phase or unit in self._gathered:", "phase != self._phase:",
          (f"{FSDP} -k weight or writes or actions", FSDP, f"{PARITY} -k fsdp")),
    Fault("dropped-gradient-gets-its-sum", "hzero/fsdp/modules.py",
          "if place in self.pending and not self._counts(place):", "if place in self.pending and place < 0:",
          (f"{FSDP} -k actions",)),
    Fault("window-is-expected-to-be-the-shorter-one", "hzero/fsdp/state.py",
          "self._given or max(self._recent)", "self._given or min(self._recent)",
          (f"{FSDP} -k observed", f"{PARITY} -k fsdp")),
    # ---- plan -------------------------------------------------------------------------------------------------------
    Fault("all-gather-receives-its-own-part", "hzero/program/program.py",
          "return self.ranks - 1\n", "return self.ranks\n", ("tests/plan/test_collectives.py",)),
    Fault("residuals-have-four-bytes-in-the-plan", "hzero/program/held.py",
          "residual = 2 * sum(chunks)", "residual = 4 * sum(chunks)", (f"{PARITY} -k codecs and 4", "tests/plan")),
    Fault("payload-row-of-another-rank", "hzero/program/shards.py",
          "self.grid.coordinates(self.rank), self.refresh_hops()[::-1]", "self.grid.coordinates(self.rank), self.refresh_hops()",
          (f"{PARITY} -k coded_scopes", "tests/plan/test_shards.py", f"{PARITY} -k exact", f"{STAGE} -k audit")),
    # ---- other folders ----------------------------------------------------------------------------------------------
    Fault("links-that-contradict-each-other-are-accepted", "hzero/topology/node.py",
          "if other != ordered:", "if other.kind != ordered.kind:", ("tests/topology",)),
    Fault("edited-text-of-equal-size-goes-unnoticed", "hzero/tools/data/token_files.py",
          "[p.stat().st_size, p.stat().st_mtime_ns]", "[p.stat().st_size, 0]",
          ("tests/train/test_train.py -k another", "tests/data/test_prepare.py")),
    Fault("training-sees-the-text-of-the-evaluation", "hzero/tools/data/corpus.py",
          'Corpus(parts["train"], parts["test"]', 'Corpus(blocks, parts["test"]',
          ("tests/data/test_prepare.py -k training", "tests/train/test_train.py")),
    Fault("start-that-came-after-all-is-reported", "hzero/tools/commands/logs.py",
          "if times > max((counts[sentence] for sentence in one.unless), default=0):", "if times:",
          ("tests/commands/test_logs.py",)),
    Fault("tokens-per-second-of-one-micro-batch", "hzero/tools/commands/summary.py",
          'train["micro_batch"] * accumulation * experiment.replicas', 'train["micro_batch"] * experiment.replicas',
          ("tests/train/test_train.py",)),
    Fault("gradients-of-later-queries-are-lost", "hzero/sequence/attention.py",
          "                    new += old\n", "                    new += 0 * old\n", ("tests/sequence",)),
    Fault("loss-of-counted-labels-not-scaled", "hzero/sequence/models.py",
          "loss * parallel / items", "loss / items", ("tests/sequence",)),
    Fault("algorithm-without-a-limit-is-accepted", "hzero/config.py",
          'if self.algorithm != "library" and not self.below_bytes:',
          'if self.algorithm != "library" and self.below_bytes < 0:', ("tests/test_config.py",)),
    Fault("error-of-the-highest-rank-is-raised", "hzero/errors.py",
          "next(filter(None, of_every_rank(problem)), None)", "next(filter(None, of_every_rank(problem)[::-1]), None)",
          ("tests/faults/test_refused.py", "tests/topology", f"{STAGE} -k refused or save_that_fails")),
    Fault("file-that-its-group-may-write-is-trusted", "hzero/files.py",
          "found.st_mode & 0o022", "found.st_mode & 0o002",
          ("tests/test_files.py", "tests/kernels/test_backends.py", "tests/test_hostile_files.py")),
    Fault("hash-of-a-file-is-not-compared", "hzero/manifest.py",
          "if hashes and digest and _hash_of(file) != digest:", "if hashes and not digest:",
          ("tests/test_manifest.py",)),
    Fault("last-rank-that-failed-is-blamed", "hzero/tools/launch.py",
          "cause = min(failures, key", "cause = max(failures, key", ("tests/test_launch.py",)),
    Fault("longest-save-is-forgotten", "hzero/stop.py",
          "self._saved_s = max(self._saved_s, seconds)", "self._saved_s = seconds", ("tests/faults/test_stops.py",)),
)
# fmt: on


def out_of_date() -> list[str]:
    """Names the faults whose text does not occur once, or whose tests are missing."""
    wrong = []
    for one in FAULTS:
        file = ROOT / one.file
        if (times := file.read_text().count(one.old) if file.is_file() else 0) != 1:
            wrong.append(f"{one.name}: {one.file} has its text {times} times; expected once")
        missing = [test for test in one.tests if not (ROOT / test.split(" ")[0]).exists()]
        wrong += [f"{one.name}: {test} does not exist" for test in missing]
    names = [one.name for one in FAULTS]
    return wrong + [f"{name}: two faults have this name" for name in sorted({n for n in names if names.count(n) > 1})]


def copied(folder: Path) -> None:
    """Copies the files of the checkout and its compiled library."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in [*filter(None, listed.split("\0")), LIBRARY]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # some tests list the files of the repository
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)


def build(folder: Path) -> None:
    """Compiles the host library of a copy, as an editable installation does."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "cmake"
    made = folder / "build/fault"
    for arguments in (["-S", str(folder), "-B", str(made)], ["--build", str(made), "--target", "hzero_host", "-j2"]):
        subprocess.run([cmake, *arguments], env={**os.environ, "HZERO_BACKEND": "host"}, stdout=2, check=True)
    shutil.copy(made / Path(LIBRARY).name, folder / LIBRARY)


def failed(
    folder: Path, tests: str, timeout_s: float, ignored: Collection[str] = (), suspects: Collection[str] = ()
) -> list[str]:
    """Runs tests in a copy, and returns those that fail; if they do not end in time, their arguments.

    Args:
        folder: The copy.
        tests: As in `Fault.tests`. The run ends with the first failure.
        timeout_s: Seconds after which the run is ended.
        ignored: Tests that are not run.
        suspects: Tests to run instead, to their end.
    """
    path, _, expression = tests.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-rfE", "--no-header", "-p", "no:cacheprovider"]
    command += [*suspects] if suspects else ["-x", path, *(["-k", expression] if expression else [])]
    command += [f"--deselect={one}" for one in ignored]
    with tempfile.TemporaryFile("w+") as out:
        own = {**os.environ, "PYTHONPATH": str(folder)}
        process = subprocess.Popen(command, cwd=folder, env=own, stdout=out, stderr=out, start_new_session=True)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return [f"{tests}{NO_END}"]
        out.seek(0)
        text = out.read()
    print(f"    {tests}: {text.strip().splitlines()[-1]}", flush=True)
    lines = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if status not in (0, 1, 5) or (status == 1 and not lines):  # 5: all are deselected
        raise SystemExit(f"pytest {tests}: exit status {status}\n{text[-2000:]}")
    return [line.split(" ", 1)[1].split(" - ")[0] for line in lines]


def finders(fault: Fault, folder: Path, everything: bool, ignored: Collection[str]) -> list[str]:
    """Returns the tests that fail with a fault, the first that a run of pytest meets; empty if none does.

    Args:
        fault: The fault.
        folder: A copy of the checkout.
        everything: Whether to run the whole suite.
        ignored: Tests that fail without a fault too.
    """
    file, library = folder / fault.file, folder / LIBRARY
    right, compiled = file.read_text(), library.read_bytes()
    file.write_text(right.replace(fault.old, fault.new))
    try:
        if fault.file.startswith("hip_kernels"):
            build(folder)
        for tests in ("tests",) if everything else fault.tests:
            if found := failed(folder, tests, TIMEOUT_ALL_S if everything else TIMEOUT_S, ignored):
                return found
    finally:
        file.write_text(right)
        library.write_bytes(compiled)
    return []


def without_fault(folder: Path, tests: Collection[str]) -> set[str]:
    """Returns the tests that fail in a copy without a fault."""
    hung = [test for test in tests if test.endswith(NO_END)]
    found = {test for test in hung if failed(folder, test.removesuffix(NO_END), TIMEOUT_S)}
    suspects = [test for test in tests if test not in hung]
    return found.union(failed(folder, "without a fault", TIMEOUT_ALL_S, suspects=suspects) if suspects else ())


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults (default: all)")
    parser.add_argument(
        "--all", action="store_true", help="run the whole suite instead of the tests that a fault names"
    )
    parser.add_argument("--check", action="store_true", help="only look whether each text still occurs once")
    given = parser.parse_args()
    if wrong := out_of_date():
        print("\n".join(wrong), file=sys.stderr)
        return 1
    names = [one.name for one in FAULTS]
    if unknown := sorted({*given.names} - {*names}):
        parser.error(f"no fault {', '.join(unknown)}")
    if given.check:
        print(f"{len(FAULTS)} faults can be seeded")
        return 0
    found_by = json.loads(RECORD.read_text())["found_by"] if RECORD.exists() else {}
    ignored, left = set[str](), [one for one in FAULTS if not given.names or one.name in given.names]
    with tempfile.TemporaryDirectory(prefix="hzero-faults-") as copy:
        folder = Path(copy)
        copied(folder)
        while left:
            for one in left:
                print(f"{one.name}: {one.file}", flush=True)
                found = finders(one, folder, given.all, ignored)
                print(f"    {'found by ' + found[0] if found else 'NOT FOUND'}", flush=True)
                found_by[one.name] = found or None
                found_by = {name: found_by[name] for name in names if name in found_by}
                content = {"date": datetime.date.today().isoformat(), "found_by": found_by}
                RECORD.write_text(json.dumps(content, indent=1) + "\n")  # after each, since a run takes an hour
            # A test that fails without a fault has found none. Such faults are seeded again, without these tests.
            ignored |= without_fault(folder, {test for one in left for test in found_by[one.name] or ()})
            left = [one for one in left if not ignored.isdisjoint(found_by[one.name] or ())]
    lost = [name for name, tests in found_by.items() if tests is None]
    print(f"{len(found_by) - len(lost)} of {len(found_by)} faults are found; not found: {', '.join(lost) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
