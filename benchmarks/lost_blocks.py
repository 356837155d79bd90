"""How many blocks codec exp cannot hold: of weights, gradients, activations and their gradients of a small GPT-NeoX.

It trains in float32 on one process, and rounds what it looks at to bfloat16. Blocks are those of whole tensors: 32,768 numbers,
or what a tensor has. Prints a Markdown table.

    python -m benchmarks.lost_blocks [--steps 0 20 200] [--layers 4] [--hidden 128]
"""

from __future__ import annotations

import argparse
import datetime
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from hzero.codecs import Codec
from hzero.config import DEFAULT_BLOCK_SIZE, CodecConfig
from hzero.sharding.records import EXP_BLOCK
from hzero.train.data import read_texts, stdlib_files

EXP = Codec.from_config(CodecConfig(codec="exp", block_size=DEFAULT_BLOCK_SIZE))
BYTES, SEQUENCES, LENGTH = 2_000_000, 16, 128


def counted(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    """Blocks of tensors, and those that are lost."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        flat = tensor.detach().flatten().bfloat16()
        lost = EXP.lost(EXP.encode([flat], [flat.numel()]), [flat.numel()])
        found += Counter(blocks=-(-flat.numel() // EXP_BLOCK), lost=int(lost))
    return found


def main() -> None:
    """Trains, counts and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 20, 200], help="where to look (default 0 20 200)")
    parser.add_argument("--layers", type=int, default=4, help="(default 4)")
    parser.add_argument("--hidden", type=int, default=128, help="(default 128)")
    arguments = parser.parse_args()
    for name in ("layers", "hidden"):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"--{name}: found {value}, expected at least 1")
    torch.manual_seed(0)
    text = "".join(read_texts(stdlib_files(), BYTES)).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    heads = max(arguments.hidden // 32, 1)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=256,
            hidden_size=arguments.hidden,
            num_hidden_layers=arguments.layers,
            num_attention_heads=heads,
            intermediate_size=4 * arguments.hidden,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    kept: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    for layer in model.gpt_neox.layers:
        for module in (layer.attention.dense, layer.mlp.dense_4h_to_h):
            module.register_forward_hook(keep)
    words = torch.randint(-(1 << 15), 1 << 15, (1 << 22,)).to(torch.int16).view(torch.bfloat16)
    print(
        f"{datetime.date.today().isoformat()}, {sum(p.numel() for p in model.parameters()):,} parameters, {SEQUENCES} sequences "
        f"of {LENGTH} bytes\n\n| step | numbers | blocks | lost |\n|---|---|---|---|"
    )
    for step in range(max(arguments.steps) + 1):
        places = torch.randint(0, len(tokens) - LENGTH, (SEQUENCES, 1)) + torch.arange(LENGTH)
        kept.clear()
        model(input_ids=tokens[places], labels=tokens[places]).loss.backward()
        if step in arguments.steps:
            kinds = {
                "weights": list(model.parameters()),
                "gradients of weights": [p.grad for p in model.parameters() if p.grad is not None],
                "activations": kept,
                "gradients of activations": [one.grad for one in kept if one.grad is not None],
            }
            for kind, tensors in kinds.items():
                found = counted(tensors)
                print(f"| {step} | {kind} | {found['blocks']:,} | {found['lost']:,} |", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    found = counted([words])
    print(f"| | random words | {found['blocks']:,} | {found['lost']:,} |")


if __name__ == "__main__":
    main()
