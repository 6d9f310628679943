"""The op table: right numbers, right gradients, and bits that depend on the row alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.kernels.functions import row_logprobs
from tandem.kernels.ops import Ops
from tests.kernels.attention_cases import exact_attention, key_index, packed_keys, random_qkv, shared_keys

DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 1.5e-2, "rtol": 1.5e-2}}


@pytest.fixture(params=["C", "portable"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Every implementation that runs on the CPU."""
    return Ops("exact", "cpu", portable=request.param == "portable")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows(count: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grads(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return torch.autograd.grad((out * weight).sum(), inputs)


# ---- linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), [(576, 960), (1536, 576), (64, 48), (40, 4097)])
def test_a_projected_row_has_the_same_bits_in_every_batch(ops, threads, dtype, num_in, num_out):
    x, weight = rows(130, num_in, dtype), rows(num_out, num_in, dtype, seed=1)
    whole = ops.linear(x, weight.requires_grad_()).detach()
    for count in [*range(1, 20), 31, 32, 33, 47, 48, 49, 63, 64, 65, 100]:
        assert torch.equal(ops.linear(x[7 : 7 + count], weight), whole[7 : 7 + count]), f"{count} rows, training"
        with torch.no_grad():
            assert torch.equal(ops.linear(x[7 : 7 + count], weight), whole[7 : 7 + count]), f"{count} rows, inference"


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_right_and_differentiable(ops, dtype):
    x, weight = rows(5, 96, dtype).requires_grad_(), rows(33, 96, dtype, 1).requires_grad_()
    bias = rows(1, 33, dtype, 2)[0].requires_grad_()
    out = ops.linear(x, weight, bias)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T + bias.double(), atol=0.2, rtol=0.02)
    expected = grads(torch.nn.functional.linear(x, weight, bias), x, weight, bias)
    for found, wanted in zip(grads(out, x, weight, bias), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        assert torch.equal(ops.linear(x, weight, bias), out)


def test_no_rows_is_no_rows(ops):
    assert ops.linear(torch.empty(0, 16), torch.ones(4, 16)).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inference_sees_a_changed_weight_at_once(ops, dtype):
    x, weight = rows(3, 64, dtype), torch.nn.Parameter(rows(80, 64, dtype, 1))
    with torch.no_grad():
        ops.linear(x, weight)
        weight.add_(1.0)
        fresh = weight.clone()
        assert torch.equal(ops.linear(x, weight), ops.linear(x, fresh))
        weight.copy_(rows(80, 64, dtype, 5))
        assert torch.equal(ops.linear(x, weight), ops.linear(x, weight.clone()))


# ---- attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 2, 32), (4, 4, 16), (3, 1, 64), (4, 2, 8), (8, 1, 128)])
def test_attention_is_right(ops, dtype, window, heads, groups, size):
    lengths = [1, 19, 40]
    q, k, v = random_qkv(60, 60, heads=heads, groups=groups, size=size, dtype=dtype)
    keys = packed_keys(lengths)
    out = ops.attention(q, k, v, keys, size**-0.5, window)
    torch.testing.assert_close(out.double(), exact_attention(q, k, v, keys, size**-0.5, window), **CLOSE[dtype])


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("size", [16, 8])
def test_attention_gradients_are_right(ops, window, size):
    q, k, v = (t.requires_grad_() for t in random_qkv(37, 37, heads=4, groups=2, size=size))
    keys = packed_keys([3, 1, 33])
    found = grads(ops.attention(q, k, v, keys, 0.3, window), q, k, v)
    expected = grads(exact_attention(q, k, v, keys, 0.3, window).float(), q, k, v)
    for name, left, right in zip("qkv", found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=2e-4, msg=lambda text, name=name: f"d{name}: {text}")


def test_attention_gradients_equal_the_stock_operation(ops):
    q, k, v = (t.requires_grad_() for t in random_qkv(50, 50, heads=6, groups=2, size=64))
    found = grads(ops.attention(q, k, v, packed_keys([50]), 0.125), q, k, v)
    stock = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.repeat_interleave(3, 1).transpose(0, 1), v.repeat_interleave(3, 1).transpose(0, 1),
        is_causal=True, scale=0.125,
    ).transpose(0, 1)  # fmt: skip
    for left, right in zip(found, grads(stock, q, k, v), strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=2e-4)


def test_a_shared_prefix_collects_gradients_from_all_its_readers(ops):
    keys, paths = shared_keys(11, [4, 1, 7])
    q, k, v = (t.requires_grad_() for t in random_qkv(23, 23))
    out = ops.attention(q, k, v, keys, 0.2)
    found = grads(out, q, k, v)
    expected = grads(exact_attention(q, k, v, keys, 0.2).float(), q, k, v)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=2e-4)
    # A row's bits are those of its sample laid out alone.
    for path in paths:
        alone = ops.attention(q[path], k[path], v[path], packed_keys([len(path)]), 0.2)
        assert torch.equal(alone[11:], out[path[11:]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 7])
def test_an_attention_row_has_the_same_bits_wherever_it_is_computed(ops, threads, dtype, window):
    length = 150
    q, k, v = random_qkv(length, length, heads=9, groups=3, size=64, dtype=dtype)
    whole = ops.attention(q.requires_grad_(), k, v, packed_keys([length]), 0.125, window).detach()
    # Scattered over a cache with other things in it, computed in uneven chunks, rows of others between.
    place = torch.randperm(400, generator=torch.Generator().manual_seed(3))[:length]
    cache_k, cache_v = random_qkv(1, 400, groups=3, size=64, seed=8, dtype=dtype)[1:]
    cache_k[place], cache_v[place] = k, v
    slots = torch.cat((torch.arange(9), place)).tolist()
    for begin, end in [(0, 1), (1, 2), (2, 19), (19, 64), (64, 65), (65, 150)]:
        count = end - begin
        keys = key_index(slots, [0, *[9] * count, 0], [5, *range(begin + 1, end + 1), 9])
        with torch.no_grad():
            mixed = torch.cat((q[:1], q[begin:end], q[:1]))
            out = ops.attention(mixed, cache_k, cache_v, keys, 0.125, window)
        assert torch.equal(out[1:-1], whole[begin:end]), (begin, end)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_gradients_repeat_for_any_number_of_threads(ops, dtype):
    keys, _ = shared_keys(20, [9, 30])
    q, k, v = (t.requires_grad_() for t in random_qkv(59, 59, dtype=dtype))
    before = torch.get_num_threads()
    results = []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        results.append(grads(ops.attention(q, k, v, keys, 0.2), q, k, v))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], other, strict=True))


def test_strided_inputs_are_read_in_place(ops):
    fused = rows(12, (4 + 2 + 2) * 16, torch.float32)
    q, k, v = fused.view(12, 8, 16).split((4, 2, 2), dim=1)
    keys = packed_keys([12])
    plain = ops.attention(q.contiguous(), k.contiguous(), v.contiguous(), keys, 0.25)
    assert torch.equal(ops.attention(q, k, v, keys, 0.25), plain)


def test_large_scores_do_not_overflow(ops):
    q, k, v = random_qkv(20, 20)
    keys = packed_keys([20])
    out = ops.attention(q * 300, k, v, keys, 1.0)
    torch.testing.assert_close(out.double(), exact_attention(q * 300, k, v, keys, 1.0), atol=1e-3, rtol=1e-3)


# ---- norm, gate, rotation


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=2)
    return (wide * cos[:, None] + torch.cat((-second, first), dim=2) * sin[:, None]).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 20])
def test_rms_norm(ops, threads, dtype, size):
    x, weight = rows(40, size, dtype).requires_grad_(), rows(1, size, dtype, 1)[0].requires_grad_()
    out = ops.rms_norm(x, weight, 1e-5)
    expected = plain_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, expected, **CLOSE[dtype])
    for left, right in zip(grads(out, x, weight), grads(expected, x, weight), strict=True):
        torch.testing.assert_close(left, right, atol=20 * CLOSE[dtype]["atol"], rtol=CLOSE[dtype]["rtol"])
    with torch.no_grad():
        assert torch.equal(ops.rms_norm(x[3:4], weight, 1e-5), out[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1536, 20])
def test_silu_mul(ops, threads, dtype, size):
    fused = (rows(30, 2 * size, dtype) * 3).requires_grad_()
    gate, up = fused.chunk(2, dim=1)
    out, expected = ops.silu_mul(gate, up), torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out, expected, **CLOSE[dtype])
    torch.testing.assert_close(grads(out, fused), grads(expected, fused), **CLOSE[dtype])
    with torch.no_grad():
        assert torch.equal(ops.silu_mul(gate[4:5], up[4:5]), out[4:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [128, 20])
def test_gelu_mul(ops, threads, dtype, size):
    fused = (rows(30, 2 * size, dtype) * 3).requires_grad_()
    gate, up = fused.chunk(2, dim=1)
    out, expected = ops.gelu_mul(gate, up), torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(out, expected, **CLOSE[dtype])
    torch.testing.assert_close(grads(out, fused), grads(expected, fused), **CLOSE[dtype])
    with torch.no_grad():
        assert torch.equal(ops.gelu_mul(gate[4:5], up[4:5]), out[4:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_an_offset(ops, threads, dtype):
    x, weight = rows(40, 80, dtype).requires_grad_(), rows(1, 80, dtype, 1)[0].requires_grad_()
    out = ops.rms_norm(x, weight, 1e-5, offset=True)
    wide = x.float()
    expected = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * (1.0 + weight.float())).to(dtype)
    torch.testing.assert_close(out, expected, **CLOSE[dtype])
    for left, right in zip(grads(out, x, weight), grads(expected, x, weight), strict=True):
        torch.testing.assert_close(left, right, atol=20 * CLOSE[dtype]["atol"], rtol=CLOSE[dtype]["rtol"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(ops, threads, dtype):
    x = rows(30, 6 * 32, dtype).view(30, 6, 32).requires_grad_()
    angles = rows(30, 16, torch.float32, 4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    out, expected = ops.rope(x, cos, sin), plain_rope(x, cos, sin)
    torch.testing.assert_close(out, expected, **CLOSE[dtype])
    torch.testing.assert_close(grads(out, x), grads(expected, x), **CLOSE[dtype])
    with torch.no_grad():
        assert torch.equal(ops.rope(x[4:5], cos[4:5], sin[4:5]), out[4:5])


# ---- head


def test_temperature_divides_the_logits(ops):
    """W4: logits 2, 1, 0."""
    hidden, head = torch.tensor([[2.0, 1.0, 0.0]]).repeat(4, 1), torch.eye(3)
    temperature = torch.tensor([1.0, 0.6, 0.5, 2.0])
    logprobs, entropy = ops.token_logprobs(hidden, head, torch.zeros(4, dtype=torch.int64), temperature)
    torch.testing.assert_close(logprobs, torch.tensor([-0.407606, -0.202573, -0.142932, -0.680270]), atol=1e-6, rtol=0)
    p = torch.tensor([2.0, 1.0, 0.0]).softmax(0)
    torch.testing.assert_close(entropy[0], -(p * p.log()).sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_logprobs_do_not_depend_on_chunks_or_gradients(ops, threads, dtype):
    hidden, head = rows(70, 64, dtype), rows(501, 64, dtype, 1)
    targets = torch.arange(70) * 7
    temperature = torch.linspace(0.5, 2, 70)
    whole = ops.token_logprobs(hidden.requires_grad_(), head, targets, temperature)[0]
    with torch.no_grad():
        for chunk in (1, 3, 64, 256):
            assert torch.equal(ops.token_logprobs(hidden, head, targets, temperature, chunk)[0], whole)
        logits = ops.logits(hidden[5:6], head)
        direct = row_logprobs(logits, temperature[5:6], portable=ops.portable)[0, targets[5]]
        assert torch.equal(direct, whole[5])


def test_token_logprobs_gradients(ops):
    hidden, head = rows(30, 48, torch.float32).requires_grad_(), rows(101, 48, torch.float32, 1).requires_grad_()
    targets, temperature = torch.arange(30) * 3, torch.linspace(0.5, 2, 30)
    found = ops.token_logprobs(hidden, head, targets, temperature, 8)[0]
    plain = torch.log_softmax(hidden @ head.T / temperature[:, None], 1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)
    for left, right in zip(grads(found, hidden, head), grads(plain, hidden, head), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
    entropy = ops.token_logprobs(hidden, head, targets, temperature, 8)[1]
    p = torch.softmax(hidden @ head.T / temperature[:, None], 1)
    for left, right in zip(grads(entropy, hidden, head), grads(-(p * p.log()).sum(1), hidden, head), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_only_what_needs_a_gradient_gets_one(ops):
    hidden, head = rows(4, 16, torch.float32).requires_grad_(), rows(9, 16, torch.float32, 1)
    ops.token_logprobs(hidden, head, torch.zeros(4, dtype=torch.int64), torch.ones(4))[0].sum().backward()
    assert hidden.grad is not None and head.grad is None


def test_unknown_numerics_are_refused():
    with pytest.raises(EngineError, match="sloppy"):
        Ops("sloppy", "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_numerics_give_the_same_function(dtype):
    fast, exact = Ops("fast", "cpu"), Ops("exact", "cpu")
    x, weight = rows(1, 64, dtype), rows(32, 64, dtype, 1)
    torch.testing.assert_close(fast.linear(x, weight), exact.linear(x, weight), **CLOSE[dtype])
