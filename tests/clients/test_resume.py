"""A training resumes on other ranks, under another preset: 4, then 2, then 6. One launch for each world."""

from __future__ import annotations

import tempfile

from tests.clients.test_clients import needs_clients
from tests.ranks import on_ranks

CHECKS = ("tests.clients.resume_checks",)
#: One world writes its checkpoints here, and the next resumes from them.
FOLDER = tempfile.TemporaryDirectory()

test_resume = needs_clients(on_ranks({4: CHECKS, 2: CHECKS, 6: CHECKS}, HZERO_RESUME_FOLDER=FOLDER.name))
