"""Streams of the stage on an asynchronous device, by DeepSpeed's accelerator."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


class DeviceStreams:
    """One stream per lane of the pipeline, and one for the results of each kind of chain.

    A lane's stream encodes what the lane's next hop sends and waits for the hop before it. So a gradient that waits for
    its node hop holds up no gather, and a bucket that waits for its package hop does not keep the next one from being
    encoded.
    """

    def __init__(self) -> None:
        self._streams: dict[Hashable, Any] = {}

    def on(self, lane: Hashable) -> AbstractContextManager[Any]:
        """Makes the stream of a lane current."""
        if lane not in self._streams:
            self._streams[lane] = get_accelerator().Stream()
        return get_accelerator().stream(self._streams[lane])  # type: ignore[no-any-return]

    def event(self) -> Any:
        """An event recorded on the current stream."""
        event = get_accelerator().Event()
        event.record(get_accelerator().current_stream())
        return event

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""
        get_accelerator().current_stream().wait_event(event)

    def used(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory until the current stream has passed this point."""
        tensor.record_stream(get_accelerator().current_stream())


def device_streams() -> DeviceStreams | None:
    """Streams for this process's device; None where it runs everything in order, as processors do."""
    return None if get_accelerator().is_synchronized_device() else DeviceStreams()
