"""The differentiable operations whose forward pass both sampler and trainer run.

Each is one ``autograd.Function``: a row-exact forward pass, and a backward pass that need not match anything but
the mathematics. Without gradients the forward pass alone runs.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from tandem.kernels.impl.cpu import head, native
from tandem.kernels.impl.portable import attention, products
from tandem.kernels.impl.portable import head as portable_head

# Rows of one chunk of the vocabulary projection: peak memory is this many rows of float32 logits.
HEAD_CHUNK = 256


class PackedLinear(torch.autograd.Function):
    """``x @ weight.T`` by ``product(x, weight)``, which keeps the weight in a layout of its own."""

    @staticmethod
    def forward(ctx, x_TK, weight_NK, product):
        ctx.save_for_backward(x_TK, weight_NK)
        return product(x_TK, weight_NK)

    @staticmethod
    def backward(ctx, grad_TN):
        x_TK, weight_NK = ctx.saved_tensors
        dx = products.product(grad_TN, weight_NK) if ctx.needs_input_grad[0] else None
        dweight = products.product(grad_TN.T, x_TK) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


class Attention(torch.autograd.Function):
    """``portable``: by the operations that run everywhere, else by the C kernels."""

    @staticmethod
    def forward(ctx, q_THD, k_SGD, v_SGD, keys, scale, window, portable):
        wanted = any(ctx.needs_input_grad[:3])
        if portable:
            out_THD, lse_TH = attention.attention_forward(
                q_THD, k_SGD, v_SGD, keys.slots_L, keys.tiles(), scale, window
            )
        else:
            index = (keys.slots_L, keys.starts_T, keys.counts_T)
            out_THD, lse_TH = native.attention_forward(q_THD, k_SGD, v_SGD, index, scale, window, with_lse=wanted)
        if wanted:
            ctx.save_for_backward(q_THD, k_SGD, v_SGD, out_THD, lse_TH)
            ctx.keys, ctx.scale, ctx.window, ctx.portable = keys, scale, window, portable
        return out_THD

    @staticmethod
    def backward(ctx, grad_THD):
        keys, saved = ctx.keys, ctx.saved_tensors  # read once: a recomputing pass makes them at that moment
        if ctx.portable:
            grads = attention.attention_backward(grad_THD, *saved, keys.slots_L, keys.tiles(), ctx.scale, ctx.window)
        else:
            index = (keys.slots_L, keys.starts_T, keys.counts_T)
            readers = keys.readers(saved[1].shape[0], ctx.window)
            grads = native.attention_backward(grad_THD, *saved, index, readers, ctx.scale, ctx.window)
        return *(grad.to(saved[0].dtype) for grad in grads), None, None, None, None


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_D, eps, offset, kernels):
        wanted = any(ctx.needs_input_grad[:2])
        out_TD, inverse_T = kernels.rms_norm(x_TD, weight_D, eps, offset=offset, with_inverse=wanted)
        ctx.save_for_backward(x_TD, weight_D, inverse_T)
        ctx.offset = offset
        return out_TD

    @staticmethod
    def backward(ctx, grad_TD):
        x_TD, weight_D, inverse_T = ctx.saved_tensors
        normed = x_TD.float() * inverse_T[:, None]
        grad = grad_TD.float()
        weighted = grad * (weight_D.float() + 1.0 if ctx.offset else weight_D.float())
        dx = (weighted - normed * (weighted * normed).mean(1, keepdim=True)) * inverse_T[:, None]
        return dx.to(x_TD.dtype), (grad * normed).sum(0).to(weight_D.dtype), None, None, None


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_THD, cos_TD, sin_TD, kernels):
        ctx.save_for_backward(cos_TD, sin_TD)
        ctx.kernels = kernels
        return kernels.rope(x_THD, cos_TD, sin_TD, sign=1.0)

    @staticmethod
    def backward(ctx, grad_THD):
        cos_TD, sin_TD = ctx.saved_tensors
        return ctx.kernels.rope(grad_THD.contiguous(), cos_TD, sin_TD, sign=-1.0), None, None, None


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_TF, up_TF, kernels):
        ctx.save_for_backward(gate_TF, up_TF)
        return kernels.gate_mul(gate_TF, up_TF, "silu")

    @staticmethod
    def backward(ctx, grad_TF):
        gate_TF, up_TF = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate_TF.float())
        silu = gate_TF * sigmoid
        grad = grad_TF.float()
        dgate = grad * up_TF * (sigmoid + silu * (1 - sigmoid))
        return dgate.to(gate_TF.dtype), (grad * silu).to(up_TF.dtype), None


class GeluMul(torch.autograd.Function):
    """The tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415): ``x sigmoid(y)`` with ``y = 2 sqrt(2 / pi)
    (x + 0.044715 x^3)``."""

    @staticmethod
    def forward(ctx, gate_TF, up_TF, kernels):
        ctx.save_for_backward(gate_TF, up_TF)
        return kernels.gate_mul(gate_TF, up_TF, "gelu_tanh")

    @staticmethod
    def backward(ctx, grad_TF):
        gate_TF, up_TF = ctx.saved_tensors
        gate, grad, slope = gate_TF.float(), grad_TF.float(), 2.0 * (2.0 / math.pi) ** 0.5
        square = gate * gate * 0.044715
        sigmoid = torch.sigmoid(gate * (square + 1.0) * slope)
        inner = gate * sigmoid * (1 - sigmoid) * (3.0 * square + 1.0) * slope
        return (grad * up_TF * (sigmoid + inner)).to(gate_TF.dtype), (grad * gate * sigmoid).to(up_TF.dtype), None


class TokenLogprobs(torch.autograd.Function):
    """Log-probability of one target a row, chunked over rows; the backward pass makes the logits again."""

    @staticmethod
    def forward(ctx, hidden_TD, head_VD, targets_T, temperature_T, project, chunk, portable):
        logprobs, entropies = [], []
        for begin in range(0, hidden_TD.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            logits = project(hidden_TD[rows], head_VD)
            logprob, entropy = target_logprobs(logits, temperature_T[rows], targets_T[rows], portable=portable)
            logprobs.append(logprob)
            entropies.append(entropy)
        ctx.save_for_backward(hidden_TD, head_VD, targets_T, temperature_T)
        ctx.project, ctx.chunk, ctx.portable = project, chunk, portable
        ctx.set_materialize_grads(False)  # nobody differentiates the entropy: no gradient of zeros is carried through
        empty = hidden_TD.new_empty(0, dtype=torch.float32)
        entropy_T = torch.cat(entropies) if entropies else empty
        return (torch.cat(logprobs) if logprobs else empty), entropy_T

    @staticmethod
    def backward(ctx, grad_T, grad_entropy_T):
        hidden_TD, head_VD, targets_T, temperature_T = ctx.saved_tensors
        dhidden = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        dhead = torch.zeros_like(head_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for begin in range(0, hidden_TD.shape[0], ctx.chunk):
            rows = slice(begin, begin + ctx.chunk)
            logits = ctx.project(hidden_TD[rows], head_VD)
            logp = row_logprobs(logits, temperature_T[rows], portable=ctx.portable)
            grad = logp.new_zeros(logp.shape[0]) if grad_T is None else grad_T[rows]
            scaled = (grad / temperature_T[rows])[:, None]
            if grad_entropy_T is None:
                dlogits = logp.exp_().mul_(-scaled)
            else:  # d entropy / d logit = -p (log p + entropy) / temperature
                p = logp.exp()
                pull = (grad_entropy_T[rows] / temperature_T[rows])[:, None]
                dlogits = -p * (scaled + pull * (logp - (p * logp).sum(1, keepdim=True)))
            dlogits.scatter_add_(1, targets_T[rows, None], scaled)
            dlogits = dlogits.to(hidden_TD.dtype)
            if dhidden is not None:
                dhidden[rows] = products.product(dlogits, head_VD)
            if dhead is not None:
                dhead += products.product(dlogits.T, hidden_TD[rows])
        return dhidden, dhead.to(head_VD.dtype) if dhead is not None else None, None, None, None, None, None


def row_logprobs(logits_TV: Tensor, temperature_T: Tensor, *, portable: bool = False) -> Tensor:
    """Log-probabilities of float32 logits at each row's temperature. ``portable``, here and below: by the operations
    that run everywhere, be there better ones or not."""
    return _kernels(logits_TV, portable).row_logprobs(logits_TV, temperature_T)


def target_logprobs(
    logits_TV: Tensor, temperature_T: Tensor, targets_T: Tensor, *, portable: bool = False
) -> tuple[Tensor, Tensor]:
    """Of each row: the log-probability of its target, with the bits of ``row_logprobs``, and the entropy."""
    return _kernels(logits_TV, portable).target_logprobs(logits_TV, temperature_T, targets_T)


def draw(
    logits_TV: Tensor, temperature_T: Tensor, uniform_T: Tensor, *, portable: bool = False
) -> tuple[Tensor, Tensor]:
    """A token of each row (int64) and its log-probability, with the bits of ``row_logprobs``: each row's cumulative
    distribution inverted at ``uniform`` (float64); the likeliest token where that is negative.

    Raises:
        EngineError: a row has no finite distribution.
    """
    return _kernels(logits_TV, portable).draw(logits_TV, temperature_T, uniform_T)


def _kernels(logits_TV: Tensor, portable: bool) -> ModuleType:
    return head if not portable and head.supports(logits_TV) else portable_head
