"""Pipeline parallelism of a GPT-NeoX: its stages as a DeepSpeed ``PipelineModule``, and the loop that trains them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

import hzero
from hzero.settings.settings import Settings
from hzero.sharding.tensor_groups import TensorGroups, stage_layers
from hzero.train.batches import Batch
from hzero.train.data import Tokens
from hzero.train.examples import Examples
from hzero.train.loop import Loop
from hzero.validation import ConfigError


class Stage(torch.nn.Module):
    """The layers of one stage, of a whole model that is given up for it.

    transformers' own ``forward`` of the layers makes masks and rotary embeddings, the same on every stage; the first looks the
    embeddings up, and the last has the final norm and the head.

    Args:
        model: A ``GPTNeoXForCausalLM``, whole or split over a tensor group; its other layers are dropped.
        stage: Number of the stage.
        stages: Number of all stages.
    """

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        self._first, self._last = stage == 0, stage == stages - 1
        first, last = stage_layers(len(model.gpt_neox.layers), stage, stages)
        self.gpt_neox = model.gpt_neox
        self.gpt_neox.layers = self.gpt_neox.layers[first:last]
        if not self._first:
            self.gpt_neox.embed_in = None
        if self._last:
            self.embed_out = model.lm_head
        else:
            self.gpt_neox.final_layer_norm = torch.nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Ids, int64 ``[sequences, length]``, or hidden states ``[.., hidden]``, to hidden states or logits ``[.., vocab]``."""
        given = {"input_ids": inputs} if self._first else {"inputs_embeds": inputs}
        hidden: torch.Tensor = self.gpt_neox(**given).last_hidden_state
        return self.embed_out(hidden) if self._last else hidden


def pipeline_of(model: Any, layout: TensorGroups, rank: int) -> PipelineModule:
    """The stages of a whole GPT-NeoX, of which this rank keeps its own.

    Args:
        model: A ``GPTNeoXForCausalLM``, the same on all ranks but for its parts of layers; it is used up.
        layout: Groups of the ranks, which are numbered node by node and package by package.
        rank: This rank.
    """
    loss = functools.partial(_loss, model.loss_function, model.config.vocab_size)
    # What other ranks have is not built here: a layer without parameters stands for it.
    stages: list[torch.nn.Module] = [torch.nn.Identity() for _ in range(layout.pipeline)]
    stages[layout.stage(rank)] = Stage(model, layout.stage(rank), layout.pipeline)
    topology = PipeModelDataParallelTopology(layout.pipeline, layout.tensor, layout.data)
    with contextlib.redirect_stdout(None):  # which layers stand where, in a dozen lines
        return PipelineModule(stages, topology=topology, loss_fn=loss, partition_method="uniform")


def _loss(of: Callable[..., torch.Tensor], vocab: int, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean next-token loss of transformers, a scalar, in float32."""
    return of(logits=logits, labels=labels, vocab_size=vocab)


class PipelineLoop(Loop):
    """The loop with pipeline stages: DeepSpeed's engine runs all micro-batches of a step, and all batches of an evaluation."""

    def __init__(self, settings: Settings, run_dir: Path, corpus: Tokens | Examples, *rest: Any) -> None:
        if isinstance(corpus, Examples):
            raise ConfigError(
                f"data.path: found examples with model.pipeline_parallel {settings.layout.pipeline}, whose micro-batches have to "
                "be of one shape and weight; possible: a text"
            )
        super().__init__(settings, run_dir, corpus, *rest)

    def _start(self, built: torch.nn.Module, config: dict[str, Any], groups: Any) -> Any:
        module = pipeline_of(built, self._layout, self._rank)
        return hzero.initialize(model=module, model_parameters=module.parameters(), config=config)[0]

    def _micro_steps(self, step: int) -> torch.Tensor:
        count = self._settings["train"]["grad_accumulation"]
        batches = (self._batches.training(step, micro) for micro in range(count))
        loss: torch.Tensor = self._engine.train_batch(_tensors(batches))
        return loss.detach().float()

    def _losses(self) -> dict[str, float]:
        decoded = self._mean_loss()
        own = hzero.state(self._engine)
        if own is None or not own.lossy:
            return {"loss_decoded": decoded, "loss_exact": decoded}
        with hzero.exact_weights(self._engine):
            return {"loss_decoded": decoded, "loss_exact": self._mean_loss()}

    def _mean_loss(self) -> float:
        count = self._settings["train"]["eval_batches"]
        batches = (self._batches.evaluation(index) for index in range(count))
        return float(self._engine.eval_batch(_tensors(batches), num_micro_batches=count))


def _tensors(batches: Iterator[Batch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels, as DeepSpeed's first and last stage take them from each batch."""
    for batch in batches:
        yield torch.from_numpy(batch.inputs["input_ids"]), torch.from_numpy(batch.inputs["labels"])
