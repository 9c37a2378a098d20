"""Reading labelled structures: formats, folders, labels, elements, and what is said when a file is wrong."""

from __future__ import annotations

import gzip
import pickle
import shutil
import time
import warnings
from pathlib import Path

import ase.io
import laws
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator

from mlff.atoms import LabelKeys, graph_from_atoms, targets_from_atoms
from mlff.data.batch import collate, collate_targets
from mlff.data.dataset import Dataset, join_frames, make_frames
from mlff.data.packed import PackedGroup, write_packed
from mlff.data.read import read, require_labels, split
from mlff.derivatives import evaluate
from mlff.sezm.potential import SeZM

FILES = Path(__file__).parent / "data"

FORCES = np.array([[0.1, -0.2, 0.3], [-0.1, 0.2, -0.3]])
STRESS = 1e-3 * np.array([[1.0, 6, 5], [6, 2, 4], [5, 4, 3]])  # eV/Å³
REF = LabelKeys(energy="REF_energy", forces="REF_forces", stress="REF_stress")


def tensors_of(table):
    return {name: value for name, value in vars(table).items() if isinstance(value, torch.Tensor)}


def assert_same(one, other):
    """Both are (Graph, Targets) with equal tensors, NaN where NaN."""
    for a, b in zip(one, other, strict=True):
        assert tensors_of(a).keys() == tensors_of(b).keys()
        for name, value in tensors_of(a).items():
            torch.testing.assert_close(
                value, tensors_of(b)[name], rtol=0, atol=0, equal_nan=True, msg=f"{name} differs"
            )


def labelled(atoms, seed=0, **info):
    """Return the structure with random labels where ASE puts them."""
    rng = np.random.default_rng(seed)
    atoms = atoms.copy()
    labels = {"energy": rng.normal(), "forces": rng.normal(size=(len(atoms), 3))}
    if atoms.pbc.any():
        labels["stress"] = 0.01 * rng.normal(size=6)
    atoms.calc = SinglePointCalculator(atoms, **labels)
    atoms.info.update(info)
    return atoms


def several():
    copper = bulk("Cu", cubic=True)
    copper.rattle(0.1, seed=1)
    return [
        labelled(molecule("H2O"), 0, config_type="water", charge=-1, spin=2),
        labelled(copper, 1, config_type="copper"),
        labelled(molecule("CH3CH2OH"), 2),
    ]


# Labels


def test_rd1_plain_keys():
    (_, targets), *others = read(FILES / "keys_plain.extxyz", 5.0)
    assert not others
    assert targets.energy.tolist() == [-7.0]
    np.testing.assert_array_equal(targets.forces.numpy(), FORCES)
    np.testing.assert_allclose(targets.stress[0].numpy(), STRESS, rtol=1e-15)


def test_rd2_other_keys_give_the_same():
    assert_same(read(FILES / "keys_ref.extxyz", 5.0, keys=REF)[0], read(FILES / "keys_plain.extxyz", 5.0)[0])


def test_rd2_labels_found_nowhere_are_an_error_with_the_names_that_are_there():
    dataset = read(FILES / "keys_unrelated.extxyz", 5.0)
    with pytest.raises(ValueError, match=r"label for energy \(under 'energy'\).*my_forces, my_label.*data\.energy_key"):
        require_labels(dataset, ["energy"])
    with pytest.raises(ValueError, match=r"label for forces \(under 'F'\).*training\.loss\.forces=0"):
        require_labels(dataset, ["forces"], LabelKeys(forces="F"))
    with pytest.raises(ValueError, match=r"under 'stress' or 'virial'.*only where the structure is periodic"):
        require_labels(dataset, ["stress"])
    require_labels(dataset, [])
    right = read(FILES / "keys_unrelated.extxyz", 5.0, keys=LabelKeys(energy="my_label", forces="my_forces"))
    require_labels(right, ["energy", "forces"])
    np.testing.assert_array_equal(right[0][1].forces.numpy(), FORCES)


def test_a_label_in_one_structure_suffices_but_counts_only_where_it_is_chosen():
    dataset = read(FILES / "missing_labels.extxyz", 5.0)
    require_labels(dataset, ["energy", "forces", "stress"])
    with pytest.raises(ValueError, match="no structure has a label for stress"):
        require_labels(dataset.subset([1, 2, 3]), ["stress"])
    with pytest.raises(ValueError, match="no structure has a label for forces"):
        require_labels(dataset.subset([3]), ["forces"])
    require_labels(dataset.subset([4]), ["forces"])  # one of two atoms has a force


@pytest.mark.parametrize(
    ("name", "keys"),
    [("stress_nine.extxyz", None), ("stress_voigt_ref_key.extxyz", REF), ("virial_nine.extxyz", None)],
)
def test_rd3_rd5_stress_from_every_notation(name, keys):
    np.testing.assert_allclose(read(FILES / name, 5.0, keys=keys)[0][1].stress[0].numpy(), STRESS, rtol=1e-14)


def test_rd3_six_numbers_under_the_plain_key():
    """ASE 3.22.1 to 3.29.0 refuse the file."""
    with pytest.raises(ValueError, match=r"stress_voigt_plain_key\.extxyz, frame 0 cannot be read.*data\.stress_key"):
        read(FILES / "stress_voigt_plain_key.extxyz", 5.0)


def test_rd4_kilobar_of_vasp(tmp_path):
    atoms = ase.io.read(FILES / "keys_plain.extxyz")
    atoms.calc = None
    atoms.info["raw"] = -1602.1766 * STRESS
    ase.io.write(tmp_path / "kilobar.extxyz", [atoms] * 2)
    keys = LabelKeys(stress="raw", stress_unit="kB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = read(tmp_path / "kilobar.extxyz", 5.0, keys=keys)
    np.testing.assert_allclose(dataset[1][1].stress[0].numpy(), STRESS, rtol=1e-6)  # digits of 1602.1766
    with pytest.warns(UserWarning, match=r"kilobar\.extxyz, frame 0: a stress of 9\.613.*data\.stress_unit") as caught:
        read(tmp_path / "kilobar.extxyz", 5.0, keys=LabelKeys(stress="raw"))
    assert len(caught) == 1


@pytest.mark.parametrize("name", ["deepmd_order_OH", "deepmd_order_HO"])
def test_rd5_rd8_deepmd_types_are_those_of_the_folder(name):
    (graph, targets), *others = read(FILES / name, 5.0)
    assert not others
    assert graph.numbers.tolist() == [8, 1, 1]
    assert graph.pbc.all()
    np.testing.assert_allclose(targets.stress[0].numpy(), STRESS, rtol=1e-14)
    assert_same((graph,), (read(FILES / "deepmd_order_OH", 5.0)[0][0],))


def test_rd6_missing_labels_become_nan():
    targets = [targets for _, targets in read(FILES / "missing_labels.extxyz", 5.0)]
    assert [t.stress.isnan().all().item() for t in targets] == [False, True, True, True, False]
    assert [t.stress.isnan().any().item() for t in targets] == [False, True, True, True, False]
    assert [t.forces.isnan().all().item() for t in targets] == [False, False, False, True, False]
    assert [t.energy.item() for t in targets] == [-7.0] * 5


def test_rd7_a_nan_label_is_a_missing_label():
    """One atom's force is NaN: the force of the other stays."""
    forces = read(FILES / "missing_labels.extxyz", 5.0)[4][1].forces.numpy()
    assert np.isnan(forces[0]).all()
    np.testing.assert_array_equal(forces[1], FORCES[1])


# Elements


def test_rd9_an_unknown_element_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"deepmd_extra_element/type_map\.raw, type 2: .*'D'"):
        read(FILES / "deepmd_extra_element", 5.0)
    with pytest.raises(ValueError, match=r"new_element_valid\.extxyz, frame 0, atom 0 is C, .* knows H, O"):
        read([FILES / "new_element_train.extxyz", FILES / "new_element_valid.extxyz"], 5.0, elements=(1, 8))
    assert len(read(FILES / "new_element_valid.extxyz", 5.0, elements=(1, 6))) == 1


@pytest.mark.parametrize("symbol", ["D", "Xx"])
def test_rd9_no_element_of_that_name(tmp_path, symbol):
    (tmp_path / "x.xyz").write_text(f"1\n\nH 0 0 0\n2\n\nH 0 0 0\n{symbol} 0 0 1\n")
    with pytest.raises(ValueError, match=rf"x\.xyz, frame 1 cannot be read: '{symbol}' is no element"):
        read(tmp_path / "x.xyz", 5.0)


def test_rd9_dummy_atoms_are_no_element(tmp_path):
    ase.io.write(tmp_path / "x.traj", [Atoms("H"), Atoms("HX", [[0, 0, 0], [0, 0, 1]])])
    with pytest.raises(ValueError, match=r"x\.traj, frame 1, atom 1: atomic number 0 is no element"):
        read(tmp_path / "x.traj", 5.0)


# Formats


@pytest.mark.parametrize("name", ["x.extxyz", "x.xyz.gz", "x.xyz.bz2", "x.xyz.xz", "x.traj", "x.db", "x.json"])
def test_formats_of_ase(tmp_path, name):
    """What the reader gives is what ASE's frames give one by one."""
    ase.io.write(tmp_path / name, several())
    dataset = read(tmp_path / name, 4.0)
    frames = ase.io.read(tmp_path / name, index=":")
    assert len(dataset) == len(frames) == 3
    for index, (pair, atoms) in enumerate(zip(dataset, frames, strict=True)):
        assert_same(pair, (graph_from_atoms(atoms, 4.0), targets_from_atoms(atoms, index=index)))
        assert pair[1].group == targets_from_atoms(atoms).group
    # The labels did come through (XYZ keeps eight digits).
    np.testing.assert_allclose(dataset.energies, [a.calc.results["energy"] for a in several()], atol=1e-7)
    np.testing.assert_allclose(dataset[1][1].forces, several()[1].calc.results["forces"], atol=1e-7)


def test_packed_frames(tmp_path):
    rng = np.random.default_rng(0)
    water, copper, _ = several()
    stress = 1e-3 * np.arange(1.0, 7)
    groups = [
        PackedGroup(
            water.numbers,
            np.round(water.positions + 0.1 * rng.normal(size=(4, 3, 3)), 4),
            energy=np.arange(4.0),
            forces=np.round(rng.normal(size=(4, 3, 3)), 4),
            charge=np.array([0, 1, 0, -1]),
            weight=np.full(4, 0.5),
            name="water",
            attributes={"split": "train"},
        ),
        PackedGroup(
            copper.numbers,
            np.round(copper.positions, 4)[None],
            stress=stress[None],
            cell=copper.cell.array,
            name="copper",
            attributes={"split": "valid"},
        ),
    ]
    write_packed(tmp_path / "x.h5", groups, {})
    dataset = read(tmp_path / "x.h5", 4.0)
    assert (len(dataset), dataset.groups, dataset.elements) == (5, ("water", "copper"), (1, 8, 29))
    for index in range(4):
        graph, targets = dataset[index]
        atoms = Atoms(water.numbers, groups[0].positions[index])
        atoms.info["charge"] = groups[0].charge[index]
        np.testing.assert_allclose(graph.positions, atoms.positions, atol=1e-12)
        assert torch.equal(graph.senders, graph_from_atoms(atoms, 4.0).senders)
        assert graph.charge.item() == groups[0].charge[index]
        assert (targets.energy.item(), targets.weight.item(), targets.group) == (index, 0.5, ("water",))
        np.testing.assert_allclose(targets.forces, groups[0].forces[index], atol=1e-12)
        assert targets.stress.isnan().all()
        assert not graph.pbc.any()
    graph, targets = dataset[4]
    assert graph.pbc.all()
    np.testing.assert_allclose(
        targets.stress[0], [[1e-3, 6e-3, 5e-3], [6e-3, 2e-3, 4e-3], [5e-3, 4e-3, 3e-3]], rtol=1e-9
    )
    assert targets.energy.isnan().all()
    assert targets.forces.isnan().all()
    assert len(read(f"{tmp_path}/x.h5::train", 4.0)) == 4
    with pytest.raises(ValueError, match="has no split 'test'"):
        read(f"{tmp_path}/x.h5::test", 4.0)


def test_rd10_open_systems_in_deepmd_format():
    graph, targets = read(FILES / "deepmd_nopbc", 5.0)[0]
    assert not graph.pbc.any()
    assert not graph.cell.any()
    atoms = Atoms(numbers=graph.numbers.numpy(), positions=graph.positions.numpy(), pbc=False)
    assert_same((graph,), (graph_from_atoms(atoms, 5.0),))
    assert targets.stress.isnan().all()


def test_rd10_a_batch_that_mixes_open_and_periodic():
    """Each structure keeps its edges, its cell and its boundaries."""
    mixed = read([FILES / "deepmd_nopbc", FILES / "keys_plain.extxyz", FILES / "deepmd_nopbc"], 5.0)
    graphs, targets = zip(*mixed, strict=True)
    batch, labels = collate(graphs), collate_targets(targets)
    assert batch.pbc.tolist() == [[False] * 3, [True] * 3, [False] * 3]
    owner = batch.structure[batch.receivers]
    assert torch.equal(owner, batch.structure[batch.senders])
    start = 0
    for k, graph in enumerate(graphs):
        here = owner == k
        assert torch.equal(batch.senders[here] - start, graph.senders)
        assert torch.equal(batch.receivers[here] - start, graph.receivers)
        assert torch.equal(batch.shifts[here], graph.shifts)
        assert torch.equal(batch.cell[k], graph.cell[0])
        start += graph.n_atoms
    assert labels.index.tolist() == [0, 1, 2]


SMALL = {"channels": 8, "lmax": 2, "n_blocks": 1, "n_radial": 6, "mixing_layers": 2, "rcut": 5.0}


@pytest.mark.parametrize("elements", [["H", "O"], ["O", "H"], ["C", "O", "N", "H"]])
def test_rd8_one_energy_whatever_the_order_of_types_and_of_elements(elements):
    """Two type maps, three element lists; the rows of the tables move with their elements."""
    potential = laws.noisy(SeZM.from_options(SMALL, ["H", "O", "C", "N"], dtype=torch.float64))
    state = potential.state_dict()
    other = SeZM.from_options(SMALL, elements, dtype=torch.float64)
    rows = [potential.elements.index(number) for number in other.elements]
    tables = {name for name, tensor in state.items() if len(tensor.shape) and len(tensor) == 4 and "types" in name}
    tables.add("reference_energies")
    other.load_state_dict({name: tensor[rows] if name in tables else tensor for name, tensor in state.items()})
    wanted = None
    for name in ("deepmd_order_OH", "deepmd_order_HO"):
        graph, _ = read(FILES / name, 5.0)[0]
        assert graph.numbers.tolist() == [8, 1, 1]
        wanted = evaluate(potential, graph) if wanted is None else wanted
        found = evaluate(other.eval(), graph)
        assert wanted.forces.abs().max() > 0.1  # the molecule is not at rest: there is something to compare
        assert torch.allclose(found.energy, wanted.energy, rtol=0, atol=3e-8)  # R-D8: 1e-8 eV/atom
        assert torch.allclose(found.forces, wanted.forces, rtol=0, atol=1e-6)


def test_rd10_energy_and_forces_of_open_systems_alone_and_beside_periodic_ones():
    """The same atoms through ASE with pbc False, and a batch of open, periodic, open."""
    potential = laws.noisy(SeZM.from_options(SMALL, ["H", "C", "O", "Cu", "Na", "Cl"], dtype=torch.float64))
    graph, _ = read(FILES / "deepmd_nopbc", 5.0)[0]
    atoms = Atoms(numbers=graph.numbers.numpy(), positions=graph.positions.numpy(), pbc=False)
    wanted = evaluate(potential, graph_from_atoms(atoms, 5.0))
    assert wanted.forces.abs().max() > 0.1
    alone = evaluate(potential, graph)
    batch = collate([graph, read(FILES / "deepmd_order_OH", 5.0)[0][0], graph])
    mixed = evaluate(potential, batch)
    assert batch.pbc.any(1).tolist() == [False, True, False]
    for energy, forces in (
        (alone.energy[0], alone.forces),
        (mixed.energy[0], mixed.forces[batch.structure == 0]),
        (mixed.energy[2], mixed.forces[batch.structure == 2]),
    ):
        assert abs(float(energy - wanted.energy[0])) < 1e-8 * len(atoms)
        assert float((forces - wanted.forces).abs().max()) < 1e-6


def deepmd_system(folder, types, symbols, sets, nopbc=False):
    """Write a system; `sets` is a list of dictionaries of arrays."""
    folder.mkdir(parents=True)
    (folder / "type.raw").write_text("\n".join(map(str, types)))
    (folder / "type_map.raw").write_text("\n".join(symbols) + "\n")
    if nopbc:
        (folder / "nopbc").touch()
    for number, arrays in enumerate(sets):
        (folder / f"set.{number:03d}").mkdir()
        for name, values in arrays.items():
            np.save(folder / f"set.{number:03d}" / f"{name}.npy", values)
    return folder


def test_deepmd_sets_in_float32_in_folders_within_folders(tmp_path):
    rng = np.random.default_rng(0)
    box = (8 * np.eye(3)).reshape(1, 9).repeat(2, 0)
    sets = [
        {"coord": 8 * rng.random((2, 6)), "box": box, "energy": rng.normal(size=2), "force": rng.normal(size=(2, 6))}
        for _ in range(3)
    ]
    single = [{name: values.astype(np.float32) for name, values in one.items()} for one in sets]
    deepmd_system(tmp_path / "a" / "b" / "one", [1, 0], ["O", "H", "C"], single)
    deepmd_system(tmp_path / "c" / "two", [0, 1], ["C", "N", "X_unused"], sets[:1])
    dataset = read(tmp_path, 3.0)
    assert (len(dataset), dataset.groups, dataset.elements) == (8, ("one", "two"), (1, 6, 7, 8))
    assert dataset[0][0].numbers.tolist() == [1, 8]
    assert dataset[6][0].numbers.tolist() == [6, 7]
    np.testing.assert_array_equal(dataset.energies[:6], np.concatenate([one["energy"] for one in single]))
    np.testing.assert_array_equal(dataset[5][1].forces.flatten(), single[2]["force"][1].astype(np.float64))
    assert {tensor.dtype for tensor in tensors_of(dataset[0][1]).values()} == {torch.float64, torch.int64}
    assert dataset[0][0].positions.dtype == torch.float64
    chosen = read(f"{tmp_path}/a/b/one::1:4", 3.0)
    assert [t.energy.item() for _, t in chosen] == dataset.energies[1:4].tolist()
    assert chosen.place(1).endswith("set.001, frame 0")
    assert len(read(f"{tmp_path}/a/b/one::-1", 3.0)) == 1
    with pytest.raises(ValueError, match="expected frames as 5, 0:10 or ::2"):
        read(f"{tmp_path}/a/b/one::first", 3.0)


def test_deepmd_mixed_types(tmp_path):
    """Frames of different atoms, padded with type -1 at the end or in between."""
    kinds = np.array([[0, 1, 1, -1], [0, -1, 2, 2], [0, 1, 1, 2]])
    coord = np.random.default_rng(0).normal(scale=2, size=(3, 4, 3))
    arrays = {
        "coord": coord.reshape(3, 12),
        "force": -coord.reshape(3, 12),
        "energy": np.arange(3.0)[:, None],
        "real_atom_types": kinds,
    }
    folder = deepmd_system(tmp_path / "mixed", [0] * 4, ["O", "H", "C"], [arrays], nopbc=True)
    dataset = read(folder, 3.0)
    assert [graph.numbers.tolist() for graph, _ in dataset] == [[8, 1, 1], [8, 6, 6], [8, 1, 1, 6]]
    assert dataset.n_atoms.tolist() == [3, 3, 4]
    for k, (graph, targets) in enumerate(dataset):
        np.testing.assert_array_equal(graph.positions, coord[k, kinds[k] >= 0])
        np.testing.assert_array_equal(targets.forces, -coord[k, kinds[k] >= 0])
        assert targets.energy.item() == k


def test_deepmd_conditions(tmp_path):
    """Charge, multiplicity, spin vectors, frame and atom parameters; padding atoms have none."""
    rng = np.random.default_rng(0)
    arrays = {
        "coord": rng.normal(scale=2, size=(2, 9)),
        "real_atom_types": np.array([[0, 1, 1], [0, -1, 1]]),
        "charge_spin": np.array([[1, 2], [-1, 1]]),
        "spin": rng.normal(size=(2, 9)),
        "fparam": rng.normal(size=(2, 2)),
        "aparam": rng.normal(size=(2, 3)).astype(np.float32),
        "force_mag": np.zeros((2, 9)),
    }
    folder = deepmd_system(tmp_path / "a", [0] * 3, ["O", "H"], [arrays], nopbc=True)
    dataset = read(folder, 3.0)
    graphs, _ = zip(*dataset, strict=True)
    assert [(graph.charge.item(), graph.spin.item()) for graph in graphs] == [(1, 2), (-1, 1)]
    for frame, (graph, there) in enumerate(zip(graphs, ([0, 1, 2], [0, 2]), strict=True)):
        np.testing.assert_array_equal(graph.spins, arrays["spin"].reshape(2, 3, 3)[frame, there])
        np.testing.assert_array_equal(graph.frame_parameters, arrays["fparam"][frame : frame + 1])
        np.testing.assert_array_equal(graph.atom_parameters[:, 0], arrays["aparam"][frame, there])
    together = collate(graphs).atom_parameters
    assert together is not None
    assert together.shape == (5, 1)
    assert dataset.names_found == ("force_mag",)
    potential = SeZM.from_options(
        {"channels": 4, "lmax": 1, "n_blocks": 1, "mixing_layers": 1, "numb_fparam": 2, "numb_aparam": 1}, ["O", "H"]
    )
    assert potential(collate(graphs)).isfinite().all()
    del arrays["fparam"]
    other = deepmd_system(tmp_path / "b", [0] * 3, ["O", "H"], [arrays], nopbc=True)
    assert read(other, 3.0)[0][0].frame_parameters is None
    with pytest.raises(
        ValueError, match=r"a/set\.000, frame 0 has 2 frame parameters, but .*b/set\.000, frame 0 has 0"
    ):
        read([folder, other], 3.0)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("charge_spin", np.zeros((2, 1)), r"charge_spin\.npy has 2 numbers; 2 frames need 4"),
        ("spin", np.zeros((2, 3)), r"type\.raw lists 2 atoms, but spin\.npy has 1 in each"),
        ("fparam", np.zeros(3), r"fparam\.npy has 3 numbers, no multiple of the 2 frames"),
        ("aparam", np.zeros((2, 3)), r"aparam\.npy has 6 numbers, no multiple of the 4 atoms"),
        ("fparam", np.full((2, 1), np.nan), r"fparam\.npy holds numbers that are not finite"),
    ],
)
def test_deepmd_conditions_that_do_not_fit_are_named(tmp_path, name, values, words):
    arrays = {"coord": np.arange(12.0).reshape(2, 6), name: values}
    folder = deepmd_system(tmp_path / "system", [0, 1], ["O", "H"], [arrays], nopbc=True)
    with pytest.raises(ValueError, match=words):
        read(folder, 3.0)


def test_rd12_inconsistent_files_are_named_with_both_numbers():
    with pytest.raises(
        ValueError, match=r"deepmd_count_mismatch/set\.000: type\.raw lists 2 atoms, but coord\.npy has 3"
    ):
        read(FILES / "deepmd_count_mismatch", 5.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"energy": np.zeros(3)}, r"set\.000: coord\.npy has 2 frames, but energy\.npy has 3"),
        (
            {"force": np.zeros((2, 9))},
            r"set\.000: type\.raw lists 2 atoms, but force\.npy has 3 in each of its 2 frames",
        ),
        ({"box": np.zeros((2, 6))}, r"set\.000: box\.npy has 12 numbers; 2 frames need 18"),
        ({"box": None}, r"set\.000 has no box\.npy.*nopbc"),
        ({"coord": None}, r"set\.000 has no coord\.npy"),
        ({"coord": np.full((2, 6), np.nan)}, r"set\.000, frame 0, atom 0: positions are not finite"),
        ({"force": np.full((2, 6), -np.inf)}, r"set\.000, frame 0, atom 0: a force is infinite"),
        ({"energy": np.array([0, np.inf])}, r"set\.000, frame 1: the energy is infinite"),
        ({"type.raw": "0 2"}, r"system: an atom has type 2, but type_map\.raw names 2 types"),
        ({"type.raw": "0 -1"}, r"type\.raw needs a type, 0 or more"),
        ({"type.raw": "O H"}, r"type\.raw holds something else than whole numbers: .*'O'"),
        ({"type_map.raw": None}, r"system has no type_map\.raw"),
        ({"set.000": None}, r"system has a type\.raw, but no folder set\.000"),
        ({"set.000/coord.npy": "broken"}, r"coord\.npy is no array of numbers, or is cut off"),
    ],
)
def test_broken_deepmd_folders_are_named(tmp_path, change, words):
    good = {"coord": np.arange(12.0).reshape(2, 6), "box": np.tile(9 * np.eye(3).reshape(9), (2, 1))}
    good |= {"energy": np.zeros(2), "force": np.zeros((2, 6))}
    arrays = {name: values for name, values in (good | change).items() if isinstance(values, np.ndarray)}
    folder = deepmd_system(tmp_path / "system", [0, 1], ["O", "H"], [arrays])
    for name, text in change.items():
        file = folder / name
        if isinstance(text, str):
            file.write_text(text)
        elif text is None and file.is_dir():
            shutil.rmtree(file)
        elif text is None and file.exists():
            file.unlink()
    with pytest.raises(ValueError, match=words):
        read(folder, 3.0)


# Paths


def test_lists_globs_and_folders(tmp_path):
    (tmp_path / "deeper").mkdir()
    ase.io.write(tmp_path / "a.xyz", several()[:1])
    ase.io.write(tmp_path / "b.traj", several())
    ase.io.write(tmp_path / "deeper" / "c.xyz.gz", several()[1:], format="extxyz")
    shutil.copytree(FILES / "deepmd_nopbc", tmp_path / "deeper" / "system")
    (tmp_path / "README.txt").write_text("These are the data.")
    (tmp_path / ".hidden.xyz").write_text("not read")
    assert len(read(tmp_path, 3.0)) == 1 + 1 + 3 + 2
    assert len(read(str(tmp_path / "*.xyz"), 3.0)) == 1
    assert len(read(str(tmp_path / "**" / "*.xyz*"), 3.0)) == 1 + 2
    assert len(read([str(tmp_path / "b.traj"), tmp_path / "a.xyz"], 3.0)) == 3 + 1
    # A glob that matches a folder and what is in it reads the folder; naming a file twice reads it twice.
    assert len(read(str(tmp_path / "**"), 3.0)) == 7
    assert len(read([tmp_path / "a.xyz"] * 2, 3.0)) == 2


def test_a_folder_of_vasp_runs_is_read_once_a_run(tmp_path):
    """A run leaves OUTCAR and vasprun.xml with the same frames beside files that hold no frames."""
    header = '<modeling><atominfo><array name="atoms"><set><rc><c>H </c><c>1</c></rc></set></array></atominfo>'
    points = '<varray name="kpointlist"><v>0 0 0</v></varray><varray name="weights"><v>1</v></varray>'
    basis = '<varray name="basis"><v>9 0 0</v><v>0 9 0</v><v>0 0 9</v></varray>'
    structure = f'<structure><crystal>{basis}</crystal><varray name="positions"><v>0 0 0</v></varray></structure>'
    initial = structure.replace("<structure>", '<structure name="initialpos">')
    energy = '<energy><i name="e_fr_energy">-1.0</i><i name="e_wo_entrp">-1.0</i><i name="e_0_energy">-1.5</i></energy>'
    rows = "".join(f"<v>{row}</v>" for row in ("16 0 0", "0 16 0", "0 0 16"))  # kilobar
    step = (
        f"<calculation><scstep>{energy}</scstep>{structure}"
        '<varray name="forces"><v>0.1 0 0</v></varray>'
        f'<varray name="stress">{rows}</varray>{energy}</calculation>'
    )
    for run in ("run1", "run2"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "vasprun.xml").write_text(f"{header}<kpoints>{points}</kpoints>{initial}{step}</modeling>")
        (tmp_path / run / "OUTCAR").write_text("never looked at")
        (tmp_path / run / "INCAR").write_text("ISIF = 3")
    dataset = read(tmp_path, 3.0)
    assert len(dataset) == 2
    assert dataset[1][1].forces.tolist() == [[0.1, 0, 0]]
    # ASE has converted VASP's kilobar and sign already; a declared unit is for other files.
    for keys in (None, LabelKeys(stress_unit="kB")):
        stress = read(tmp_path / "run1" / "vasprun.xml", 3.0, keys=keys)[0][1].stress[0]
        np.testing.assert_allclose(stress, -16 / 1602.1766 * np.eye(3), rtol=1e-6)


def test_parts_of_files(tmp_path):
    path = tmp_path / "x.xyz"
    ase.io.write(path, several())
    whole = read(path, 3.0)
    for choice, wanted in (("0:2", [0, 1]), ("::2", [0, 2]), ("-1", [2]), ("1:", [1, 2]), ("1", [1])):
        assert read(f"{path}::{choice}", 3.0).energies.tolist() == whole.energies[wanted].tolist()
    ase.io.write(tmp_path / "x.db", several())
    assert len(read(f"{tmp_path}/x.db::id<3", 3.0)) == 2
    with pytest.raises(ValueError, match=r"x\.xyz::5(, frame 0 cannot be read| holds no structure)"):
        read(f"{path}::5", 3.0)
    with pytest.raises(FileNotFoundError, match=r"there is no file.*x\.xyz::0:2"):
        read(f"{path}@0:2", 3.0)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*'mine\.xyz' \(looked from "):
        read("mine.xyz", 3.0)
    with pytest.raises(FileNotFoundError, match=r"no file or folder matches .*\*\.xyz"):
        read(str(tmp_path / "*.xyz"), 3.0)
    with pytest.raises(ValueError, match=r"neither deepmd-kit systems \(type\.raw\) nor files named \*\.xyz"):
        read(tmp_path, 3.0)
    (tmp_path / "empty.xyz").touch()
    with pytest.raises(ValueError, match=r"empty\.xyz is empty"):
        read(tmp_path / "empty.xyz", 3.0)
    with gzip.open(tmp_path / "empty.xyz.gz", "w"):
        pass
    with pytest.raises(ValueError, match=r"empty\.xyz\.gz.*Empty file"):
        read(tmp_path / "empty.xyz.gz", 3.0)
    write_packed(tmp_path / "empty.h5", [], {})
    with pytest.raises(ValueError, match=r"empty\.h5 holds no structure"):
        read(tmp_path / "empty.h5", 3.0)
    with pytest.raises(ValueError, match="no file of structures was given"):
        read([], 3.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1\n\nH 0 0 0\n3\n\nH 0 0 0\n", r"x\.xyz, frame \d cannot be read"),
        ("1\n\nH 0 0 0\n1\n\nH 0 nan 0\n", r"x\.xyz, frame 1, atom 0: positions are not finite.*1 of 2 atoms"),
        ("1\n\nH 0 0 0\n0\n\n", r"x\.xyz, frame 1 has no atoms"),
        ("1\nenergy=inf\nH 0 0 0\n", r"x\.xyz, frame 0: energy under 'energy' is infinite"),
    ],
)
def test_broken_frames_are_named(tmp_path, text, words):
    (tmp_path / "x.xyz").write_text(text)
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "x.xyz", 3.0)


def test_atoms_at_one_place_are_named_with_file_and_frame(tmp_path):
    ase.io.write(tmp_path / "x.xyz", [Atoms("H"), Atoms("H2", np.zeros((2, 3)))])
    dataset = read(tmp_path / "x.xyz", 3.0)
    for asked in (dataset.n_edges, lambda: dataset[1]):
        with pytest.raises(ValueError, match=r"x\.xyz, frame 1: atoms 0 and 1 .* same place"):
            asked()


def test_ra2_a_lattice_without_periodicity_is_ignored(tmp_path):
    """Molecules are often written with `Lattice` of a large box and pbc="F F F"."""
    atoms = labelled(molecule("H2O"))
    atoms.set_cell([2.5, 2.5, 2.5])
    ase.io.write(tmp_path / "x.xyz", atoms)
    graph, _ = read(tmp_path / "x.xyz", 6.0)[0]
    assert not graph.cell.any()
    assert graph.n_edges == 6


# The data set


def test_tables_of_a_data_set_and_of_its_parts():
    dataset = read([FILES / "keys_plain.extxyz", FILES / "e0_exact.extxyz", FILES / "fcc_cu_sizes.extxyz"], 6.0)
    assert dataset.n_atoms.tolist() == [2, 2, 2, 3, 1, 8, 27]
    assert dataset.elements == (1, 8, 11, 17, 29)
    assert dataset.compositions((29, 8, 1)).tolist() == [
        [0, 0, 0], [0, 0, 2], [0, 2, 0], [0, 1, 2], [1, 0, 0], [8, 0, 0], [27, 0, 0],
    ]  # fmt: skip
    np.testing.assert_array_equal(dataset.energies, [-7, -6, -10, -11, np.nan, np.nan, np.nan])
    assert dataset.n_edges()[-3:].tolist() == [78, 78 * 8, 78 * 27]
    part = dataset.subset([6, 3, 3])
    assert part.n_atoms.tolist() == [27, 3, 3]
    assert part.elements == (1, 8, 29)
    assert part.n_edges().tolist() == [78 * 27, 6, 6]
    assert part.numbers_of(1).tolist() == [8, 1, 1]
    assert [targets.index.item() for _, targets in part] == [0, 1, 2]
    assert part[-1][1].index.item() == 2
    assert part.subset([1]).place(0).endswith("e0_exact.extxyz, frame 2")
    with pytest.raises(IndexError, match="structure 3 of a data set of 3"):
        part[3]


def test_counted_edges_are_those_of_the_graphs():
    """Open molecules are counted many at a time, everything else one by one."""
    rng = np.random.default_rng(0)
    frames = []
    for size in (1, 2, 2, 5, 5, 5, 64, 65, 80):
        atoms = Atoms(numbers=rng.integers(1, 20, size), positions=rng.uniform(0, 3 + size / 5, size=(size, 3)))
        atoms.set_cell(5 * np.eye(3))
        frames += [atoms.copy()]
        atoms.pbc = rng.random(3) < 0.5
        frames += [atoms]
    parts = [
        make_frames(np.array([len(a)]), a.numbers, a.positions, "x", cell=a.cell.array[None], pbc=a.pbc) for a in frames
    ]
    dataset = Dataset(join_frames(parts), 3.5)
    assert dataset.n_edges().tolist() == [graph.n_edges for graph, _ in dataset]
    assert dataset.n_edges().max() > 1000


def test_where_only_some_structures_have_spins_the_others_are_zero(tmp_path):
    iron, water = bulk("Fe"), molecule("H2O")
    iron.arrays["spins"] = np.array([[0.0, 0, 2.2]])
    ase.io.write(tmp_path / "x.xyz", [water, iron])
    dataset = read(tmp_path / "x.xyz", 3.0)
    assert dataset[0][0].spins.tolist() == [[0.0] * 3] * 3
    assert dataset[1][0].spins.tolist() == [[0.0, 0, 2.2]]
    assert dataset[1][0].spins.dtype == torch.float64
    ase.io.write(tmp_path / "y.xyz", water)
    assert read(tmp_path / "y.xyz", 3.0)[0][0].spins is None
    assert read([tmp_path / "y.xyz", tmp_path / "x.xyz"], 3.0)[0][0].spins.shape == (3, 3)


def test_rd11_a_data_set_is_pickled_after_use(tmp_path):
    ase.io.write(tmp_path / "x.xyz", several())
    dataset = read(tmp_path / "x.xyz", 4.0)
    before = [dataset[index] for index in range(3)]
    dataset.n_edges()
    copy = pickle.loads(pickle.dumps(dataset))
    for index in range(3):
        assert_same(copy[index], before[index])
    assert copy.n_edges().tolist() == dataset.n_edges().tolist()
    # Changing what was given out changes nothing inside.
    before[0][0].positions.zero_()
    before[0][1].forces.zero_()
    assert_same(copy[0], dataset[0])


def test_a_hundred_thousand_molecules(tmp_path):
    """They fit into little more than their numbers, in few objects, and are counted in seconds."""
    rng = np.random.default_rng(0)
    count, size = 100_000, 15
    frames = make_frames(
        np.full(count, size),
        np.tile(rng.integers(1, 9, size), count),
        rng.uniform(0, 6, size=(count * size, 3)),
        "x",
        forces=np.zeros((count * size, 3)),
        energy=np.zeros(count),
    )
    dataset = Dataset(frames, 5.0)
    start = time.perf_counter()
    edges = dataset.n_edges()
    counting = time.perf_counter() - start
    start = time.perf_counter()
    size_in_bytes = len(pickle.dumps(dataset))
    pickling = time.perf_counter() - start
    assert edges[777] == dataset[777][0].n_edges
    assert counting < 20
    # 73 bytes for positions, forces, spins and numbers of an atom; 205 for a structure.
    assert size_in_bytes < 1.05 * count * (73 * size + 205)
    assert pickling < 5
    start = time.perf_counter()
    assert dataset.compositions(dataset.elements).sum() == count * size
    assert time.perf_counter() - start < 5


# Splitting


def test_split_is_a_partition_that_depends_on_the_seed_alone():
    dataset = read([FILES / "sizes_2_3_5_40_4.extxyz"] * 4, 3.0)

    def places(part):
        return [part.place(index) for index in range(len(part))], part._indices.tolist()

    train, valid = split(dataset, 0.25, seed=3)
    assert (len(train), len(valid)) == (15, 5)
    assert sorted(places(train)[1] + places(valid)[1]) == list(range(20))
    assert places(train)[1] == sorted(places(train)[1])
    assert places(split(dataset, 0.25, seed=3)[1]) == places(valid)
    assert places(split(dataset, 0.25, seed=4)[1]) != places(valid)
    for fraction, wanted in ((1e-9, 1), (0.999, 19)):
        assert len(split(dataset, fraction, seed=0)[1]) == wanted
    with pytest.raises(ValueError, match="between 0 and 1; got 1"):
        split(dataset, 1.0, seed=0)
    with pytest.raises(ValueError, match="1 structure cannot be split"):
        split(dataset.subset([0]), 0.5, seed=0)
