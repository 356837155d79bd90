"""Streams of the stage on an asynchronous device, by DeepSpeed's accelerator."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator

from hzero.collectives.streams import DeviceStreams


def device_streams() -> DeviceStreams | None:
    """Streams for this process's device; None where it runs everything in order, as processors do."""
    return None if get_accelerator().is_synchronized_device() else DeviceStreams(get_accelerator())
