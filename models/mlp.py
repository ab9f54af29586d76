"""Feed-forward blocks: gated (SwiGLU, GeGLU; Shazeer 2020) and plain two-matrix."""

import jax
import jax.numpy as jnp
from flax import struct

from models.config import Activation, MlpSpec
from models.contract import contract
from models.params import Param


@struct.dataclass
class MlpParams:
    w_up_FD: jax.Array | Param
    w_down_DF: jax.Array | Param
    w_gate_FD: jax.Array | Param | None = None
    b_up_F: jax.Array | Param | None = None
    b_down_D: jax.Array | Param | None = None
    b_gate_F: jax.Array | Param | None = None


def declare_mlp(spec: MlpSpec, width: int) -> MlpParams:
    D, F = width, spec.width
    gated = spec.kind == "gated"
    return MlpParams(
        w_up_FD=Param("FD", (F, D)),
        w_down_DF=Param("DF", (D, F)),
        w_gate_FD=Param("FD", (F, D)) if gated else None,
        b_up_F=Param("F", (F,), "zeros") if spec.bias else None,
        b_down_D=Param("D", (D,), "zeros") if spec.bias else None,
        b_gate_F=Param("F", (F,), "zeros") if spec.bias and gated else None,
    )


def activate(kind: Activation, x: jax.Array) -> jax.Array:
    match kind:
        case "silu":
            return jax.nn.silu(x)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "relu":
            return jax.nn.relu(x)


def apply_mlp(spec: MlpSpec, params: MlpParams, x_TD: jax.Array) -> jax.Array:
    up_TF = with_bias(contract("TD,FD->TF", x_TD, params.w_up_FD), params.b_up_F)
    if spec.kind == "gated":
        gate_TF = with_bias(contract("TD,FD->TF", x_TD, params.w_gate_FD), params.b_gate_F)
        h_TF = activate(spec.activation, gate_TF.astype(jnp.float32)).astype(up_TF.dtype) * up_TF
    else:
        h_TF = activate(spec.activation, up_TF.astype(jnp.float32)).astype(up_TF.dtype)
    return with_bias(contract("TF,DF->TD", h_TF, params.w_down_DF), params.b_down_D)


def with_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.astype(x.dtype)
