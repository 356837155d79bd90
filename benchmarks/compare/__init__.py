"""Step time, bytes, memory and loss of hzero and of its alternatives, on an emulated cluster."""
