"""Ulysses sequence parallelism in Trainer against plain ZeRO-3. Run by test_clients.py on 4 ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import deepspeed
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.clients.cells import LENGTH, Run, assert_both
from tests.clients.trainer_checks import trained
from tests.ranks import LONG


@contextlib.contextmanager
def _for_one_run() -> Iterator[None]:
    """Undoes what one run leaves in the process, and what keeps gloo from it."""
    deepspeed.init_distributed("gloo")  # on devices Accelerate does
    scatter = dist.scatter
    with (
        # Accelerate replaces the models' attention by DeepSpeed's.
        mock.patch.object(ALL_ATTENTION_FUNCTIONS, "_local_mapping", dict(ALL_ATTENTION_FUNCTIONS._local_mapping)),
        # The backward of torch's all-gather scatters on gloo, and takes ranks of the group for those of the world.
        mock.patch.object(
            dist, "scatter", lambda out, all, rank, group: scatter(out, all, group=group, group_src=rank)
        ),
    ):
        yield
    parallel_state_sp._release_sequence_parallel_groups()


def _sequences(preset: str | None) -> Run:
    """Two ranks share each sequence."""
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
    )
    with _for_one_run():
        parallel = ParallelismConfig(sp_size=2, sp_backend="deepspeed", dp_shard_size=2, sp_handler=handler)
        return trained(preset, parallelism_config=parallel)


@LONG
def check_trainer_shares_sequences_by_ulysses() -> None:
    """Two ranks share each sequence, and two groups of them the data."""
    assert_both(_sequences, _sequences(None))
