"""The stage's pipeline, with streams on an asynchronous device, by DeepSpeed's accelerator."""

from __future__ import annotations

from functools import partial

import torch
from deepspeed.accelerator import get_accelerator

from hzero.collectives import Pipeline, shared_pipeline
from hzero.collectives.streams import DeviceStreams, host_steps
from hzero.config import TransportName
from hzero.validation import ConfigError


def stage_pipeline(transport: TransportName) -> Pipeline:
    """The pipeline of this process for hops of a transport on its device.

    Raises:
        ConfigError: As `shared_pipeline`; or the pipeline is there, and has no streams.
    """
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():  # runs everything in order, as CPUs do
        return shared_pipeline(None)
    if transport == "torch":
        found = shared_pipeline(DeviceStreams(accelerator))
        if found.streams is None:
            raise ConfigError(
                "hzero: found a Communicator of CPUs made before this engine of a GPU; make it without one"
            )
        return found
    return shared_pipeline(None, partial(host_steps, torch.device(accelerator.current_device_name())))
