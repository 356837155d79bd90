"""Codecs inside the stage: of single parameters, and those that lose nothing or have a rate. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import torch

from tests.deepspeed.training import (
    AwkwardNet,
    block_of,
    ds_config,
    engine_of,
    read_of,
)


def check_packed_codes_without_a_quantisation_state_keep_their_bits() -> None:
    """Another frozen weight beside them is rounded."""
    model = AwkwardNet()
    codes = torch.randint(0, 256, (333, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model.packed = torch.nn.Parameter(codes.view(torch.bfloat16), requires_grad=False)
    model.plain = torch.nn.Parameter(torch.randn(333, dtype=torch.bfloat16), requires_grad=False)
    before = {name: getattr(model, name).detach().view(torch.int16).clone() for name in ("packed", "plain")}
    engine = engine_of(ds_config(block_of("topo"), bf16={"enabled": True}), model)
    read = read_of(engine)
    kept = [torch.equal(read[name].view(torch.int16), bits) for name, bits in before.items()]
    assert kept == [True, False]
    engine.destroy()
