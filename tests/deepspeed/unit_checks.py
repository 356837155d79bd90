"""Gathering by layer: what stock ZeRO-3 gives, and the bits of gathering by module. Run by test_units.py on 4 ranks."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import hzero
from tests.deepspeed.training import VOCAB, batch, block_of, ds_config, engine_of
from tests.parity.compare import assert_row, row, train
from tests.parity.deepspeed import Session
from tests.ranks import LONG

WIDTH = 36


class Attention(nn.Module):
    """A mixer of tokens with an adapter; ``scale`` comes by keyword."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The mixed tokens, and the keys."""
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) * scale).softmax(-1)
        return self.out(weights @ v) + self.b(self.a(x)), k


class Mlp(nn.Sequential):
    """A module that repeats inside a layer, in a list of experts."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH))


class Layer(nn.Module):
    """One norm that is used twice, experts of which some are used, several outputs."""

    def __init__(self, experts: int = 1, rank: int = 2) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(rank)
        self.experts = nn.ModuleList(Mlp() for _ in range(experts))

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0,), scale: float = 0.3) -> Any:
        """The tokens, and two more tensors in a dictionary."""
        mixed, keys = self.attention(self.norm(x), scale=scale)
        x = x + mixed
        for number in used:
            x = x + self.experts[number](self.norm(x))
        return x, {"keys": keys, "mixed": mixed}


class Decoder(nn.Module):
    """Layers that are called whole, in parts, twice and not at all; a head whose weight the loss reads; an unused one."""

    def __init__(self, layers: int = 3, experts: int = 1, checkpointing: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Layer(experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.unused = nn.Linear(WIDTH, 3)
        self.experts, self.checkpointing = experts, checkpointing
        self.route: Callable[[Decoder, torch.Tensor], torch.Tensor] = Decoder.through
        self.odd = False

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, one after the other."""
        for layer in self.layers:
            if self.checkpointing is None:
                x, more = layer(x, used=(self.experts - 1,))
                x = x + 0.1 * more["keys"]
            else:
                x = checkpoint(lambda x, layer=layer: layer(x=x)[0], x, use_reentrant=self.checkpointing)
        return x

    def odd_ways(self, x: torch.Tensor) -> torch.Tensor:
        """One layer whole, one in every second micro-batch, parts of two in turn, one twice; the others never."""
        first, second, third, fourth, *_ = self.layers
        self.odd = not self.odd
        x, _ = first(x, used=(0, 2) if self.odd else (2,))
        if self.odd:
            x, _ = second(x, used=())
        x = x + third.attention(third.norm(x), scale=0.2)[0]
        x = x + fourth.experts[1](x)
        x = x + third.experts[0](x)
        for _ in range(2):
            x, _ = first(x, used=(1,))
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of the next token."""
        x = self.route(self, self.embedding(tokens[:, :-1]))
        logits = F.linear(self.norm(x), self.head.weight)  # a fused loss reads the weight outside its module
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Pair(nn.Module):
    """An encoder and a decoder of different layers, in lists of one class; tied embeddings, and a norm that all share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.towers = nn.ModuleList(nn.ModuleList(kind() for _ in range(2)) for kind in (Layer, Cross))
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        for layer in (*self.towers[0], *self.towers[1]):
            layer.norm = self.towers[0][0].norm

    _no_split_modules = ("Layer", "Cross")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of the tokens."""
        seen = x = self.embedding(tokens[:, :-1])
        for layer in self.towers[0]:
            seen, _ = layer(seen)
        for layer in self.towers[1]:
            x = layer(x, seen=seen)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Cross(nn.Module):
    """A layer of the decoder, which has a layer of the encoder's kind inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.mlp = nn.LayerNorm(WIDTH), Layer(), Mlp()

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Tokens that have seen others."""
        x, more = self.inner(x + self.norm(seen).flip(1))
        return x + self.mlp(more["mixed"])


def _engine(build: Callable[[], nn.Module], **block: Any) -> Any:
    """An engine of which nothing is gathered ahead or kept; what earlier ones have left is not counted."""
    gc.collect()
    gc.freeze()
    zero = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
    return engine_of(ds_config(block_of("topo", **block), zero_optimization=zero), build())


def _live_bytes() -> int:
    """Bytes in tensors that have been made since the last ``gc.freeze``."""
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def _hops(build: Callable[[], nn.Module], unit: str) -> int:
    """Hops of weights inside a package in a forward and its backward."""
    engine = _engine(build, unit=unit)
    state = hzero.state(engine)
    for step in range(2):
        state.settle()
        state.wire_log.reset()
        engine.backward(engine(batch(step, 0)))
        engine.step()
    state.settle()
    engine.destroy()
    return sum(one.hops for one in state.wire_log.entries() if (one.role, one.tier) == ("weights", "intra_package"))


def _compare(make: Callable[[], nn.Module], *options: str) -> None:
    """Without codecs and with a part of a layer ahead, what stock gives; with codecs, the bits of gathering by module."""
    assert_row(Session, row("lossless", "small", *options, 2, make=make))
    by_module, by_layer = (
        train(Session, row("topo", *options, 2, make=make, block={"unit": unit})) for unit in ("module", "layer")
    )
    assert (by_layer.losses, by_layer.norms) == (by_module.losses, by_module.norms)


def _lora(**keywords: Any) -> Decoder:
    built = Decoder(**keywords)
    for name, param in built.named_parameters():
        param.requires_grad_(".a." in name or ".b." in name)
    return built


def check_a_layer_is_one_gather() -> None:
    """Also in a backward that computes it again. Of 3 layers, embedding, norm, head, and what is evaluated outside its module."""
    assert _hops(Decoder, "module") > 30
    for build in (Decoder, lambda: Decoder(checkpointing=False), lambda: _lora(checkpointing=False)):
        assert _hops(build, "layer") <= 16


def check_odd_ways_through_layers() -> None:
    def build() -> Decoder:
        built = Decoder(layers=5, experts=3)
        built.route = Decoder.odd_ways
        return built

    _compare(build, "spare")


@LONG
def check_checkpointing() -> None:
    assert_row(Session, row("lossless", "small", 2, make=lambda: _lora(checkpointing=False)))
    assert_row(Session, row("lossless", "spare", 2, make=lambda: Decoder(checkpointing=True)))


@LONG
def check_nested_layers_tied_weights_and_leaf_modules() -> None:
    def build() -> Pair:
        built = Pair()
        set_z3_leaf_modules(built, [Mlp])
        return built

    _compare(build)


def check_a_layer_is_no_larger_than_the_limit() -> None:
    """The start line names the units; a layer is live as a whole, but no two, and no more than the limit."""
    with mock.patch.dict(globals(), WIDTH=128):  # messages as large as those of a model
        layer = sum(param.numel() for param in Layer(8).parameters())
        blocks: dict[str, dict[str, Any]] = {
            "module": {"unit": "module"},
            "layer": {},
            "divided": {"unit_numel": layer - 1},
        }
        others = {"none": {"unit_numel": 0}, "small": {"unit_numel": 1}}
        most, lines = {}, {}
        for name, block in {**blocks, **others}.items():
            with contextlib.redirect_stderr(io.StringIO()) as said:
                engine = _engine(lambda: Decoder(experts=8), **block)
            lines[name] = said.getvalue()
            sizes, peaks = list[int](), list[int]()
            for part in engine.module.layers[1].modules():  # where the first layer would still be if it were kept
                part.register_forward_hook(lambda *_, sizes=sizes: sizes.append(_live_bytes()))
            for _ in range(0 if name in others else 3):  # the thread of a lane may let go of a message late
                sizes.clear()
                with torch.no_grad():
                    engine(batch(0, 0))
                peaks.append(max(sizes))
            most[name] = min(peaks, default=0) / 4 / layer
            engine.destroy()
    if dist.get_rank() == 0:
        assert "; gathers by layer (Layer x 3); transport" in lines["layer"], lines
        assert "; gathers by layer (Attention x 3, ModuleList x 3); transport" in lines["divided"], lines
        whys = {"module": 'unit "module"', "none": "unit_numel 0", "small": "no layer within unit_numel 1"}
        for name, why in whys.items():
            assert f"; gathers by module ({why}); transport" in lines[name], lines
    assert most["module"] + 0.2 < most["layer"] < most["module"] + 1.1, most
    assert most["divided"] < most["layer"] - 0.2, most
