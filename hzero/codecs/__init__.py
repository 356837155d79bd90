"""Payload formats, as torch.library operators, and the backends that compute them."""
