"""Messages between pipeline stages: what DeepSpeed's module ``p2p`` does, with the codecs of role ``pipeline``."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from deepspeed.runtime.pipe import p2p

from hzero.comm import Chain, Communicator

#: What goes in codecs. DeepSpeed sends masks as float16, whose numbers must stay zero or one; training in float16 is refused.
CODED = (torch.float32, torch.bfloat16)
#: Messages that this rank has sent and nobody has received yet, before it waits for the oldest.
_AHEAD = 4


class StageMessages:
    """Sends and receives tensors of a neighbouring stage, in the order of DeepSpeed's schedule.

    Tensors of float32 and bfloat16 go in the codec of the tier between the two ranks; others, such as masks, as in stock. A
    send does not wait for its receiver, as stock's does; so it cannot add a wait to the schedule. Entered for a step.

    Args:
        communicator: Of the ranks of one pipeline, numbered by their stages.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sent: deque[Chain[None]] = deque()

    def __enter__(self) -> None:
        """A step begins."""

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Waits until all that this rank has sent has been received; what a failed step has sent is forgotten."""
        while self._sent and kind is None:
            self._sent.popleft().wait()
        self._sent.clear()

    def send(self, tensor: torch.Tensor, dest_stage: int) -> Any:
        """Sends a tensor of any shape and type to a stage. It may be changed afterwards."""
        if tensor.dtype not in CODED:
            return p2p.send(tensor, dest_stage)
        chain = self._communicator.send(tensor, dest_stage, async_op=True)
        chain.wait_read()
        self._sent.append(chain)
        if len(self._sent) > _AHEAD:
            self._sent.popleft().wait()
        return None

    def recv(self, tensor: torch.Tensor, src_stage: int) -> Any:
        """Receives a tensor from a stage into ``tensor``, of the shape and type that were sent."""
        if tensor.dtype not in CODED:
            return p2p.recv(tensor, src_stage)
        return tensor.copy_(self._communicator.recv(tensor, src_stage))
