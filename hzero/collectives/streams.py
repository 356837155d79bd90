"""Streams of the pipeline's lanes on an asynchronous device."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from hzero.collectives.pipeline import Pipeline, shared_pipeline
from hzero.config import TransportName
from hzero.validation import ConfigError


class DeviceStreams:
    """One stream per lane of the pipeline, and one for the results of each kind of chain.

    A lane's stream encodes what the lane's next hop sends and waits for the hop before it. So a gradient that waits for
    its node hop holds up no gather, and a bucket that waits for its package hop does not keep the next one from being
    encoded.

    Args:
        device: Makes streams and events: ``torch.cuda``, or an accelerator of DeepSpeed.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._streams: dict[Hashable, Any] = {}

    def on(self, lane: Hashable) -> AbstractContextManager[Any]:
        """Makes the stream of a lane current."""
        if lane not in self._streams:
            self._streams[lane] = self.device.Stream()
        return self.device.stream(self._streams[lane])  # type: ignore[no-any-return]

    def event(self) -> Any:
        """An event recorded on the current stream."""
        event = self.device.Event()
        event.record(self.device.current_stream())
        return event

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""
        self.device.current_stream().wait_event(event)

    def used(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory until the current stream has passed this point."""
        tensor.record_stream(self.device.current_stream())


@contextlib.contextmanager
def host_steps(device: torch.device) -> Iterator[None]:
    """Around a step of a pipeline on a GPU whose hops the host starts and ends, as those over MPI, which knows no streams.

    Inputs may come from any stream and results go to any, so the host waits before the step for the device and after it for the
    step. It has not run on a GPU, and costs the overlap of encoding with compute.
    """
    torch.cuda.set_device(device)  # of this thread, which may be the pipeline's
    torch.cuda.synchronize(device)
    yield
    torch.cuda.current_stream().synchronize()


def pipeline_of(device: str, transport: TransportName) -> Pipeline:
    """The pipeline of this process for hops of a transport on ``cpu`` or ``cuda``.

    Raises:
        ConfigError: As `shared_pipeline`; or the pipeline is there, and of the other one.
    """
    if device == "cpu" or transport == "torch":
        found = shared_pipeline(None if device == "cpu" else DeviceStreams(torch.cuda))
        made_by = getattr(found.streams, "device", None)
        of_gpu = made_by is torch.cuda or getattr(made_by, "_name", "") == "cuda"  # or DeepSpeed's accelerator
        if of_gpu != (device != "cpu"):
            raise ConfigError(
                f"communicator: found a group of {device} beside hops of {'cuda' if of_gpu else 'cpu'} in one process; "
                "possible: groups of one kind"
            )
        return found
    return shared_pipeline(None, partial(host_steps, torch.device("cuda", torch.cuda.current_device())))
