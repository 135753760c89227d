"""What eager code does to a parameter between steps: read, write, view, copy, convert; also before the first call."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.prepared import Stack, Trainee, assert_same_values, batch, eager, prepared
from torch import Tensor, nn

from protrain_compile import DoorError, OptionError
from protrain_compile.guards import ManagedParameter

MOMENTS = ["before the first call", "persistent", "offloaded", "split"]


@pytest.fixture(params=MOMENTS)
def pair(request: pytest.FixtureRequest) -> tuple[Trainee, Trainee]:
    """A prepared model and an eager one with the same values, perhaps after some steps."""
    return make_pair(request.param)


@pytest.fixture(params=MOMENTS, scope="module")
def unchanged(request: pytest.FixtureRequest) -> tuple[Trainee, Trainee]:
    """As ``pair``, for tests that change nothing."""
    return make_pair(request.param)


def make_pair(moment: str) -> tuple[Trainee, Trainee]:
    model = Stack()
    if moment == "before the first call":
        return prepared(model), eager(model)
    pair = prepared(model, moment), eager(model)
    for each in pair:
        each.steps(0, 1, 2)
    with torch.no_grad():  # bitwise the same from here on
        for p, q in zip(pair[1].model.parameters(), pair[0].model.parameters(), strict=True):
            p.copy_(q)
    return pair


def weight(trainee: Trainee) -> nn.Parameter:
    return trainee.model.blocks[1].up.weight


METADATA: dict[str, Callable[[nn.Parameter], object]] = {
    "shape": lambda p: (p.shape, p.size(), p.size(0), p.dim(), p.ndim, p.numel(), p.nelement(), len(p)),
    "type": lambda p: (p.dtype, p.element_size(), p.itemsize, p.nbytes, p.is_floating_point(), torch.is_tensor(p)),
    "device": lambda p: (p.device, p.is_cuda, p.is_cpu, p.is_meta, p.get_device()),
    "gradient": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p.grad),
    "layout": lambda p: (p.stride(), p.is_contiguous(), p.layout, p.storage_offset(), p.is_sparse),
    "kind": lambda p: (isinstance(p, nn.Parameter), isinstance(p.data, nn.Parameter), hash(p) == hash(p)),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata(unchanged: tuple[Trainee, Trainee], name: str) -> None:
    found, expected = [METADATA[name](weight(each)) for each in unchanged]
    assert found == expected


READS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "norm": torch.norm,
    "data": lambda p: p.data + 0,
    "detach": lambda p: p.detach() * 2,
    "linear": lambda p: F.linear(torch.ones(2, 8), p),
    "matmul": lambda p: torch.ones(2, 8) @ p.t(),
    "views": lambda p: p.T[1:3].reshape(-1)[::2] + p.view(-1)[0] + p.mT.mean() + p.flatten().chunk(4)[3].sum(),
    "foreach": lambda p: torch.stack(torch._foreach_norm([p, p.data])),
    "list": lambda p: torch.stack([p, p]).sum(0),
    "item": lambda p: torch.tensor([p[0, 0].item(), float(p[1, 1]), p.tolist()[2][3]]),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "compare": lambda p: (p == p.data).all() & (p > -100).all() & torch.equal(p, p) & p.isfinite().all(),
    "where": lambda p: torch.where(p > 0, p, -p),
    "statistics": lambda p: torch.cat(p.aminmax()) if p.dim() == 0 else torch.stack(p.aminmax()),
    "to": lambda p: p.to(torch.float64).float() + p.double().float() + p.cpu() + p.to("cpu") + p.float(),
    "iterate": lambda p: sum(row.sum() for row in p),
    "unbind": lambda p: p.unbind(1)[2] + p.unbind(1)[1],
    "vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "clone": lambda p: p.clone(),
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "format": lambda p: torch.tensor([len(f"{p.data}"), len(str(p.detach())), len(repr(p.data[0]))]),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_reads(unchanged: tuple[Trainee, Trainee], name: str, mode: Callable[[], object]) -> None:
    with mode():
        found, expected = [READS[name](weight(each)) for each in unchanged]
    assert not isinstance(found, ManagedParameter)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


RECORDS = {
    "norm": torch.norm,
    "linear": lambda p: F.linear(torch.ones(2, 8), p),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.T,
    "list": lambda p: torch.stack([p, p]),
    "clone": lambda p: p.clone(),
}


@pytest.mark.parametrize("name", RECORDS)
def test_reads_that_record_a_gradient_raise(unchanged: tuple[Trainee, Trainee], name: str) -> None:
    with pytest.raises(DoorError, match=r"blocks\.1\.up\.weight outside of the compiled model"):
        RECORDS[name](weight(unchanged[0]))


def test_reads_that_record_nothing(unchanged: tuple[Trainee, Trainee]) -> None:
    """With gradients on, as eager: comparisons, numbers, detached values."""
    found, expected = weight(unchanged[0]), weight(unchanged[1])
    assert torch.equal(found == 0, expected == 0)
    assert found[0, 0].item() == expected[0, 0].item() if not found.requires_grad else True
    assert found.tolist() == expected.tolist()
    assert torch.equal(found.detach(), expected.detach())
    assert bool((found.data == expected).all())
    assert torch.allclose(found, expected)


def write_copy(p: nn.Parameter) -> None:
    p.copy_(torch.arange(128.0).view(16, 8))


def write_method(p: nn.Parameter) -> None:
    p.mul_(2).add_(1)
    p -= 0.5
    torch.mul(p, 3, out=p)


def write_data(p: nn.Parameter) -> None:
    p.data.mul_(2)
    p.data += 1
    p.data = p.data * 2
    p.data[0] = 7


def write_alias(p: nn.Parameter) -> None:
    alias = p.detach()
    alias.fill_(3)
    alias[1].zero_()


def write_views(p: nn.Parameter) -> None:
    p[0].zero_()
    p[:, 1] = 5
    p.view(-1)[3:7].fill_(2)
    p.t()[2].mul_(3)
    p.data[4:6].copy_(torch.ones(2, 8))
    p.unbind(1)[3].add_(1)
    p.chunk(4)[2].sub_(1)
    p.flatten()[-1:].neg_()
    p[p > 4] = 0
    p.T.diagonal().mul_(2)


def write_init(p: nn.Parameter) -> None:
    for init in (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.orthogonal_):
        torch.manual_seed(0)
        init(p)
    nn.init.ones_(p[0])
    nn.init.constant_(tensor=p[1], val=4.0)
    nn.init.trunc_normal_(tensor=p[2:])


def write_foreach(p: nn.Parameter) -> None:
    torch._foreach_mul_([p], 2.0)
    torch._foreach_add_([p.data], [torch.ones(16, 8)])


def write_vector(p: nn.Parameter) -> None:
    nn.utils.vector_to_parameters(torch.arange(128.0), [p])


def write_lerp(p: nn.Parameter) -> None:
    p.lerp_(torch.ones(16, 8), 0.25)
    p.clamp_(-0.1, 0.1)
    p.data.index_fill_(0, torch.tensor([1, 2]), 9.0)


WRITES = [
    write_copy,
    write_method,
    write_data,
    write_alias,
    write_views,
    write_init,
    write_foreach,
    write_vector,
    write_lerp,
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes(pair: tuple[Trainee, Trainee], write: Callable[[nn.Parameter], None], mode: Callable) -> None:
    if mode is torch.inference_mode and write in (write_vector, write_data):
        pytest.skip("eager refuses to put an inference tensor into a parameter")
    for each in pair:
        torch.manual_seed(0)
        with mode():
            write(weight(each))
    assert isinstance(weight(pair[0]), ManagedParameter)
    assert torch.equal(weight(pair[0]).detach(), weight(pair[1]).detach())
    for each in pair:
        each.steps(5, 6)
    assert_same_values(pair[0].model, pair[1].model)


def test_in_place_with_gradients_raises_as_eager(unchanged: tuple[Trainee, Trainee]) -> None:
    for each in unchanged:
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            weight(each).mul_(2)


def test_a_view_shows_newer_values(pair: tuple[Trainee, Trainee]) -> None:
    views = [weight(each).data[2] for each in pair]
    for each in pair:
        each.steps(3)
    torch.testing.assert_close(views[0].clone(), views[1].clone(), rtol=1e-5, atol=1e-6)
    assert torch.equal(views[0].clone(), weight(pair[0]).detach()[2].clone())
    views[0].zero_()
    assert float(weight(pair[0]).detach()[2].abs().sum()) == 0
    assert float(weight(pair[0]).detach()[1].abs().sum()) > 0


def test_numpy_of_a_value_is_read_only(unchanged: tuple[Trainee, Trainee]) -> None:
    array = weight(unchanged[0]).detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("name", ["data_ptr", "untyped_storage", "share_memory_"])
def test_addresses_are_refused(unchanged: tuple[Trainee, Trainee], name: str) -> None:
    with pytest.raises(DoorError, match="lies in a chunk"):
        getattr(weight(unchanged[0]), name)()


def test_repr(unchanged: tuple[Trainee, Trainee]) -> None:
    assert repr(weight(unchanged[0])) == "ManagedParameter(blocks.1.up.weight, shape=(16, 8), dtype=torch.float32)"
    assert repr(unchanged[0].model) == repr(unchanged[1].model)


def test_copies_are_ordinary(unchanged: tuple[Trainee, Trainee]) -> None:
    """A deep copy and a pickle of the model hold plain parameters and train in eager."""
    buffer = io.BytesIO()
    torch.save(unchanged[0].model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(unchanged[0].model), torch.load(buffer, weights_only=False)]
    copies.append(pickle.loads(pickle.dumps(unchanged[0].model)))
    for each in copies:
        assert all(type(p) is nn.Parameter and p.requires_grad for p in each.parameters())
        assert_same_values(each, unchanged[1].model, rtol=0)
        each.load_state_dict(each.state_dict(), assign=True)
        each(batch()).backward()
    assert all(isinstance(p, ManagedParameter) for p in unchanged[0].model.parameters())
    assert type(copy.deepcopy(weight(unchanged[0]).data)) is Tensor
    assert type(pickle.loads(pickle.dumps(weight(unchanged[0]).data[1]))) is Tensor


def test_uncompiled_model(unchanged: tuple[Trainee, Trainee]) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found, expected = [each.model(batch()) for each in unchanged]
            inner, wanted = [each.model.blocks[2](torch.ones(3, 8)) for each in unchanged]
        assert torch.equal(found, expected)
        assert torch.equal(inner, wanted)
    for called in (unchanged[0].model, unchanged[0].model.stem):
        with pytest.raises(DoorError, match="outside of the compiled model"):
            called(batch())


def test_functional_call(unchanged: tuple[Trainee, Trainee]) -> None:
    """With the user's own tensors a prepared module is an ordinary one."""
    own = {name: torch.ones_like(p, requires_grad=True) for name, p in unchanged[1].model.named_parameters()}
    losses = [torch.func.functional_call(each.model, own, batch()) for each in unchanged]
    assert torch.equal(*losses)


CONVERSIONS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "meta": lambda m: m.to("meta"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_are_refused(unchanged: tuple[Trainee, Trainee], name: str) -> None:
    before = unchanged[0].model.state_dict()
    with pytest.raises((DoorError, OptionError), match="before calling prepare"):
        CONVERSIONS[name](unchanged[0].model)
    for key, value in unchanged[0].model.state_dict().items():
        assert torch.equal(value, before[key])


def test_conversions_that_change_nothing(pair: tuple[Trainee, Trainee]) -> None:
    for each in pair:
        assert each.model.to("cpu").float().to(torch.float32).cpu() is each.model
        each.model.train().eval().requires_grad_(True).train()
        each.steps(3)
    assert all(isinstance(p, ManagedParameter) for p in pair[0].model.parameters())
    assert_same_values(pair[0].model, pair[1].model)


def test_freezing_is_refused(unchanged: tuple[Trainee, Trainee]) -> None:
    for change in (
        lambda p: p.requires_grad_(False),
        lambda p: setattr(p, "requires_grad", False),
        lambda p: p.detach_(),
    ):
        with pytest.raises(DoorError, match=r"requires_grad of blocks\.1\.up\.weight cannot change after prepare"):
            change(weight(unchanged[0]))
    with pytest.raises(DoorError, match="before calling prepare"):
        unchanged[0].model.requires_grad_(False)
    assert weight(unchanged[0]).requires_grad


def test_moving_average(pair: tuple[Trainee, Trainee]) -> None:
    averages = [torch.optim.swa_utils.AveragedModel(each.model) for each in pair]
    for average, each in zip(averages, pair, strict=True):
        for seed in (3, 4):
            each.step(seed)
            average.update_parameters(each.model)
    assert_same_values(averages[0], averages[1])


def test_a_parametrization_is_refused(pair: tuple[Trainee, Trainee]) -> None:
    """It would make other Parameters of the prepared ones."""
    with torch.no_grad():
        before = pair[1].model.stem(batch())
        nn.utils.parametrizations.weight_norm(pair[1].model.stem)
        torch.testing.assert_close(pair[1].model.stem(batch()), before)
        with pytest.raises(RuntimeError, match="from an instance of type ManagedParameter"):
            nn.utils.parametrizations.weight_norm(pair[0].model.stem)
