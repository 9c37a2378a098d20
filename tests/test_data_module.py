"""Structures for Lightning, and data loaders whose batches are made by other processes."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
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
SIZES_5 = FILES / "sizes_2_3_5_40_4.extxyz"
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


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seed", 4, "seed = 4; now it is 0"),
        ("structures", 7, "structures = 7; now it is 6"),
        ("batch_atoms", 64, "batch_atoms = 64; now it is 128"),
        ("batch_edges", 9, "batch_edges = 9; now it is 0"),
        ("ranks", 2, "ranks = 2; now it is 1"),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(name, value, words):
    data = StructureData(read(SIZES, 3.0), valid=read(SIZES, 3.0))
    place = {**data.state_dict(), "epoch": 1, name: value}
    data.load_state_dict({**place, "batches": 0})  # where an epoch begins, nothing depends on the last one
    with pytest.raises(ValueError, match=words):
        data.load_state_dict({**place, "batches": 3})


@pytest.mark.slow
def test_rt2_two_ranks_take_the_same_steps_and_validate_each_structure_once(tmp_path):
    """Two processes that wait for each other at every step (gloo), two epochs: five structures, one in a batch."""
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(SIZES_5), str(rank)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        told = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    steps = [len(one["train"]) for one in told]
    assert steps == [6, 6]
    for epoch in (slice(0, 3), slice(3, 6)):
        assert set(itertools.chain(*told[0]["train"][epoch], *told[1]["train"][epoch])) == {0, 1, 2, 3, 4}
    assert [one["validated"] for one in told] == [[0, 2, 4], [1, 3]]
    assert told[0]["sum"] == told[1]["sum"] == 5.0


# Every step adds over the ranks: a rank with more steps than the other would wait for ever.
TWO_RANKS = """
import json, sys, warnings
import torch
from mlff.data.batch import loader
from mlff.data.read import read

warnings.simplefilter("ignore")
file, rank = sys.argv[1], int(sys.argv[2])
torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
dataset = read(file, cutoff=3.0)
train = loader(dataset, batch_atoms=2, shuffle=True, rank=rank, world_size=2)
shown = []
for epoch in range(2):
    train.batch_sampler.set_epoch(epoch)
    for number, (graph, targets) in enumerate(train):
        torch.distributed.all_reduce(targets.energy.sum())
        shown.append(targets.index.tolist())
    assert number + 1 == len(train)
validated, counted = [], torch.zeros(())
for graph, targets in loader(dataset, batch_atoms=2, rank=rank, world_size=2):
    known = targets.energy.isfinite()
    validated += targets.index[known].tolist()
    counted += known.sum()
torch.distributed.all_reduce(counted)
print(json.dumps({"train": shown, "validated": validated, "sum": counted.item()}))
torch.distributed.destroy_process_group()
"""


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
