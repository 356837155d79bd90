"""DDP communication hook: averages gradients tier by tier, each with its codec."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

import itertools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from hzero.comm.communicator import Communicator, CommunicatorConfig
from hzero.comm.lanes import Chain


class DdpState:
    """State of `ddp_hook`: a communicator and the residuals of error feedback.

    Args:
        config: As in `Communicator`.
        group: The process group of the DDP module (its ``process_group``); None is the world.
        timeout: As in `Communicator`.

    Attributes:
        communicator: Sends the gradients; its ``wire_log`` counts them with role ``all_reduce``.

    Raises:
        ConfigError: As in `Communicator`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | CommunicatorConfig | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        self.communicator = Communicator(config, group, timeout=timeout, uses=("sums", "copies"))
        # A number is never reused: hops of a former bucket may be in flight when DDP rebuilds its buckets.
        self._numbers = itertools.count()
        self._keys = WeakIdKeyDictionary()  # the bucket's key, by parameter
        self._layouts: dict[int, tuple[int, ...]] = {}

    def key(self, bucket: dist.GradBucket) -> int:
        """Returns the key for a bucket's residuals, also if several modules share one state.

        DDP rebuilds its buckets after the first step. The residuals of all former buckets are then dropped, since they belong to
        other elements.
        """
        parameters = bucket.parameters()
        layout = tuple(map(id, parameters))
        keys = {self._keys.get(parameter) for parameter in parameters}
        if len(keys) == 1 and self._layouts.get(first := next(iter(keys))) == layout:
            return first
        if keys != {None}:
            self.communicator.feedback.clear()
            self._keys.clear()
            self._layouts.clear()
        key = next(self._numbers)
        self._layouts[key] = layout
        for parameter in parameters:
            self._keys[parameter] = key
        return key


def ddp_hook(state: DdpState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients: ``model.register_comm_hook(state, hzero.comm.ddp_hook)``.

    The bucket is summed over the tiers from the innermost outwards, each with its codec. The mean returns the same way,
    overlapped with backward. All ranks get the same bits. With codec ``none``, the result differs from DDP only by the order of
    additions, which use float32.

    Args:
        state: Settings and residuals.
        bucket: Gradients in float32, bfloat16 or float16.

    Returns:
        A future of the averaged bucket, for DDP. If a peer does not arrive, backward raises an error that names it.

    Raises:
        TypeError: The gradients have another dtype or are sparse, or ``state`` is no `DdpState`.
    """
    if not isinstance(state, DdpState):
        raise TypeError(f"ddp_hook: state: found {type(state).__name__}; expected an hzero.comm.DdpState")
    buffer = bucket.buffer()
    chain: Chain[torch.Tensor] = state.communicator.all_reduce(buffer, "mean", key=state.key(bucket), async_op=True)
    return chain.future(buffer.device)
