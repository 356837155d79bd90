"""Bits per weight of refreshes in codec `exact`, by learning rate and initial weights, from the wire log.

Also the bits that gradients in bfloat16 would need without rounding: 8 for sign and mantissa, and those of the exponent.

A GPT of 10.8M parameters learns Python's standard library, byte by byte, in bfloat16 under FSDP2 with preset lossless, on 2 nodes
of one package of 2 devices: torchrun --standalone --nproc-per-node=4 benchmarks/exact_bits.py [STEPS [LR STD]...]
"""

import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hzero.fsdp

WIDTH, LAYERS, LENGTH, SEQUENCES, WARMUP = 384, 6, 64, 2, 20
TOPOLOGY = {"nodes": 2, "packages_per_node": 1, "devices_per_package": 2}
#: Learning rates, and standard deviations of the initial matrices.
ROWS = ((1e-5, 0.02), (1e-4, 0.02), (1e-4, 0.006), (3e-4, 0.02), (3e-4, 0.006), (6e-4, 0.006), (1e-3, 0.02))


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and hidden units."""
        q, k, v = (part.unflatten(-1, (6, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def gradient_bits(model: nn.Module) -> tuple[float, float]:
    """Bits per element of the gradients: by the entropy of each tensor's exponents, and by Rice codes in blocks of 64."""
    entropy, rice, count = 0.0, 0.0, 0
    for param in model.parameters():
        shard = param.grad.to_local().flatten().bfloat16()  # type: ignore[union-attr]
        exponents = (shard.view(torch.int16).int() >> 7) & 255
        shares = torch.bincount(exponents).double() / max(len(shard), 1)
        entropy -= float((shares * shares.clamp(min=1e-30).log2()).sum()) * len(shard)
        blocks = nn.functional.pad(exponents, (0, -len(shard) % 64)).view(-1, 64)
        below = blocks.amax(1, keepdim=True) - blocks
        codes = torch.stack([((below >> k) + 1 + k).sum(1) for k in range(4)])
        rice += float((codes.amin(0) + 8 + 2).sum())  # and the largest exponent, and the parameter
        count += len(shard)
    return 8 + entropy / count, 8 + rice / count


def measure(data: torch.Tensor, lr: float, std: float, steps: int) -> tuple[list[float], float, tuple[float, float]]:
    """Bits per weight of the refresh before each step but the first, the last loss, and the last `gradient_bits`."""
    torch.manual_seed(0)
    layers = [Block() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))
    for param in model.parameters():
        if param.dim() == 2:
            nn.init.normal_(param, std=std)
    for part in (*layers, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    state = hzero.fsdp.apply(model, preset="lossless", topology=TOPOLOGY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    torch.manual_seed(1 + dist.get_rank())
    totals, loss, gradients = [], torch.zeros(()), (0.0, 0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARMUP)
        starts = torch.randint(0, len(data) - LENGTH - 1, (SEQUENCES,)).tolist()
        ids = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        state.settle()
        sent = [one for one in state.wire_log.entries() if (one.role, one.tier) == ("weights", "inter_node")]
        totals.append((sum(one.payload_bytes for one in sent), sum(one.elements for one in sent)))
        loss.backward()
        if step == steps - 1:
            gradients = gradient_bits(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    bits = [8 * (size - before) / (count - counted) for (before, counted), (size, count) in pairwise(totals)]
    return bits, float(loss), gradients


def main() -> None:
    """Prints a row for each setting: the mean after the warm-up, and the bits of every tenth step."""
    dist.init_process_group("gloo")
    steps, *numbers = (float(one) for one in sys.argv[1:]) if sys.argv[1:] else (60.0,)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    for lr, std in zip(numbers[::2], numbers[1::2]) if numbers else ROWS:
        bits, loss, gradients = measure(data, lr, std, int(steps))
        if dist.get_rank() == 0:
            after = bits[WARMUP:]
            row = f"| {lr:g}, {std:g} | {sum(after) / max(len(after), 1):.2f} | {max(bits):.2f} | "
            print(row + " ".join(f"{one:.2f}" for one in bits[::10]) + f" | {loss:.2f} |", flush=True)
            print(
                f"gradients: {gradients[0]:.2f} bits by entropy, {gradients[1]:.2f} by Rice codes in blocks", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
