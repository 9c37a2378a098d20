"""Structures for Lightning: the files of a run as its training, validation and test batches."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from mlff.atoms import LabelKeys
from mlff.data.batch import BudgetSampler, loader
from mlff.data.read import Dataset, read, split

__all__ = ["StructureData", "loader"]

Source = Dataset | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A data set, or files of one: a path, a folder, a glob, or a list of them."""


class StructureData(pl.LightningDataModule):
    """Training, validation and test structures as batches of (Graph, Targets), for a Lightning trainer.

    Give the trainer `use_distributed_sampler=False`: the batches are shared out over the ranks here, the same number
    to each. A run that goes on from a checkpoint in the middle of an epoch sees the rest of that epoch. Where ranks
    would get different numbers of validation or test batches, some structures come a second time, without labels: what
    masks missing labels counts each structure once.

    Args:
        train: data set or files to train on.
        valid: data set or files to validate on; None = a part of `train`, chosen by `valid_fraction` and `seed`.
        test: data set or files to test on, if any.
        cutoff: of the graphs, Å; not needed where data sets are given.
        elements: atomic numbers that the model knows; None = any.
        keys: under which names labels are stored.
        batch_atoms: most atoms in a batch.
        batch_edges: most edges in a batch, 0 = no limit.
        valid_fraction: part of `train` that is kept for validation where `valid` is None.
        seed: of the split and of the order of training structures.
        workers: processes that prepare batches, 0 = the training process.
    """

    def __init__(
        self,
        train: Source,
        valid: Source | None = None,
        test: Source | None = None,
        *,
        cutoff: float | None = None,
        elements: Collection[int] | None = None,
        keys: LabelKeys | None = None,
        batch_atoms: int = 128,
        batch_edges: int = 0,
        valid_fraction: float = 0.1,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        super().__init__()
        self._sources: dict[str, Source | None] = {"train": train, "valid": valid, "test": test}
        self._cutoff, self._elements, self._keys = cutoff, elements, keys
        self.batch_atoms, self.batch_edges = batch_atoms, batch_edges
        self.valid_fraction, self.seed, self.workers = valid_fraction, seed, workers
        self._sets: dict[str, Dataset] = {}
        self._place = (0, 0)  # epoch, and batches of it to leave out

    def setup(self, stage: str | None = None) -> None:
        """Read the files, once.

        Raises:
            FileNotFoundError: a file is not there.
            ValueError: a file cannot be read, or holds an element that the model does not know; or nothing is left to
                train on.
        """
        if self._sets:
            return
        sets = {name: self._open(source) for name, source in self._sources.items() if source is not None}
        if "valid" not in sets:
            sets["train"], sets["valid"] = split(sets["train"], self.valid_fraction, self.seed)
        self._sets = sets

    @property
    def train(self) -> Dataset:
        """Structures to train on."""
        return self._set("train")

    @property
    def valid(self) -> Dataset:
        """Structures to validate on."""
        return self._set("valid")

    @property
    def test(self) -> Dataset:
        """Structures to test on.

        Raises:
            ValueError: none were given.
        """
        return self._set("test")

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches of this rank."""
        batches = self._loader(self.train, shuffle=True)
        sampler = cast(BudgetSampler, batches.batch_sampler)
        # Lightning begins the first pass before it says which epoch it is.
        sampler.epoch, sampler.start = self._place
        self._place = (0, 0)
        return batches

    def val_dataloader(self) -> DataLoader[Any]:
        """Return batches of this rank, in order."""
        return self._loader(self.valid, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return batches of this rank, in order."""
        return self._loader(self.test, shuffle=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data: the epoch, and how many of its batches have been trained on."""
        epoch = batches = 0
        if self.trainer is not None:
            loop: Any = self.trainer.fit_loop
            epoch = max(0, loop.epoch_progress.current.started - 1)
            batches = loop.epoch_loop.batch_progress.current.processed
            if batches >= loop.max_batches:
                epoch, batches = epoch + 1, 0
        return {"epoch": epoch, "batches": batches, **self._plan_of()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the place where a checkpoint stands.

        Raises:
            ValueError: the checkpoint stands inside an epoch and was written with another seed, another number of
                structures or ranks or other budgets, so that the rest of its epoch is not known.
        """
        for name, now in self._plan_of().items():
            if state_dict[name] != now and state_dict["batches"]:
                raise ValueError(
                    f"the checkpoint stands inside an epoch with {name} = {state_dict[name]}; now it is {now}. "
                    "Continue with data, seed, budgets and number of ranks of that run, or start afresh."
                )
        self._place = (state_dict["epoch"], state_dict["batches"])

    def _plan_of(self) -> dict[str, int]:
        """What the batches of an epoch follow from."""
        return {
            "seed": self.seed,
            "structures": len(self.train),
            "batch_atoms": self.batch_atoms,
            "batch_edges": self.batch_edges,
            "ranks": self._ranks(),
        }

    def _ranks(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size

    def _set(self, name: str) -> Dataset:
        self.setup()
        if name not in self._sets:
            raise ValueError(f"no {name} structures were given; pass {name}=… to StructureData.")
        return self._sets[name]

    def _open(self, source: Source) -> Dataset:
        if isinstance(source, Dataset):
            return source
        if self._cutoff is None:
            raise ValueError("reading files into graphs needs the model's cutoff; pass cutoff=… in Å.")
        return read(source, self._cutoff, self._elements, self._keys)

    def _loader(self, dataset: Dataset, shuffle: bool) -> DataLoader[Any]:
        rank = 0 if self.trainer is None else self.trainer.global_rank
        budgets = self.batch_atoms, self.batch_edges
        return loader(dataset, *budgets, self.seed, shuffle, self.workers, rank, self._ranks())
