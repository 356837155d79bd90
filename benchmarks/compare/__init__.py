"""Step time, bytes, memory and loss of hzero and of what its users would pick instead, on an emulated cluster."""
