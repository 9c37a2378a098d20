"""Structures for Lightning, and data loaders whose batches are made by other processes."""

from __future__ import annotations

import itertools
import pickle
import warnings
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mlff.data.batch import BudgetSampler, loader
from mlff.data.module import StructureData
from mlff.data.read import read

FILES = Path(__file__).parent / "data"
SIZES = FILES / "sizes_4_and_8.extxyz"  # six structures of 4 or 8 atoms
EMBEDDED = Path(__file__).parents[1] / "presets" / "data" / "acetylcysteine.h5"


def taken(batches):
    return [targets.index.tolist() for _, targets in batches]


def test_files_become_three_sets_of_batches():
    data = StructureData(SIZES, test=[FILES / "e0_exact.extxyz"], cutoff=3.0, batch_atoms=8, valid_fraction=0.3, seed=2)
    assert (len(data.train), len(data.valid), len(data.test)) == (4, 2, 3)
    graph, targets = next(iter(data.train_dataloader()))
    assert graph.n_atoms <= 8
    assert targets.energy.shape == (graph.n_structures,)
    assert taken(data.test_dataloader()) == [[0, 1, 2]]
    assert sorted(itertools.chain(*taken(data.val_dataloader()))) == [0, 1]
    again = StructureData(SIZES, cutoff=3.0, valid_fraction=0.3, seed=2)
    assert [len(again.train.numbers_of(i)) for i in range(4)] == [len(data.train.numbers_of(i)) for i in range(4)]


def test_rt9_one_structure_to_validate_on():
    data = StructureData(FILES / "e0_exact.extxyz", valid=FILES / "keys_plain.extxyz", cutoff=4.0, batch_atoms=10)
    assert [len(batch) for batch in taken(data.train_dataloader())] == [3]
    assert taken(data.val_dataloader()) == [[0]]


def test_what_is_missing_is_said():
    with pytest.raises(ValueError, match="cutoff"):
        StructureData(SIZES).setup()
    with pytest.raises(ValueError, match="no test structures were given"):
        _ = StructureData(read(SIZES, cutoff=3.0)).test


class Diary(pl.LightningModule):
    """Trains one number and notes which structures it was shown."""

    def __init__(self):
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(()))
        self.shown = []

    def training_step(self, batch, batch_index):
        self.shown.append(batch[1].index.tolist())
        return self.number**2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder, steps, resume=None, save_at=None):
    """Train on six structures, one in a batch or two, so that an epoch has five batches."""
    diary, data = Diary(), StructureData(read(SIZES, 3.0), valid=read(SIZES, 3.0), batch_atoms=9, seed=5)
    callbacks: list[pl.Callback] = []
    if save_at:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_at, save_top_k=-1))
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=callbacks,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and loggers
        trainer.fit(diary, data, ckpt_path=resume)
    return diary, trainer


def test_rt5_a_resumed_run_sees_the_rest_of_the_epoch(tmp_path):
    """Checkpoints inside the first and the second epoch, and where an epoch ends."""
    whole, trainer = train(tmp_path, 13, save_at=1)
    per_epoch = trainer.num_training_batches
    assert per_epoch == 5
    assert whole.shown[:5] != whole.shown[5:10]  # mixed anew
    assert sorted(itertools.chain(*whole.shown[:5])) == list(range(6))
    assert sorted(itertools.chain(*whole.shown[5:10])) == list(range(6))
    for step in (2, 4, 5, 8, 10):
        resumed, _ = train(tmp_path, 13, resume=tmp_path / f"step={step}.ckpt")
        assert resumed.shown == whole.shown[step:], f"from step {step}"


def test_a_checkpoint_of_other_data_is_refused():
    data = StructureData(read(SIZES, 3.0), valid=read(SIZES, 3.0))
    with pytest.raises(ValueError, match="structures = 7; now it is 6"):
        data.load_state_dict({"epoch": 1, "batches": 3, "seed": 0, "structures": 7})


# Other processes


@pytest.mark.parametrize(
    ("start_method", "source"),
    [("fork", SIZES), ("spawn", f"{EMBEDDED}::valid"), ("forkserver", SIZES)],
    ids=["fork-extxyz", "spawn-hdf5", "forkserver-extxyz"],
)
def test_rd11_workers_give_the_same_structures(start_method, source):
    """Three epochs with two workers that stay, after an item was read here."""
    dataset = read(source, cutoff=3.0)
    dataset = dataset.subset(range(min(24, len(dataset))))
    _ = dataset[0]
    alone = loader(dataset, batch_atoms=100, shuffle=True, seed=1)
    together = loader(dataset, batch_atoms=100, shuffle=True, seed=1, workers=2, start_method=start_method)
    for epoch in range(3):
        for batches in (alone, together):
            cast(BudgetSampler, batches.batch_sampler).set_epoch(epoch)
        for (graph, targets), (same_graph, same_targets) in zip(alone, together, strict=True):
            assert torch.equal(targets.index, same_targets.index)
            assert torch.equal(graph.positions, same_graph.positions)
            assert torch.equal(graph.senders, same_graph.senders)
            assert torch.equal(targets.energy, same_targets.energy)


def test_rd11_a_data_set_can_be_pickled_after_use():
    dataset = read(SIZES, cutoff=3.0)
    before = dataset[2]
    dataset.n_edges()
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == 6
    assert torch.equal(copy[2][0].positions, before[0].positions)
    assert torch.equal(copy[2][1].energy, before[1].energy)
