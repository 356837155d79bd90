"""``hzero doctor``: checks ranks, links, environment and backends."""

from hzero.doctor.command import examine, run_doctor

__all__ = ["examine", "run_doctor"]
