"""A hundred functions of a prepared parameter, in a process of its own: each as in eager, or a ProtrainError."""

from __future__ import annotations

import json
import subprocess
import sys

FUNCTIONS = (
    "torch.as_tensor(p)",
    "torch.asarray(p)",
    "torch.from_dlpack(p.detach())",
    "numpy.array(p.detach())",
    "numpy.asarray(p.detach())",
    "p.as_subclass(Sub)",
    "p.as_subclass(Sub).sum()",
    "p.detach().as_subclass(Sub) + 1",
    "p.to_sparse()",
    "p.new_tensor([1.0])",
    "torch.cat([p, p])",
    "torch.stack([p.data, p])",
    "pickle.loads(pickle.dumps(p))",
    "copy.copy(p)",
    "copy.deepcopy(p)",
    "bool(p[0, 0])",
    "int(p[0, 0])",
    "complex(p.detach()[0, 0])",
    "str(p.data)",
    "p.detach()[0, 0] in p",
    "list(p)",
    "list(reversed(p.detach()))",
    "torch.zeros(6, 6).copy_(p)",
    "torch.zeros(6, 6).index_put_((torch.tensor([0]),), p[0])",
    "torch.add(p, 1, out=torch.zeros(6, 6))",
    "torch.zeros(6, 6).masked_scatter_(p > 0, p)",
    "torch.func.functional_call(nn.Linear(6, 6, bias=False), {'weight': p}, (torch.ones(6),))",
    "torch.ops.aten.sum.default(p)",
    "torch.ops.aten.mm(p, p)",
    "torch._C._nn.gelu(p)",
    "torch._VF.norm_except_dim(p, 2, 0)",
    "torch._foreach_add([p], 1)",
    "torch.linalg.svdvals(p)",
    "torch.fft.fft(p)",
    "torch.special.erf(p)",
    "F.embedding(torch.tensor([1]), p)",
    "F.embedding_bag(torch.tensor([[1]]), p)",
    "F.scaled_dot_product_attention(p[None], p[None], p[None])",
    "p.is_shared()",
    "p.is_pinned()",
    "p.view(torch.int32)",
    "p.unfold(0, 2, 1)",
    "p.as_strided((2, 2), (1, 1))",
    "p.swapdims(0, 1)",
    "torch.movedim(p, 0, 1)",
    "p.split(2)",
    "torch.tensor_split(p, 2)",
    "p.diag()",
    "torch.diagonal(p)",
    "p.narrow(0, 0, 2)",
    "p.select(0, 1)",
    "p[None].expand(2, 6, 6)",
    "p.chunk(2)",
    "p.real",
    "p.conj()",
    "p.permute(1, 0)",
    "p.ravel()",
    "p.squeeze()",
    "p.contiguous()",
    "p.reshape(-1)",
    "p.type()",
    "p.type_as(torch.ones(1))",
    "p.to(torch.bfloat16)",
    "p.cpu()",
    "torch.where(p > 0)",
    "p.nonzero()",
    "torch.unique(p)",
    "p.sort()",
    "p.topk(2)",
    "p.max(0)",
    "torch.histc(p)",
    "torch.multinomial(p.abs(), 1).shape",
    "torch.bernoulli(p.detach().sigmoid()).shape",
    "torch.rand_like(p).shape",
    "torch.zeros_like(p)",
    "torch.empty_like(p).shape",
    "torch.full_like(p, 2)",
    "p.new_zeros(3)",
    "torch.broadcast_tensors(p, p[0])[1]",
    "torch.atleast_3d(p)",
    "torch.block_diag(p, p)",
    "torch.cdist(p, p)",
    "torch.allclose(p, p)",
    "torch.equal(p, p)",
    "torch.isclose(p, p)",
    "hash(p) == hash(p)",
    "p == p",
    "torch.ones(6) @ p",
    "1 - p",
    "2 / p",
    "2**p",
    "-p",
    "abs(p)",
    "~p.detach().int()",
    "(p > 0) & (p < 1)",
    "torch.quantize_per_tensor(p.detach(), 0.1, 0, torch.qint8).int_repr()",
    "nn.utils.parameters_to_vector([p])",
    "p.is_sparse",
    "torch.utils.data.TensorDataset(p.detach())[0]",
    "torch.utils.data.default_collate([p.detach(), p.detach()])",
    "torch._foreach_copy_([torch.zeros(6, 6)], [p])",
    "torch.zeros(6, 6).lerp_(p, 0.5)",
    "torch.addmm(p, p, p)",
    "torch.zeros(6, 6).addcmul_(p, p)",
    "torch.FloatStorage(p.flatten().tolist()).tolist()",
    "torch.tensor([p.detach()[0, 0], p.detach()[0, 1]])",
    "torch.ones(1).add(p.detach()[0, 0])",
    "torch.ones(5)[: p.detach()[0, 0].abs().long()]",
    "math.sqrt(abs(p.detach()[0, 0]))",
    "torch.ones(3).clamp(p.detach()[0, 0])",
    "torch.ones(3)[p.detach()[0].abs().long() % 3]",
    "torch.isin(p, p[0])",
    "torch.searchsorted(torch.sort(p[0]).values, p[0])",
    "torch.bucketize(p, torch.tensor([0.0]))",
    "p.tolist()",
    "p.item() if p.numel() == 1 else p.sum().item()",
)

SCRIPT = """
import copy, json, math, pickle, sys
import numpy, torch
import torch.nn.functional as F
from torch import nn
import protrain_compile

class Sub(torch.Tensor):
    pass

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))

def plain(value):
    if isinstance(value, torch.Tensor):
        return (value.detach().to_dense() if value.layout != torch.strided else value.detach()).tolist()
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)

def result(expression, p):
    try:
        return plain(eval(expression, globals(), {"p": p}))
    except protrain_compile.ProtrainError:
        return "refused"
    except Exception as error:
        return type(error).__name__

expected, prepared = Model(), Model()
protrain_compile.prepare(prepared, torch.optim.AdamW(prepared.parameters()), device="cpu")
for expression in json.loads(sys.stdin.read()):
    for records in (False, True):
        print("running", expression, flush=True)
        with torch.set_grad_enabled(records):
            found, wanted = result(expression, prepared.p), result(expression, expected.p)
        if str(found) != str(wanted) and not (records and found == "refused"):
            print("WRONG", expression, records, str(found)[:100], "instead of", str(wanted)[:100])
print("finished")
"""


def test_functions_of_a_parameter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        input=json.dumps(FUNCTIONS),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert lines[-1] == "finished", f"broke off {lines[-1]}: {done.stderr[-2000:]}"
    assert not [line for line in lines if line.startswith("WRONG")]
