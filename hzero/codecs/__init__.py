"""Payload formats, and the backends that encode and decode them."""
