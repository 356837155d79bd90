"""The stage's pipeline, with streams on an asynchronous device, by DeepSpeed's accelerator."""

from __future__ import annotations

from functools import partial

import torch
from deepspeed.accelerator import get_accelerator

from hzero.collectives import Pipeline, shared_pipeline
from hzero.collectives.streams import DeviceStreams, host_steps
from hzero.config import TransportName


def stage_pipeline(transport: TransportName) -> Pipeline:
    """The pipeline of this process for hops of a transport on its device. Raises `ConfigError` as `shared_pipeline`."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():  # runs everything in order, as processors do
        return shared_pipeline(None)
    if transport == "torch":
        return shared_pipeline(DeviceStreams(accelerator))
    return shared_pipeline(None, partial(host_steps, torch.device(accelerator.current_device_name())))
