"""torchrun --nproc-per-node=2 two_engines.py

Contexts, forwards and steps over the parameters of two engines, stock or hzero, made in either order. One JSON line each.
"""

import json
import os
import traceback

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

PAIRS = (
    ("stock", "stock"),
    ("stock", "lossless"),
    ("lossless", "topo"),
    ("topo", "stock"),
    ("stock", "topo"),
)


def engine(preset: str, model: nn.Module, whole: bool = False, trains: bool = True):
    """An engine; ``whole`` keeps all parameters whole between uses, as Trainer's "auto" keeps norms and biases."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 10**6 if whole else 0}
    if preset != "stock":
        zero["hzero"] = {"preset": preset, "topology": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 1}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    trained = [param for param in model.parameters() if param.requires_grad]
    if trains and trained:
        config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=model, model_parameters=trained if trains and trained else None, config=config)[0]


def linear(value: float | None, width: int = 9) -> nn.Linear:
    """A layer of an awkward size, all of one value or of random ones."""
    layer = nn.Linear(width, 7, bias=False)
    if value is not None:
        nn.init.constant_(layer.weight, value)
    return layer


def step(owner, x: torch.Tensor) -> float:
    """Trains one step and returns the loss."""
    loss = owner(x).square().mean()
    owner.backward(loss)
    owner.step()
    return loss.item()


def copied(pair: tuple[str, str]) -> dict:
    """One engine's weights are copied into the other's by rank 0, in either direction, as a sync of a reference model does."""
    found = {}
    for direction in ("to the second", "to the first"):
        models = linear(0.0), linear(1.0)
        source, target = models if direction == "to the second" else models[::-1]
        target.weight.requires_grad_(False)
        engines = [engine(preset, model, whole) for preset, model, whole in zip(pair, models, (False, True))]
        by_model = dict(zip(models, engines))
        x = torch.ones(1, 9)
        before = step(by_model[source], x), by_model[target](x).mean().item()
        with deepspeed.zero.GatheredParameters([one.weight for one in models], modifier_rank=0):
            expected = source.weight.sum().item()
            if torch.distributed.get_rank() == 0:
                target.weight.data.copy_(source.weight.data)
        after = by_model[target](x).sum().item()
        with deepspeed.zero.GatheredParameters(target.weight):
            held = target.weight.sum().item()
        with deepspeed.zero.GatheredParameters([one.weight for one in models]):
            exact = safe_get_full_fp32_param(source.weight).equal(source.weight.data)
        found[direction] = {"before": before, "after": after, "expected": expected, "held": held, "exact": exact}
        for one in engines:
            one.destroy()
    return found


def unchanged(pair: tuple[str, str]) -> dict:
    """A context that changes nothing leaves every bit, also of parameters that a forward has just read decoded."""
    torch.manual_seed(1)
    models = linear(None), linear(None)
    originals = [one.weight.detach().clone() for one in models]
    engines = [engine(preset, model, whole=True) for preset, model in zip(pair, models)]
    for one in engines:
        one(torch.ones(1, 9))
    with deepspeed.zero.GatheredParameters([one.weight for one in models], modifier_rank=0):
        seen = [one.weight.data.equal(original) for one, original in zip(models, originals)]
    with deepspeed.zero.GatheredParameters([one.weight for one in models]):
        kept = [one.weight.data.equal(original) for one, original in zip(models, originals)]
    masters = [safe_get_full_fp32_param(one.weight).equal(original) for one, original in zip(models, originals)]
    for one in engines:
        one.destroy()
    return {"seen": seen, "kept": kept, "masters": masters}


class Trunk(nn.Module):
    """A trunk whose weight another model has too, and a head."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.trunk, self.head = linear(None), linear(None, 7)
        self.trunk.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The head of the trunk."""
        return self.head(self.trunk(x))


def shared(pair: tuple[str, str]) -> dict:
    """Two engines have a frozen weight in common, which a context changes while both train their heads."""
    torch.manual_seed(2)
    weight = linear(None).requires_grad_(False).weight
    models = Trunk(weight), Trunk(weight)
    engines = [engine(preset, model) for preset, model in zip(pair, models)]
    x, losses = torch.linspace(-1, 1, 9).view(1, 9), []
    for _ in range(3):
        losses += [step(one, x) for one in engines]
        with deepspeed.zero.GatheredParameters([weight, *(model.head.weight for model in models)], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                weight.data.mul_(1.5)
    with torch.no_grad():
        read = [one(x).sum().item() for one in engines]
    for one in engines:
        one.destroy()
    return {"losses": losses, "read": read}


def watched(pair: tuple[str, str]) -> dict:
    """One engine trains a weight, and another one without an optimizer, made before or after it, reads it after each step."""
    found = {}
    for trains in ((True, False), (False, True)):
        torch.manual_seed(3)
        layers = linear(None), linear(None)
        layers[1].weight = layers[0].weight
        engines = [engine(preset, layer, trains=how) for preset, layer, how in zip(pair, layers, trains)]
        trainer, reader = engines if trains[0] else engines[::-1]
        x, read = torch.linspace(-1, 1, 9).view(1, 9), []
        for _ in range(3):
            step(trainer, x)
            with torch.no_grad():
                read.append(reader(x).square().sum().item())
        found[str(trains)] = read
        for one in engines:
            one.destroy()
    return found


def main() -> None:
    """Runs all."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for pair in PAIRS:
        found: dict = {}
        for check in (copied, unchanged, shared, watched):
            try:
                found[check.__name__] = check(pair)
            except Exception:
                found[check.__name__] = {"error": traceback.format_exc()}
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"pair": pair, **found}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
