"""Communication hook of DistributedDataParallel: gradients are averaged tier by tier, each with its codec."""

# Annotations are no strings here: DDP compares those of a hook.

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
    """The state of `ddp_hook`: a communicator, and the residuals of error feedback.

    Args:
        config: As for `Communicator`.
        group: The process group of the DDP module (its ``process_group``); None takes the world.
        timeout: As for `Communicator`.

    Attributes:
        communicator: Sends the gradients; its ``wire_log`` counts them, by role ``all_reduce``.

    Raises:
        ConfigError: As `Communicator`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | CommunicatorConfig | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        self.communicator = Communicator(config, group, timeout=timeout, uses=("sums", "copies"))
        # Never used twice: hops of a bucket may be under way when another one is laid anew.
        self._numbers = itertools.count()
        self._keys = WeakIdKeyDictionary()  # of parameters, the key of their bucket
        self._layouts: dict[int, tuple[int, ...]] = {}

    def key(self, bucket: dist.GradBucket) -> int:
        """The key of a bucket's residuals, also where several modules have one state.

        DDP lays its buckets anew after the first step. Residuals of all former buckets are then dropped: they belong to other
        elements.
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

    The bucket is summed over the tiers from the innermost outwards, each in its codec, and the mean goes back the same way.
    Backward goes on meanwhile. All ranks end with the same bits. With codec ``none`` the result is that of DDP up to the
    order of additions, which are made in float32.

    Args:
        state: Settings and residuals.
        bucket: Gradients of float32, bfloat16 or float16.

    Returns:
        The averaged bucket, as DDP waits for it. A peer that does not come is an error of backward that names it.

    Raises:
        TypeError: Gradients of another type, or sparse ones; a state that is no `DdpState`.
    """
    if not isinstance(state, DdpState):
        raise TypeError(f"ddp_hook: state: found {type(state).__name__}, expected an hzero.comm.DdpState")
    communicator, buffer = state.communicator, bucket.buffer()
    chain = communicator.all_reduce(buffer, "mean", key=state.key(bucket), async_op=True)
    return _future(chain, communicator, buffer.device)


def _future(
    chain: Chain[torch.Tensor], communicator: Communicator, device: torch.device
) -> torch.futures.Future[torch.Tensor]:
    ended: torch.futures.Future[None]
    streams = communicator.streams
    if streams is None:
        ended = torch.futures.Future(devices=[device] if device.type != "cpu" else None)
        # An error has to be raised in a callback: DDP takes that of `set_exception` for a result.
        result = ended.then(lambda _: chain.wait())
        chain.add_done_callback(lambda: ended.set_result(None))
        return result
    # All work has been enqueued. The future remembers the stream on which it gets its value, and DDP waits for that stream.
    with streams.on(None, results=True):
        averaged = torch.futures.Future[torch.Tensor](devices=[device])
        averaged.set_result(chain.wait())
    return averaged
