"""A sample: text that the model writes with its exact weights, on all ranks together, since gathers are collective."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hzero
from hzero.settings.settings import Settings
from hzero.train import folder
from hzero.train.batches import Batches
from hzero.train.examples import Examples
from hzero.train.sequence_parallel import whole_sequences


def _together(group: dist.ProcessGroup, device: torch.device, max_time: float) -> Any:
    """Ends writing after a time on all ranks of a tensor group at once: their forwards exchange tensors of one shape."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Together(StoppingCriteria):  # type: ignore[misc]
        started = time.perf_counter()

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            over = torch.tensor([time.perf_counter() - self.started > max_time], dtype=torch.uint8, device=device)
            dist.all_reduce(over, dist.ReduceOp.MAX, group)
            return over.bool().expand(len(input_ids))

    return StoppingCriteriaList([Together()])


class Sampler:
    """Writes samples of a run: the same prompt each time, and the same seed.

    Args:
        settings: The run's settings.
        run_dir: The run's folder, which holds the tokenizer.
        batches: Where a prompt is taken from if none is given.
        corpus: What the model learns from: a prompt is a user's message if these are conversations.
    """

    def __init__(self, settings: Settings, run_dir: Path, batches: Batches, corpus: Any) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        self._sample, self._seed = settings["sample"], settings["train"]["seed"]
        self._path = run_dir / folder.SAMPLES
        self._tokenizer = AutoTokenizer.from_pretrained(run_dir / folder.MODEL)
        self._end = GenerationConfig.from_pretrained(run_dir / folder.MODEL).eos_token_id
        length = settings["model"]["seq_length"]
        self._tokens = min(self._sample["tokens"], length // 2)
        room = length - self._tokens
        prompt = self._sample["prompt"]
        if prompt is None:
            ids = batches.prompt(room).tolist()
        elif isinstance(corpus, Examples) and corpus.chat:
            message = [{"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer(prompt)["input_ids"]
            if ids and ids[-1] == self._tokenizer.eos_token_id:
                ids = ids[:-1]
        self._prompt = ids[-room:]

    @torch.no_grad()
    def write(self, engine: Any, step: int) -> dict[str, Any]:
        """One sample after a step. A collective.

        Returns:
            What ``samples.jsonl`` says of it; that of rank 0 counts, where the time limit ended it.
        """
        started = time.perf_counter()
        device = engine.device
        ids = torch.tensor([self._prompt], device=device)
        warm = self._sample["temperature"] > 0
        choice = {"do_sample": True, "temperature": float(self._sample["temperature"]), "top_k": 0} if warm else {}
        devices = [device] if device.type == "cuda" else []
        patience: dict[str, Any] = {"max_time": float(self._sample["max_s"])}
        if engine.mp_world_size > 1:
            patience = {"stopping_criteria": _together(engine.mpu.get_model_parallel_group(), device, **patience)}
        training = engine.module.training
        engine.eval()
        with hzero.exact_weights(engine), whole_sequences(engine.module), torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._seed)
            written = engine.module.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self._tokens,
                eos_token_id=self._end,
                pad_token_id=0,
                use_cache=True,
                synced_gpus=True,
                remove_invalid_values=True,  # of weights that are not finite any more: a sample ends no run
                **patience,
                **({"do_sample": False} | choice),
            )
        engine.train(training)
        new = written[0, ids.shape[1] :].tolist()
        return {
            "step": step,
            "prompt": self._tokenizer.decode(self._prompt),
            "text": self._tokenizer.decode(new),
            "tokens": len(new),
            "seconds": time.perf_counter() - started,
        }

    def keep(self, row: dict[str, Any]) -> None:
        """Appends a sample to ``samples.jsonl``."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
