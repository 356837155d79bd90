"""Batches of one rank: its share of a step's sequences, which depend on seed and step alone, so a resumed run sees the same."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from hzero.settings.settings import Settings
from hzero.train.data import Tokens
from hzero.train.examples import Examples, Sequences, sequences

#: Label of a token that the loss does not count.
IGNORED = -100
#: Tokens of the text for evaluation that begin a sample of the model's writing.
_PROMPT = 16


@dataclass(frozen=True)
class Batch:
    """What the model is called with.

    Attributes:
        inputs: int64 arrays ``[sequences, length]`` by the name of the model's argument.
        share: Weight of the batch's mean loss, so that the mean over ranks and micro-steps is the mean over all tokens that
            the loss counts; 1 where all batches count as many.
    """

    inputs: dict[str, np.ndarray]
    share: float = 1.0


class Batches(ABC):
    """Where the loop takes batches from.

    Args:
        settings: The run's settings.
        rank: This rank's number among those that read other batches; the ranks of a tensor or sequence group read the same.

    Attributes:
        packs: Whether sequences hold several examples.
    """

    packs = False

    def __init__(self, settings: Settings, rank: int) -> None:
        self.train, self.length = settings["train"], settings["model"]["seq_length"]
        self.rank, self.world = rank, settings.readers.data

    @abstractmethod
    def training(self, step: int, micro: int) -> Batch:
        """The batch of a micro-step (from 0) of a step (from 1)."""

    @abstractmethod
    def evaluation(self, index: int) -> Batch:
        """A batch for evaluation, the same in every run."""

    @abstractmethod
    def tokens(self, step: int) -> int:
        """Tokens that all ranks have seen after a step, without padding."""

    @abstractmethod
    def prompt(self, limit: int) -> np.ndarray:
        """Up to ``limit`` ids that begin a text for evaluation."""


class _Windows(Batches):
    """Windows at random places of a text."""

    def __init__(self, text: Tokens, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self._text = text

    def training(self, step: int, micro: int) -> Batch:
        ids = self._text.batch(
            seed=self.train["seed"],
            step=step,
            first=(micro * self.world + self.rank) * self.train["micro_batch"],
            size=self.train["micro_batch"],
            length=self.length,
        )
        return Batch({"input_ids": ids, "labels": ids})

    def evaluation(self, index: int) -> Batch:
        place = index * self.world + self.rank
        ids = self._text.evaluation_batch(index=place, size=self.train["micro_batch"], length=self.length)
        return Batch({"input_ids": ids, "labels": ids})

    def tokens(self, step: int) -> int:
        return int(step * self.world * self.train["micro_batch"] * self.train["grad_accumulation"] * self.length)

    def prompt(self, limit: int) -> np.ndarray:
        return self._text.evaluation[: min(limit, _PROMPT)].astype(np.int64)


class _Shuffled(Batches):
    """Sequences of examples, each once an epoch, in an order of the epoch's own."""

    def __init__(self, examples: Examples, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self._examples, self.packs = examples, settings["data"]["packing"]
        self._laid = sequences(examples, self.length, self.packs)
        self._evaluation = evaluation_sequences(self._laid, examples.eval_share)
        self._training = len(self._laid.pieces) - self._evaluation
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.train["seed"], epoch]).permutation(self._training)

    def _rows(self, start: int, count: int) -> np.ndarray:
        """Sequences at places of the endless order."""
        places = (divmod(place, self._training) for place in range(start, start + count))
        return np.asarray([self._order(epoch)[at] for epoch, at in places])

    def training(self, step: int, micro: int) -> Batch:
        size, accumulation = self.train["micro_batch"], self.train["grad_accumulation"]
        whole = self._rows((step - 1) * accumulation * self.world * size, accumulation * self.world * size)
        mine = whole[(micro * self.world + self.rank) * size :][:size]
        return self._batch(mine, whole, self.world * accumulation)

    def evaluation(self, index: int) -> Batch:
        size, batches = self.train["micro_batch"], self.train["eval_batches"]
        whole = self._training + np.arange(batches * self.world * size) % self._evaluation
        return self._batch(whole[(index * self.world + self.rank) * size :][:size], whole, batches * self.world)

    def tokens(self, step: int) -> int:
        seen = step * self.world * self.train["micro_batch"] * self.train["grad_accumulation"]
        epochs, rest = divmod(seen, self._training)
        lengths = self._laid.lengths[: self._training]
        return int(epochs * lengths.sum() + lengths[self._order(epochs)[:rest]].sum())

    def prompt(self, limit: int) -> np.ndarray:
        first, size = self._laid.pieces[self._training][0]
        counted = self._examples.counted[first : first + size]
        # Of a text, all of which is counted, as many as of other texts.
        end = int(np.argmax(counted)) or _PROMPT
        return self._examples.ids[first : first + min(size, end)][-limit:].astype(np.int64)

    def _batch(self, mine: np.ndarray, whole: np.ndarray, parts: int) -> Batch:
        counts = self._laid.counts
        ids = np.zeros((len(mine), int(self._laid.lengths[mine].max())), np.int64)
        labels, positions = np.full_like(ids, IGNORED), np.zeros_like(ids)
        for row, sequence in enumerate(mine):
            at = 0
            for first, size in self._laid.pieces[sequence]:
                here = slice(at, at + size)
                ids[row, here] = self._examples.ids[first : first + size]
                counted = self._examples.counted[first : first + size].astype(bool)
                counted[0] = False  # it would be predicted from the example before
                labels[row, here] = np.where(counted, ids[row, here], IGNORED)
                positions[row, here] = np.arange(size)
                at += size
            positions[row, at:] = np.arange(ids.shape[1] - at)
        inputs = {"input_ids": ids, "labels": labels}
        if self.packs:
            # Positions that begin anew are what transformers' masks tell examples apart by.
            inputs["position_ids"] = positions
        return Batch(inputs, float(counts[mine].sum() * parts / counts[whole].sum()))


def evaluation_sequences(laid: Sequences, share: float) -> int:
    """Sequences that are kept for evaluation, from the end."""
    return max(1, int(len(laid.pieces) * share))


def batches_of(corpus: Tokens | Examples, settings: Settings, rank: int) -> Batches:
    """The batches of a rank."""
    kind: Any = _Windows if isinstance(corpus, Tokens) else _Shuffled
    return kind(corpus, settings, rank)  # type: ignore[no-any-return]
