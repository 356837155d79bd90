"""``hzero doctor``: what this machine runs hzero on, and whether that is what it could."""

from hzero.doctor.command import examine, run_doctor

__all__ = ["examine", "run_doctor"]
