"""hzero with FSDP2 in Hugging Face's Trainer, which shards the model inside ``train()``."""

from __future__ import annotations

from typing import Any

from hzero.config import DEFAULT_PRESET
from hzero.fsdp.state import FsdpState, apply, config_of


class Callback:
    """Applies hzero after Trainer has sharded the model: ``Trainer(..., callbacks=[hzero.fsdp.Callback("topo")])``.

    Trainer must use FSDP2, for example with ``fsdp_config={"version": 2}`` in its arguments. Trainer sets the flags that mark the
    last backward of a step. The callback has the methods of a ``TrainerCallback`` but is not one, since transformers need not be
    installed.

    Args:
        preset: See `apply`.
        topology: See `apply`.
        accumulation: See `apply`.
        block: Other keys of the block. See `apply`.

    Attributes:
        state: State of the trained model. None before `on_train_begin`.

    Raises:
        ConfigError: A key or value is wrong.
    """

    def __init__(
        self, preset: str = DEFAULT_PRESET, topology: Any = "discover", accumulation: int | None = None, **block: Any
    ) -> None:
        config_of(preset, topology, block)  # raises before the data is read
        self._how = preset, topology, accumulation, block
        self._model: Any = None
        self.state: FsdpState | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # an event without work for hzero
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Applies hzero, unless an earlier ``train()`` of this model has applied it.

        Raises:
            ConfigError: See `apply`.
        """
        if self._model is model:
            return
        if self.state is not None:
            self.state.close()
        *how, block = self._how
        self.state, self._model = apply(model, *how, **block), model

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Waits for all hops, so that the wire log of `state` is complete."""
        if self.state is not None:
            self.state.settle()
