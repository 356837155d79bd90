"""What the checks of all clients share: how hzero is asked for, a small model, its data, and what runs must show."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hzero  # also has DeepSpeed serve the block
from tests.clients.config import BATCH
from tests.deepspeed.training import assert_losses, masters_of

VOCAB, LENGTH = 53, 16

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled; stage 3 does not use it


def shape(**changes: Any) -> LlamaConfig:
    """Architecture of the model: awkward sizes, so that shards are padded."""
    sizes = {"hidden_size": 40, "intermediate_size": 58, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaConfig(**{"vocab_size": VOCAB, **sizes, **heads, **special, **changes})


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """The model, the same on all ranks."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(shape(**changes))


def samples(count: int, seed: int = 0, length: int = LENGTH) -> list[dict[str, list[int]]]:
    """Sequences that a model can learn: each token follows from the last, but for one in eight."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        tokens = [int(torch.randint(3, VOCAB, (1,), generator=draw))]
        while len(tokens) < length:
            known = 3 + (7 * tokens[-1] + 5) % (VOCAB - 3)
            noise = int(torch.randint(3, VOCAB, (1,), generator=draw))
            tokens.append(noise if int(torch.randint(8, (1,), generator=draw)) == 0 else known)
        rows.append({"input_ids": tokens, "labels": tokens, "position_ids": list(range(length))})
    return rows


def batches(micro_steps: int, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's batches, for clients whose loop is ours."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = samples(micro_steps * world * BATCH, seed)
    for micro in range(micro_steps):
        first = (micro * world + rank) * BATCH
        tokens = torch.tensor([row["input_ids"] for row in rows[first : first + BATCH]])
        yield {"input_ids": tokens, "labels": tokens}


def mean(loss: torch.Tensor) -> float:
    """Mean over the ranks."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@dataclass
class Run:
    """What a client showed of one training.

    Attributes:
        losses: Of every step, mean over ranks and micro-batches.
        norms: Gradient norms; empty where the client shows none.
        evaluations: Losses of the evaluations.
        masters: Exact weights at the end.
        codecs: Codecs on the wire by role and tier; empty for plain ZeRO-3.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    codecs: dict[tuple[str, str], str] = field(default_factory=dict)

    def end(self, engine: Any) -> Run:
        """Takes weights and wire log of the engine, and destroys it."""
        own = hzero.state(engine)
        if own is not None:
            own.settle()
            self.codecs = {(hop.role, hop.tier): hop.codec for hop in own.wire_log.entries() if hop.wire_bytes}
        self.masters = masters_of(engine)
        engine.destroy()
        reset()
        return self


def assert_equal(got: Run, want: Run) -> None:
    """Preset ``lossless`` against plain ZeRO-3: the same losses and norms, over hops without codec."""
    assert not want.codecs and set(got.codecs.values()) == {"none"}, (want.codecs, got.codecs)
    assert len(want.losses) >= 2
    for what in ("losses", "norms", "evaluations"):
        shown, expected = getattr(got, what), getattr(want, what)
        assert len(shown) == len(expected), what
        if expected:
            assert_losses(shown, expected, what=what)
    assert got.masters.keys() == want.masters.keys()
    for name, master in want.masters.items():
        torch.testing.assert_close(got.masters[name], master, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def assert_trains(run: Run, reference: Run, tolerance: float = 0.05, fall: float = 0.1) -> None:
    """Preset ``topo``: the loss falls, near the reference's, over int8 weights and int4 gradients."""
    assert run.losses[-1] < run.losses[0] - fall, run.losses
    assert_losses(run.losses, reference.losses, tolerance)
    assert run.losses != reference.losses
    assert run.codecs == {
        ("weights", "intra_package"): "int8",
        ("weights", "inter_node"): "int8",
        ("gradients", "intra_package"): "int4",
        ("gradients", "inter_node"): "int4",
    }


def assert_both(trained: Callable[..., Run], want: Run, **changes: Any) -> None:
    """`lossless` and `topo`, trained alike, against plain ZeRO-3."""
    assert_equal(trained("fit", **changes), want)
    assert_trains(trained("topo", **changes), want)


def reset() -> None:
    """Forgets what Accelerate and Trainer keep in the process between two runs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "PARALLELISM_CONFIG_"))]:
        del os.environ[name]
    gc.collect()
