"""The packed format: what is written is read, at the promised precision, and broken files are named."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from mlff.data.packed import PackedGroup, read_packed, write_packed


def group(frames=4, atoms=3, seed=0, **fields):
    rng = np.random.default_rng(seed)
    given = {
        "numbers": np.array([8, 1, 1, 6, 7][:atoms]),
        "positions": np.round(rng.normal(scale=3, size=(frames, atoms, 3)), 4),
        "energy": -1e4 + rng.normal(size=frames),
        "forces": rng.normal(size=(frames, atoms, 3)),
    }
    return PackedGroup(**(given | fields))


def written(path, *groups, **attributes):
    write_packed(path, groups, attributes)
    return list(read_packed(path))


def test_what_is_written_is_read(tmp_path):
    rng = np.random.default_rng(1)
    full = group(
        stress=0.01 * rng.normal(size=(4, 6)),
        cell=10 * np.eye(3) + rng.normal(size=(4, 3, 3)),
        pbc=np.array([True, True, False]),
        charge=np.array([0, 1, -1, 0]),
        spin=np.array([1, 2, 2, 0]),
        weight=np.array([1, 2, 0.5, 1]),
        name="ice",
        key="000000-ice",
        attributes={"split": "train", "temperature": 300.0, "formula": "H₂O"},
    )
    first, second = written(tmp_path / "x.h5", full, group(seed=2))
    # Positions stand on the grid: exact but for the product with the scale, 1e-16 of some 10 Å.
    np.testing.assert_allclose(first.positions, full.positions, atol=1e-14, rtol=0)
    np.testing.assert_array_equal(first.energy, full.energy)
    np.testing.assert_allclose(first.forces, full.forces, atol=0.5e-4 + 1e-12, rtol=0)  # half a step
    np.testing.assert_allclose(first.stress, full.stress, atol=0.5e-7 + 1e-12, rtol=0)
    for name in ("numbers", "cell", "pbc", "charge", "spin", "weight"):
        np.testing.assert_array_equal(getattr(first, name), getattr(full, name), err_msg=name)
    assert (first.name, first.key, first.split) == ("ice", "000000-ice", "train")
    assert first.attributes == {"split": "train", "temperature": 300.0, "formula": "H₂O"}
    assert (second.name, second.key, second.split) == ("", "000001", "")
    assert (second.stress, second.cell, second.pbc, second.charge, second.spin, second.weight) == (None,) * 6


def test_missing_numbers_come_back_as_nan(tmp_path):
    energy, forces, stress = np.array([1.0, np.nan]), np.ones((2, 3, 3)), np.full((2, 6), 0.5)
    forces[1, 2], stress[0] = np.nan, np.nan
    (read,) = written(tmp_path / "x.h5", group(2, energy=energy, forces=forces, stress=stress))
    for name, wanted in (("energy", energy), ("forces", forces), ("stress", stress)):
        np.testing.assert_allclose(getattr(read, name), wanted, rtol=1e-9, err_msg=name)
    (read,) = written(tmp_path / "x.h5", group(energy=None, forces=None))
    assert read.energy is None
    assert read.forces is None


def test_two_bytes_where_they_suffice(tmp_path):
    weak, strong = np.full((1, 3, 3), 3.2766), np.full((1, 3, 3), -250.1234)
    written(tmp_path / "x.h5", group(1, forces=weak, key="weak"), group(1, forces=strong, key="strong"))
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["weak/forces"].dtype == np.int16
        assert file["strong/forces"].dtype == np.int32
        assert file["weak/positions"].dtype == np.int32
    weak_read, strong_read = sorted(read_packed(tmp_path / "x.h5"), key=lambda one: one.key, reverse=True)
    np.testing.assert_allclose(weak_read.forces, weak, atol=1e-12)
    np.testing.assert_allclose(strong_read.forces, strong, atol=1e-12)


def test_many_small_groups_stay_small(tmp_path):
    """A group of 12 frames of 5 atoms holds 2.9 kB of numbers before compression; names must not double that."""
    write_packed(
        tmp_path / "x.h5", [group(12, 5, seed, name="md", attributes={"split": "a"}) for seed in range(50)], {}
    )
    assert (tmp_path / "x.h5").stat().st_size / 50 < 5000


def test_splits_are_chosen_by_name(tmp_path):
    groups = [group(seed=k, name=str(k), attributes={"split": split}) for k, split in enumerate(("train", "valid", ""))]
    path = tmp_path / "x.h5"
    write_packed(path, groups, {"licence": "MIT"})
    assert [one.name for one in read_packed(path, ["valid"])] == ["1"]
    assert [one.name for one in read_packed(path, ["train", "valid"])] == ["0", "1"]
    assert len(list(read_packed(path))) == 3
    with pytest.raises(ValueError, match=r"x\.h5 has no split 'test'; it has train, valid"):
        list(read_packed(path, ["test"]))
    with h5py.File(path) as file:
        assert file.attrs["licence"] == b"MIT" or file.attrs["licence"] == "MIT"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"positions": np.full((4, 3, 3), 0.12345)}, r"off the grid of 0\.0001 Å.*Round positions first"),
        ({"positions": np.full((4, 3, 3), np.nan)}, r"off the grid"),
        ({"positions": np.zeros((3, 3))}, r"positions need the shape \(frames, atoms, 3\), not \(3, 3\)"),
        ({"positions": np.full((4, 3, 3), 3e5)}, r"positions do not fit into int32"),
        ({"forces": np.zeros((3, 3))}, r"forces needs the shape \(4, 3, 3\), not \(3, 3\)"),
        ({"stress": np.zeros((4, 3, 3))}, r"stress needs the shape \(4, 6\)"),
        ({"numbers": np.array([1, 2])}, r"numbers needs the shape \(3,\)"),
        ({"numbers": np.array([1, 2, 300])}, r"numbers do not fit into uint8"),
        ({"charge": np.full(4, 0.5)}, r"charge do not fit into int8"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_no_file(tmp_path, fields, words):
    with pytest.raises(ValueError, match=words):
        write_packed(tmp_path / "x.h5", [group(key="good"), group(key="bad", **fields)], {})
    assert not (tmp_path / "x.h5").exists()


def test_other_files_are_named(tmp_path):
    path = tmp_path / "x.h5"
    with pytest.raises(FileNotFoundError, match=r"x\.h5"):
        list(read_packed(path))
    path.write_bytes(b"not HDF5 at all")
    with pytest.raises(ValueError, match=r"x\.h5 is not an HDF5 file"):
        list(read_packed(path))
    with h5py.File(path, "w") as file:
        file["coordinates"] = np.zeros(3)
    with pytest.raises(ValueError, match=r"x\.h5 is an HDF5 file, but not of the format 'mlff packed frames'"):
        list(read_packed(path))
    write_packed(path, [group()], {})
    with h5py.File(path, "a") as file:
        file.attrs["version"] = 2
    with pytest.raises(ValueError, match=r"has version 2 of its format; this program reads 1"):
        list(read_packed(path))
    write_packed(path, [group()], {})
    with h5py.File(path, "a") as file:
        del file["000000/positions"]
    with pytest.raises(ValueError, match=r"x\.h5, group 000000 is damaged"):
        list(read_packed(path))
    write_packed(path, [group()], {})
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"x\.h5 is not an HDF5 file, or is cut off"):
        list(read_packed(path))
