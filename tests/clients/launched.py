"""A script for ``accelerate launch``, which gives it the configuration; test_clients.py starts it."""

from __future__ import annotations

import json

import torch.distributed as dist

from tests.clients.accelerate_checks import Loop

if __name__ == "__main__":
    loop = Loop(None)
    loop.train()
    run = loop.end()
    if dist.get_rank() == 0:
        shown = {"losses": run.losses, "codecs": sorted({(role, codec) for (role, _), codec in run.codecs.items()})}
        print(json.dumps(shown), flush=True)
    dist.destroy_process_group()
