"""Which molecules a generated data set is made of: SMILES that the project puts together itself, and their splits.

Three sources, mixed in a fixed proportion: a list of well-known small molecules written out below, scaffolds decorated
with substituents and linkers, and random graphs grown atom by atom. All are neutral and closed-shell. RDKit is needed
(`pip install "mlff[dataset]"`); it is imported on first use.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

ELEMENTS = ("H", "C", "N", "O", "F", "P", "S", "Cl")
MORE_ELEMENTS = ("Br", "I", "Si", "B")

# The flexible molecule of the embedded data set, N-acetylcysteine, and its closest relatives. None of them is ever
# generated, so that a model pretrained on generated molecules meets it as something new.
FLEXIBLE = "CC(=O)NC(CS)C(=O)O"
HELD_OUT = (FLEXIBLE, "CC(=O)NC(CO)C(=O)O", "CC(=O)NC(C)C(=O)O", "NC(CS)C(=O)O", "CC(=O)NC(CS)C(N)=O", "CC(=O)NCCS")

KNOWN = """
[H][H] C N O F P S Cl CC C=C C#C N#N FF ClCl O=O [C-]#[O+] O=C=O C#N OO NN CO CN CS CF CCl C=O C=N C=S S=C=S O=C=S N=N
ClF OF OCl NF NCl N(F)(F)F FP(F)F ClP(Cl)Cl O=P(Cl)(Cl)Cl O=P(F)(F)F FP(F)(F)(F)F FS(F)(F)(F)(F)F FS(F)(F)F O=S=O
O=S(=O)=O OS(=O)(=O)O OP(=O)(O)O O[N+](=O)[O-] ON=O N#[N+][O-] [O-][O+]=O SS CSC CSSC PP CP CPC CP(C)C P#C C=P OP NO
NS SF FSF ClSCl O=S(Cl)Cl O=S(=O)(Cl)Cl O=S(F)F O=S(=O)(F)F O=C(F)F O=C(Cl)Cl OC=O OC(=O)O NC=O NC(N)=O NC(=N)N
NC(N)=S FC(F)F FC(F)(F)F ClC(Cl)Cl ClC(Cl)(Cl)Cl ClCCl FCF FC(F)Cl FC(Cl)(Cl)F FC=C ClC=C FC(F)=C(F)F ClC=CCl C=C=C
C=C=O C=C=N N=C=N N=C=O N=C=S C[N+]#[C-] CC#N C=CC=C C=CC#N C#CC#C N#CC#N C=CC=O CC=O CCO CCN CCS CCF CCCl COC CNC
CN(C)C CC(C)C CCC CC=C CC#C CC(C)=O CC(=O)O COC=O CC(N)=O CNC=O CN(C)C=O CC(=O)OC CC(=O)N(C)C CS(C)=O CS(C)(=O)=O
CS(N)(=O)=O CS(=O)(=O)O COS(=O)(=O)OC CP(=O)(O)O CP(C)(C)=O COP(=O)(OC)OC OP(O)O CP(=O)(OC)OC C[N+](=O)[O-] CON=O
CN=[N+]=[N-] CC(C)=NO CN=NC CNN ONC CON C1CC1 C1CO1 C1CN1 C1CS1 C1=CC1 C1CCC1 C1CCO1 C1CNC1 C1CSC1 C1=CCC1 C1CCCC1
C1CCOC1 C1CCNC1 C1CCSC1 C1CCCCC1 C1CCOCC1 C1CCNCC1 C1CCSCC1 C1COCCO1 C1COCCN1 C1CNCCN1 C1COCO1 C1CSCS1 C1=CCCC1
C1=CC=CC1 C1=CCC=CC1 C1=CCCCC1 c1ccccc1 c1ccncc1 c1ccnnc1 c1cnccn1 c1ncncn1 c1ccoc1 c1ccsc1 c1cc[nH]c1 c1c[nH]cn1
c1cn[nH]c1 c1cocn1 c1cscn1 c1cnoc1 c1cnsc1 c1nc[nH]n1 c1nnn[nH]1 c1nnco1 c1nncs1 c1ccpcc1 Cc1ccccc1 Oc1ccccc1
Nc1ccccc1 Sc1ccccc1 Fc1ccccc1 Clc1ccccc1 O=Cc1ccccc1 N#Cc1ccccc1 C=Cc1ccccc1 C#Cc1ccccc1 Cc1ccncc1 c1ccc2ccccc2c1
c1ccc2[nH]ccc2c1 c1ccc2ncccc2c1 c1ccc2occc2c1 c1ccc2sccc2c1 c1ncc2nc[nH]c2n1 Nc1ncnc2[nH]cnc12
Nc1nc2[nH]cnc2c(=O)[nH]1 Nc1cc[nH]c(=O)n1 Cc1c[nH]c(=O)[nH]c1=O O=c1cc[nH]c(=O)[nH]1 O=C1C=CC(=O)C=C1 NCC(=O)O
CC(N)C(=O)O NC(CO)C(=O)O CC(C)C(N)C(=O)O CC(O)C(N)C(=O)O NC(CC(=O)O)C(=O)O NC(CC(N)=O)C(=O)O CSCCC(N)C(=O)O
O=C(O)C1CCCN1 NC(Cc1c[nH]cn1)C(=O)O NC(Cc1ccccc1)C(=O)O NCCCCC(N)C(=O)O CNC(=O)CNC(C)=O CNC(=O)C(C)NC(C)=O
NCC(=O)NCC(=O)O CC(=O)OCCN(C)C NCCO NCCN OCCO OCC(O)CO OCCOCCO COCCOC OCC(O)C=O CC(O)C(=O)O CC(=O)C(=O)O OC(=O)C(=O)O
OC(=O)CC(=O)O OC(=O)C=CC(=O)O OC(=O)CCC(=O)O OC1COC(O)C1O OCC1OC(O)CC1O CC(=O)CC(C)=O CC(O)=CC(C)=O CC(=O)OC(C)=O
CC(=O)Cl CC(=O)SC CC(=S)N NCCS NCCc1ccc(O)c(O)c1 NCCc1c[nH]cn1 CC(=O)Nc1ccc(O)cc1 CC(=O)Oc1ccccc1C(=O)O
OC(=O)c1ccccc1O CN1C=NC2=C1C(=O)N(C)C(=O)N2C CN1CCCC1c1cccnc1 NC(=O)c1cccnc1 NNC(=O)c1ccncc1 NS(=O)(=O)c1ccc(N)cc1
Cc1ccc(S(N)(=O)=O)cc1 OP(=O)(O)OCC(O)CO NCCOP(=O)(O)O OP(=O)(O)OP(=O)(O)O OCP(=O)(O)O CCOP(=S)(OCC)OC CSP(=O)(OC)OC
FC(F)(F)C(=O)O FC(F)(F)CO FC(F)(F)S(=O)(=O)O FC(F)(F)C(F)(F)F ClC(Cl)(Cl)C=O FC(F)(F)C(Cl)Br OC(C(F)(F)F)C(F)(F)F
Fc1c(F)c(F)c(F)c(F)c1F Clc1ccc(Cl)cc1 C1C2CC3CC1CC(C2)C3 C1CC2CCC1C2 C1CC2CCC1CC2 C1CN2CCC1CC2 C12C3C1C23 C1CC12CC2
C1CCC2CCCCC2C1 CC(C)=CCCC(C)=O CC1=CCC(C(C)=C)CC1 CC12CCC(CC1)C(C)(C)O2 CCCCCCCC CCCCCC CC(C)(C)C CCCC CCCCC CC(C)CC
C=CC(C)=C CC=CC CC(C)(C)O CCCO CC(C)O CCOCC CCNCC CCN(CC)CC CCSCC CC(C)S [SiH4] C[SiH3] C[Si](C)(C)C F[Si](F)(F)F
Cl[Si](Cl)(Cl)Cl O[Si](O)(O)O C[SiH2]C [SiH3][SiH3] [SiH3]O[SiH3] C[Si](C)(C)Cl C[Si](C)(C)O[Si](C)(C)C B CB BF FB(F)F
ClB(Cl)Cl OB(O)O CB(C)C OB(O)c1ccccc1 B1NBNBN1 COB(OC)OC NB Br I BrBr II BrCl ClI CBr CI CCBr CCI BrC(Br)Br BrCBr ICI
FC(F)(F)Br FC(F)(F)I Brc1ccccc1 Ic1ccccc1 C=CBr C=CI BrC#C IC#N BrC#N CC(=O)Br BrP(Br)Br
""".split()

SCAFFOLDS = """
C CC CCC CC(C)C CCCC CC(C)(C)C C=C CC=C C#C CC#C C=CC=C C=C=C CO COC CCO COCC CN CNC CN(C)C CCN CS CSC CCS CC=O
CC(C)=O CC#N NC=O CC(N)=O CNC=O CNC(C)=O CC(=O)O COC=O CC(=O)OC NC(N)=O COC(N)=O OC=O C=CC=O C=CC(N)=O NC(N)=S CC=NO
C=NN CC=N CNN CS(C)=O CS(C)(=O)=O CS(N)(=O)=O CS(=O)(=O)O CSSC CC(=S)N COP(=O)(OC)OC CP(=O)(OC)OC CP(C)C CP(C)(C)=O
OP(=O)(O)OC CP C1CC1 C1CO1 C1CN1 C1CS1 C1=CC1 C1CCC1 C1COC1 C1CNC1 C1CSC1 C1=CCC1 O=C1CCC1 O=C1CCN1 C1CCCC1 C1CCOC1
C1CCNC1 C1CCSC1 O=C1CCCC1 O=C1CCCN1 O=C1CCCO1 C1=CCCC1 C1=CCC=C1 C1COCO1 C1CSCN1 C1CSCS1 O=C1CCC(=O)N1 O=C1CNC(=O)N1
O=C1C=CC(=O)N1 O=C1OCCN1 C1CC=NO1 C1CCCCC1 C1CCOCC1 C1CCNCC1 C1CCSCC1 C1COCCO1 C1COCCN1 C1CNCCN1 C1CSCCN1 O=C1CCCCC1
O=C1CCCCN1 C1=CCCCC1 C1=CCC=CC1 O=C1C=CCCC1 O=S1(=O)CCCC1 O=S1(=O)CCNCC1 C1CCPC1 O=P1CCCC1 C1COPO1 C1CCCCCC1 C1CCNCCN1
C1CC2CC1CC2 C1CC2CC2C1 C1CC12CCC2 C1CC2CCC1N2 c1ccccc1 c1ccncc1 c1ccnnc1 c1cncnc1 c1cnccn1 c1ncncn1 c1ccoc1 c1ccsc1
c1cc[nH]c1 c1c[nH]cn1 c1cn[nH]c1 c1cocn1 c1cscn1 c1cnoc1 c1cnsc1 c1nc[nH]n1 c1c[nH]nn1 c1nnn[nH]1 c1nnco1 c1nncs1
c1ncon1 O=c1cccc[nH]1 O=c1cc[nH]cc1 O=c1ccocc1 O=c1cc[nH]c(=O)[nH]1 c1ccpcc1 c1cc[pH]c1 c1ccc2ccccc2c1
c1ccc2[nH]ccc2c1 c1ccc2ncccc2c1 c1ccc2occc2c1 c1ccc2sccc2c1 c1ccc2[nH]cnc2c1 c1ccc2ocnc2c1 c1ccc2scnc2c1
c1ncc2nc[nH]c2n1 c1ccn2ccnc2c1 c1cnc2ccnn2c1 c1ccc2OCOc2c1 c1ccc2CCCc2c1 O=C1C=CC(=O)C=C1 C1=CNC=CC1
""".split()

SUBSTITUENTS = """
C C C CC CC C(C)C CCC C(C)(C)C C=C C=CC C#C C#CC CO CCO CN CCN CS C(C)O COC CCl CF C(F)F C(F)(F)F C(F)(F)F C(Cl)(Cl)Cl
CC#N C=O C(C)=O C(=O)O C(=O)O C(=O)OC C(N)=O C(N)=O C(=O)NC C(=O)N(C)C C(=O)Cl C(=O)F C#N C#N C(=S)N C(=N)N C=NO C=NN
CC(=O)O CC(N)=O N N N(C)C NC NC(C)=O NC=O NC(N)=O NO NN NS(C)(=O)=O N=C=O N=C=S N=O [N+](=O)[O-] N=[N+]=[N-] N=NC NC#N
NC(=N)N N=C NF NCl O O O OC OC OCC OC(C)=O OC(F)(F)F OC(N)=O OCC#C ON OO OF OCl OP(=O)(O)O OS(C)(=O)=O OP(=O)(OC)OC
OC=O F F F Cl Cl Cl Br Br I S S SC SC SCC SC#N SC(C)=O SS SSC SCl SF S(C)=O S(C)(=O)=O S(N)(=O)=O S(=O)(=O)O
S(=O)(=O)F S(=O)(=O)Cl S(F)(F)(F)(F)F S(=O)O SC(F)(F)F P P(C)C PC P(=O)(O)O P(=O)(OC)OC P(C)(C)=O P(O)O P(Cl)Cl P(F)F
P(=O)(N)N P(=S)(OC)OC P(=O)(Cl)Cl P(=O)(F)F P=C C1CC1 C1CO1 C1CCC1 N1CC1 C1CN1 N1CCC1 c1ccccc1 c1ccncc1 c1ccoc1
c1cccs1 c1c[nH]cn1 N1C=CC=C1 N1C=CN=C1 N1C=NC=N1 C1CCCC1 N1CCCC1 N1CCOCC1 [SiH3] [Si](C)(C)C [SiH2]C [Si](F)(F)F
[Si](C)(C)O B(O)O B(C)C B(F)F BO
""".split()

LINKERS = """
C CC C=C C#C O S N NC C(=O) C(=O)N C(=O)O NC(=O) OC(=O) CO CN CS N=N C=N C=NN NN SS S(=O) S(=O)(=O) S(=O)(=O)N OC(=O)N
NC(=O)N P(=O)(O)O PC OP(=O)(O)O P(C) OO ON [SiH2] [Si](C)(C)O B(O) CC(=O) COC
""".split()

# Element, valence and weight for the random graphs; the last four only where they are asked for.
_GROWTH = {
    "C": (4, 50), "N": (3, 15), "O": (2, 15), "F": (1, 5), "S": (2, 6), "P": (3, 2), "Cl": (1, 5),
    "Br": (1, 4), "I": (1, 4), "Si": (4, 4), "B": (3, 4),
}  # fmt: skip

# The parts of 100 in which the held-out splits are cut. Most molecules are for training.
_VALID, _TEST = 3, 3


def require(package: str) -> Any:
    """Import and return `tblite.interface` or `rdkit`, which only making data needs.

    Raises:
        ModuleNotFoundError: the package is absent; the message names the extra that brings it.
    """
    import importlib

    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"making a data set needs {package.split('.')[0]}, which is not installed. Install it with: "
            'pip install "mlff[dataset]"'
        ) from error


def split_of(smiles: str) -> str:
    """Return the split of a molecule, `train`, `valid` or `test`.

    It depends on nothing but the canonical SMILES, so a molecule is in the same split in every data set made here:
    held out of the embedded set, it is held out of the pretraining set, too.
    """
    part = int.from_bytes(hashlib.sha256(smiles.encode()).digest()[:8], "big") % 100
    return "valid" if part < _VALID else "test" if part < _VALID + _TEST else "train"


def canonical(smiles: str) -> str | None:
    """Return the canonical SMILES without stereochemistry, or None where RDKit does not accept the molecule."""
    chem = _chem()
    molecule = chem.MolFromSmiles(smiles)
    return None if molecule is None else chem.MolToSmiles(molecule, isomericSmiles=False)


def n_atoms(smiles: str) -> int:
    """Return the number of atoms with hydrogens."""
    chem = _chem()
    return chem.AddHs(chem.MolFromSmiles(smiles)).GetNumAtoms()


def n_orbitals(smiles: str) -> int:
    """Return the number of GFN2-xTB's basis functions: 1 for H, 4 for B to F, 9 for Si to Cl, Br and I."""
    chem = _chem()
    atoms = chem.AddHs(chem.MolFromSmiles(smiles)).GetAtoms()
    return sum(1 if atom.GetAtomicNum() == 1 else 4 if atom.GetAtomicNum() < 10 else 9 for atom in atoms)


def known_molecules(elements: Sequence[str] = ELEMENTS, max_atoms: int = 30) -> list[str]:
    """Return the molecules of the written list, canonical, that have only these elements and at most `max_atoms`."""
    found = {name: None for smiles in KNOWN if (name := acceptable(smiles, elements, max_atoms))}
    return list(found)


def acceptable(smiles: str, elements: Sequence[str] = ELEMENTS, max_atoms: int = 30) -> str | None:
    """Return the canonical SMILES of a molecule that may go into a data set, else None.

    It must be one neutral closed-shell molecule of two to `max_atoms` atoms (hydrogens counted) of the elements given,
    and not one of `HELD_OUT`.
    """
    chem = _chem()
    molecule = chem.MolFromSmiles(smiles)
    if molecule is None or len(chem.GetMolFrags(molecule)) != 1 or chem.GetFormalCharge(molecule) != 0:
        return None
    total = molecule.GetNumAtoms() + sum(atom.GetTotalNumHs() for atom in molecule.GetAtoms())
    if not 2 <= total <= max_atoms:
        return None
    if any(atom.GetSymbol() not in elements or atom.GetNumRadicalElectrons() for atom in molecule.GetAtoms()):
        return None
    name = chem.MolToSmiles(molecule, isomericSmiles=False)
    return None if name in _held_out() else name


def molecules(seed: int, elements: Sequence[str] = ELEMENTS, max_atoms: int = 30) -> Iterator[str]:
    """Yield distinct canonical SMILES without end: the known ones first, shuffled, then built ones.

    Args:
        seed: Decides the whole sequence.
        elements: Symbols that may occur.
        max_atoms: Largest molecule, hydrogens counted.
    """
    dice = random.Random(seed)
    known = known_molecules(elements, max_atoms)
    dice.shuffle(known)
    yield from known
    seen = set(known)
    while True:
        built = assembled(dice) if dice.random() < 0.7 else grown(dice, elements)
        name = acceptable(built, elements, max_atoms) if built else None
        # Above some 16 atoms only a part is kept, so that the mean stays near 15 and labels stay cheap.
        if name is None or name in seen or (n_atoms(name) > 17 and dice.random() < 0.5):
            continue
        seen.add(name)
        yield name


def assembled(dice: random.Random) -> str | None:
    """Return a scaffold with substituents put where it has hydrogens, perhaps linked to a second scaffold."""
    chem = _chem()
    molecule = chem.MolFromSmiles(dice.choice(SCAFFOLDS))
    for _ in range(dice.choices((1, 2, 3, 4), (38, 37, 18, 7))[0]):
        molecule = _attached(molecule, dice.choice(SUBSTITUENTS), dice)
        if molecule is None:
            return None
    if dice.random() < 0.2:
        molecule = _attached(molecule, dice.choice(LINKERS), dice)
        # The linker's atoms come last, so the next piece goes to one of them where it can.
        molecule = molecule and _attached(molecule, dice.choice(SUBSTITUENTS + SCAFFOLDS), dice, last=True)
    return chem.MolToSmiles(molecule) if molecule is not None else None


def grown(dice: random.Random, elements: Sequence[str] = ELEMENTS) -> str | None:
    """Return a random molecular graph of three to nine heavy atoms with ordinary valences, rings now and then."""
    chem = _chem()
    symbols = [symbol for symbol in _GROWTH if symbol in elements]
    weights = [_GROWTH[symbol][1] for symbol in symbols]
    molecule, free = chem.RWMol(), []

    def add(symbol: str) -> int:
        index = molecule.AddAtom(chem.Atom(symbol))
        free.append(_GROWTH[symbol][0])
        return index

    add(dice.choice([symbol for symbol in symbols if _GROWTH[symbol][0] > 1]))
    order_of = {1: chem.BondType.SINGLE, 2: chem.BondType.DOUBLE, 3: chem.BondType.TRIPLE}
    for _ in range(dice.choices(range(2, 9), (6, 10, 16, 20, 20, 16, 12))[0]):
        open_atoms = [atom for atom, valence in enumerate(free) if valence]
        if not open_atoms:
            break
        atom = dice.choice(open_atoms)
        here, symbol = molecule.GetAtomWithIdx(atom).GetSymbol(), dice.choices(symbols, weights)[0]
        if here != "C" and symbol != "C" and dice.random() < 0.7:
            symbol = "C" if "C" in elements else symbol  # few bonds between two heteroatoms
        order = min(dice.choices((1, 2, 3), (76, 18, 6))[0], free[atom], _GROWTH[symbol][0])
        if order > 1 and not {here, symbol} <= {"C", "N", "O", "S"}:
            order = 1
        other = add(symbol)
        molecule.AddBond(atom, other, order_of[order])
        free[atom] -= order
        free[other] -= order
    for _ in range(dice.choices((0, 1, 2), (50, 38, 12))[0]):
        distance = chem.GetDistanceMatrix(molecule, force=True)  # the cached one is stale
        pairs = [
            (a, b)
            for a in range(len(free))
            for b in range(a)
            if free[a] and free[b] and 2 <= distance[a][b] <= 6 and dice.random() < (0.3 if distance[a][b] == 2 else 1)
        ]
        if pairs:
            a, b = dice.choice(pairs)
            molecule.AddBond(a, b, order_of[1])
            free[a] -= 1
            free[b] -= 1
    try:
        chem.SanitizeMol(molecule)
    except ValueError:
        return None
    # No small ring holds a straight piece (-C#C- or C=C=C), and no more than three heteroatoms follow each other.
    straight = chem.MolFromSmarts("[R;r3,r4,r5,r6,r7]#[*,R]")
    cumulated = chem.MolFromSmarts("[R;r3,r4,r5,r6,r7](=[R])=[*]")
    if molecule.HasSubstructMatch(straight) or molecule.HasSubstructMatch(cumulated):
        return None
    chains = chem.MolFromSmarts("[!#6;!#1]~[!#6;!#1]~[!#6;!#1]~[!#6;!#1]")
    if molecule.HasSubstructMatch(chains):
        return None
    return chem.MolToSmiles(molecule)


def _attached(molecule: Any, piece: str, dice: random.Random, last: bool = False) -> Any | None:
    """Return the molecule with the first atom of `piece` in the place of one of its hydrogens, or None."""
    chem = _chem()
    places = [atom.GetIdx() for atom in molecule.GetAtoms() if atom.GetTotalNumHs() and atom.GetAtomicNum() > 1]
    fragment = chem.MolFromSmiles(piece)
    if not places or fragment is None:
        return None
    if last:
        places = places[-2:]
    place, offset = dice.choice(places), molecule.GetNumAtoms()
    joined = chem.RWMol(chem.CombineMols(molecule, fragment))
    for index in (place, offset):
        atom = joined.GetAtomWithIdx(index)
        if atom.GetNumRadicalElectrons():  # a piece written with an open valence, such as [SiH3] or [N+](=O)[O-]
            atom.SetNumRadicalElectrons(atom.GetNumRadicalElectrons() - 1)
        elif atom.GetNumExplicitHs():
            atom.SetNumExplicitHs(atom.GetNumExplicitHs() - 1)
    joined.AddBond(place, offset, chem.BondType.SINGLE)
    try:
        chem.SanitizeMol(joined)
    except ValueError:
        return None
    return joined.GetMol()


def _chem() -> Any:
    """Return rdkit.Chem with its log silenced: refused molecules are expected here and counted by the callers."""
    global _CHEM
    if _CHEM is None:
        require("rdkit.RDLogger").DisableLog("rdApp.*")
        _CHEM = require("rdkit.Chem")
    return _CHEM


def _held_out() -> frozenset[str]:
    global _HELD_OUT
    if _HELD_OUT is None:
        _HELD_OUT = frozenset(name for smiles in HELD_OUT if (name := canonical(smiles)))
    return _HELD_OUT


_CHEM: Any = None
_HELD_OUT: frozenset[str] | None = None
