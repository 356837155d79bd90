"""Payload formats, as torch.library operators, and the backends that compute them."""

from hzero.codecs.codec import Codec

__all__ = ["Codec"]
