"""Every choice that defines a SeZM model, with the defaults of the published architecture.

The names are those of the DPA4 literature and of its checkpoints, so that a configuration can be compared with a
published one line by line. Two options are ours: `exclude_types` and `atom_exclude_types` name elements by symbol.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

ResidualQuery = Literal["none", "dependent", "independent"]


@dataclass(frozen=True)
class Options:
    """The hyper-parameters of a SeZM model. Lengths in Å."""

    # Neighbourhood and radial features
    rcut: float = 6.0  # Å
    env_exp: tuple[int, int] = (7, 5)  # exponents of the radial-basis and of the message envelope
    basis_type: Literal["bessel", "gaussian"] = "bessel"
    n_radial: int = 16
    radial_mlp: tuple[int, ...] = (0,)  # hidden widths, 0 means `channels`
    edge_norm: bool = True
    eps: float = 1e-7  # Å, smooths lengths at zero distance
    random_gamma: bool = True  # random roll of the edge frames while training
    exclude_types: tuple[tuple[str, str], ...] = ()  # pairs of elements without edges between them
    atom_exclude_types: tuple[str, ...] = ()  # elements whose atoms have no energy

    # Width, degrees, depth
    channels: int = 64
    lmax: int = 3
    mmax: int | None = 1  # None means lmax
    kmax: int = 1
    l_schedule: tuple[int, ...] | None = None  # degree of each block, non-increasing; overrides lmax and n_blocks
    m_schedule: tuple[int, ...] | None = None
    extra_node_l: int = 0
    n_blocks: int = 3
    ffn_blocks: int = 1
    ffn_neurons: int = 0  # 0 means automatic

    # SO(2) convolution
    mixing_layers: int = 4
    so2_norm: bool = False
    radial_so2_mode: Literal["none", "degree", "degree_channel"] = "degree_channel"
    radial_so2_rank: int = 1
    n_focus: int = 1
    focus_dim: int = 0  # 0 means `channels`
    n_atten_head: int = 1  # 0 means a plain envelope-weighted sum
    atten_f_mix: bool = False
    atten_v_proj: bool = False
    atten_o_proj: bool = False
    edge_cartesian: bool = False
    node_cartesian: str = "none"  # "none", "default:<layers>" or "parity:<layers>"

    # Norms, scales, residuals
    sandwich_norm: tuple[bool, bool, bool, bool] = (False, True, True, False)  # so2 pre, so2 post, ffn pre, ffn post
    mlp_bias: bool = False
    layer_scale: bool = False
    so2_attn_res: ResidualQuery = "none"
    full_attn_res: ResidualQuery = "none"
    block_attn_res: ResidualQuery = "none"

    # Grid nonlinearities
    s2_activation: tuple[bool, bool] = (False, True)  # in the SO(2) stack, in the feed-forward network
    ffn_so3_grid: bool = False
    node_wise_s2: bool = False
    node_wise_so3: bool = False
    message_node_s2: bool = False
    message_node_so3: bool = False
    grid_mlp: tuple[bool, bool, bool] = (False, False, False)  # node-wise, message-node, feed-forward
    grid_branch: tuple[int, int, int] = (0, 0, 0)
    lebedev_quadrature: tuple[bool, bool] = (True, True)  # in the SO(2) stack, elsewhere

    # Activations, initial features, read-out
    activation_function: str = "silu"
    glu_activation: bool = True
    use_env_seed: bool = True
    add_chg_spin_ebd: bool = False
    default_chg_spin: tuple[float, float] | None = None
    use_spin: tuple[str, ...] = ()  # elements that carry a native spin vector
    so3_readout: Literal["none", "glu", "mlp"] = "none"
    readout_layers: int = 1

    # Energy head
    fitting_neuron: tuple[int, ...] = (0,)  # hidden widths, 0 means automatic
    fitting_activation: str = "silu"
    bias_out: bool = False
    numb_fparam: int = 0
    numb_aparam: int = 0
    dim_case_embd: int = 0
    case_film_embd: bool = False

    # Short-range bridging
    bridging_method: Literal["none", "zbl"] = "none"
    bridging_r_inner: float = 0.5  # Å
    bridging_r_outer: float = 0.8  # Å
