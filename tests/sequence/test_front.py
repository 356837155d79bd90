"""Long sequences under DeepSpeed and FSDP2."""

from tests.ranks import on_ranks

test_on_ranks = on_ranks({4: ["tests.sequence.front_checks"]})
