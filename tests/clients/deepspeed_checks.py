"""Plain DeepSpeed with ``engine.compile()`` against plain ZeRO-3. Run by test_clients.py on 4 ranks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx

import hzero
from tests.clients.cells import Run, assert_equal, assert_trains, batches, llama, mean
from tests.clients.config import ACCUMULATION, STEPS, config_of
from tests.deepspeed.training import assert_losses, engine_of, masters_of
from tests.ranks import LONG


def _train(engine: Any, steps: int) -> Run:
    run, losses = Run(), []
    for batch in batches(steps * ACCUMULATION):
        loss = engine(**batch, use_cache=False).loss
        losses.append(mean(loss))
        engine.backward(loss)
        engine.step()
        if len(losses) % ACCUMULATION == 0:
            run.losses.append(sum(losses[-ACCUMULATION:]) / ACCUMULATION)
            run.norms.append(float(engine.get_global_grad_norm()))
    return run


def trained(preset: str | None, backend: str | Callable[..., Any] | None = None) -> Run:
    """A loop of plain DeepSpeed, compiled with ``backend``."""
    model = llama(num_hidden_layers=1)  # compiling takes most of the time
    engine = engine_of(config_of(preset, hzero={"exact_evaluation": True}), model)
    if backend is not None:
        engine.compile(backend=backend)
    run = _train(engine, STEPS)
    if preset == "topo":
        _evaluates_exactly(engine, num_hidden_layers=1)
    return run.end(engine)


def _evaluates_exactly(engine: Any, **shape: Any) -> None:
    """Evaluation always reads the masters, and training continues with decoded weights."""
    batch, reference, losses = next(batches(1, seed=2)), llama(**shape), []

    def forward() -> float:
        with torch.no_grad():
            return mean(engine(**batch, use_cache=False).loss)

    decoded = forward()
    engine.eval()
    losses.append(forward())
    with hzero.exact_weights(engine):
        losses.append(forward())
    losses.append(forward())
    engine.train()
    assert forward() == decoded
    with hzero.exact_weights(engine):
        losses.append(forward())
    assert forward() == decoded
    reference.load_state_dict(masters_of(engine), strict=False)
    want = mean(reference(**batch).loss)
    assert_losses(losses, [want] * len(losses))
    assert abs(decoded - want) / want > 1e-5, "decoded weights give another loss"


def check_deepspeed_evaluates_exactly() -> None:
    """Also with parameters kept whole, which are available when the mode changes."""
    for kept in (0, 100):
        zero = {"stage3_param_persistence_threshold": kept}
        engine = engine_of(config_of("topo", hzero={"exact_evaluation": True}, zero_optimization=zero), llama())
        _train(engine, 1)
        _evaluates_exactly(engine)
        engine.destroy()


def _inductor(graph: Any, inputs: Any) -> Any:
    """Backend ``inductor``: the first rank compiles a graph, and the others take it from the cache."""
    with open(Path(os.environ["HZERO_CHECKS_OUT"]) / "compiles", "w") as one:
        fcntl.flock(one, fcntl.LOCK_EX)
        return compile_fx(graph, inputs)


@LONG
def check_deepspeed_compiles() -> None:
    """The graphs and the hooks between them: by backend ``inductor``, which compiles C++ here, and by ``eager``."""
    want = trained(None)
    assert_equal(trained("fit", _inductor), want)
    assert_trains(trained("topo", "eager"), want)
