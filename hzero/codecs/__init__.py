"""Payload formats, as torch.library operators with a reference backend in plain torch."""

from hzero.codecs.codec import Codec

__all__ = ["Codec"]
