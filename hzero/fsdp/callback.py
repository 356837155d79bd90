"""hzero in Hugging Face's Trainer, which shards the model inside ``train()``."""

from __future__ import annotations

from typing import Any

from hzero.fsdp.state import FsdpState, apply, config_of
from hzero.validation import ConfigError


class Callback:
    """Applies hzero when Trainer has sharded the model: ``Trainer(..., callbacks=[hzero.fsdp.Callback("topo")])``.

    Trainer must use FSDP2, as with ``fsdp_config={"version": 2}`` in its arguments. It says which backward is the last one of a
    step. The callback has the methods of a ``TrainerCallback`` without being one, since transformers need not be installed.

    Args:
        preset: As of `apply`.
        topology: As of `apply`.
        block: As of `apply`.

    Attributes:
        state: Of the model that is trained; None before `on_train_begin`.

    Raises:
        ConfigError: A wrong key.
    """

    def __init__(self, preset: str = "topo", topology: Any = "discover", **block: Any) -> None:
        if "accumulation" in block:
            raise ConfigError(
                f"hzero.fsdp.Callback: accumulation: found {block['accumulation']!r}; leave it out, since Trainer says itself "
                "which backward is the last one (gradient_accumulation_steps)"
            )
        config_of(preset, topology, block)  # an error now, and not when the data has been read
        self._how = preset, topology, block
        self._model: Any = None
        self.state: FsdpState | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # an event that needs nothing
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Applies hzero, unless an earlier ``train()`` of this model has.

        Raises:
            ConfigError: As `apply`.
        """
        if self._model is model:
            return
        if self.state is not None:
            self.state.close()
        preset, topology, block = self._how
        self.state, self._model = apply(model, preset, topology, **block), model

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Waits for what is under way, so that the wire log of `state` is complete."""
        if self.state is not None:
            self.state.settle()
