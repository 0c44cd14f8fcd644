"""Trainings that go wrong, and the take in which a guard that acts must notice it: an app state, and what happens."""

import copy
import math

import torch
from torch import nn

from snapshot import ModelState, StateDict
from tests.helpers.trainings import FlatMasters, Masters, Renaming, learn, net

NAN, INF = math.nan, math.inf


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


def spoilt_at(number, spoil, model=None, kind=None):
    """A training of which `spoil` changes a value before a take."""
    model = model or net(16, 16, 4)
    optimizer = (kind or adam)(model)
    dtype = next(model.parameters()).dtype

    def between(at):
        learn(model, optimizer, torch.randn(8, 16, dtype=dtype))
        if at == number:
            with torch.no_grad():
                spoil(model, optimizer)

    return {"m": model, "o": optimizer}, between


def all_of_it():
    return spoilt_at(1, lambda model, _: [each.fill_(NAN) for each in model.parameters()])


def one_bias():
    return spoilt_at(1, lambda model, _: model[2].bias.fill_(NAN))


def one_element():
    return spoilt_at(1, lambda model, _: model[0].weight[3].put_(torch.tensor(5), torch.tensor(INF)))


def one_element_of_a_moment():
    return spoilt_at(2, lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"][2].fill_(NAN))


def row_of_a_moment():
    def spoil(model, optimizer):
        optimizer.state[model[0].weight]["exp_avg_sq"].view(-1)[300:302] = INF

    return spoilt_at(1, spoil, net(16, 32, 4))


def half_precision_overflow():
    kind = lambda model: torch.optim.SGD(model.parameters(), lr=1e-3)  # noqa: E731
    return spoilt_at(1, lambda model, _: model[0].weight.mul_(1e6), net(16, 16, 4).half(), kind)


def double_precision():
    return spoilt_at(1, lambda model, _: model[0].weight[7].fill_(NAN), net(16, 16, 4).double())


def transposed():
    model = net(16, 16, 4)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return spoilt_at(1, lambda model, _: model[0].weight[9].fill_(NAN), model)


def long_tensor():
    return spoilt_at(1, lambda model, _: model[0].weight.fill_(NAN), net(16, 20_000, 4))


def tied_weights():
    model = net(16, 16, 16)
    model[2].weight = model[0].weight
    return spoilt_at(1, lambda model, _: model[0].weight.fill_(-INF), model)


def rate_that_explodes():
    return spoilt_at(1, lambda model, optimizer: optimizer.param_groups[0].update(lr=INF))


def as_one():
    model = net(16, 16, 4)
    optimizer = adam(model)

    def between(number):
        learn(model, optimizer)
        if number == 1:
            optimizer.state[model[2].weight]["exp_avg"][3] = NAN

    return {"t": ModelState(model, optimizer)}, between


def row_of_an_embedding():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 4))
    optimizer = adam(model)

    def between(number):
        learn(model, optimizer, torch.randint(0, 100, (16,)))
        if number == 1:
            with torch.no_grad():
                model[0].weight[50] = NAN

    return {"m": model, "o": optimizer}, between


def adapter():
    model = net(16, 16, 4).requires_grad_(False)
    model.add_module("adapter", nn.Linear(4, 4))
    optimizer = adam(model.adapter)

    def between(number):
        learn(model, optimizer, torch.randn(8, 16))
        if number == 1:
            with torch.no_grad():
                model.adapter.weight.fill_(NAN)

    return {"m": model, "o": optimizer}, between


def critic_only():
    g, d = net(16, 16, 4), net(4, 16, 1)
    of_g, of_d = adam(g), adam(d)

    def between(number):
        learn(g, of_g)
        learn(d, of_d)
        if number == 2:
            with torch.no_grad():
                d[2].weight.fill_(NAN)

    return {"g": g, "d": d, "og": of_g, "od": of_d}, between


def masters_of_nothing_finite():
    model = net(16, 16, 4).to(torch.bfloat16)
    optimizer = Masters(model.parameters(), lr=1e-3)

    def between(number):
        learn(model, optimizer, torch.randn(8, 16).to(torch.bfloat16))
        if number == 1:
            with torch.no_grad():
                for each in optimizer.param_groups[0]["params"]:
                    each.fill_(NAN)
            optimizer.step()

    return {"m": model, "o": optimizer}, between


def masters_that_reach_no_parameter(kind=Masters):
    model = net(16, 16, 4).to(torch.bfloat16)
    optimizer = kind(model.parameters(), lr=1e-3)
    trained = copy.deepcopy(model)
    optimizer.parameters = list(trained.parameters())
    return {"m": model, "o": optimizer}, lambda number: learn(trained, optimizer, torch.randn(8, 16).to(torch.bfloat16))


def flat_masters_that_reach_no_parameter():
    return masters_that_reach_no_parameter(FlatMasters)


def complex_numbers(dtype=torch.complex64):
    model = nn.ParameterList([torch.randn(8, 8, dtype=dtype)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def between(number):
        (model[0] @ torch.randn(8, 8, dtype=dtype)).abs().mean().backward()
        optimizer.step()
        if number == 1:
            with torch.no_grad():
                torch.view_as_real(model[0])[5, 3, 1] = NAN

    return {"m": model, "o": optimizer}, between


def complex_numbers_of_double_precision():
    return complex_numbers(torch.complex128)


def renamed_copies():
    model = Renaming(net(16, 16, 4))
    optimizer = adam(model)

    def between(number):
        learn(model, optimizer)
        if number == 1:
            with torch.no_grad():
                model.inner[0].weight[1] = NAN

    return {"m": model, "o": optimizer}, between


def weights_alone():
    model = net(16, 16, 4)
    optimizer = adam(model)

    def between(number):
        learn(model, optimizer)
        if number == 1:
            with torch.no_grad():
                model[0].weight[4] = NAN

    return {"m": model}, between


def copy_is_saved():
    model = net(16, 16, 4)
    optimizer = adam(model)
    return {"m": copy.deepcopy(model), "o": optimizer}, lambda number: learn(model, optimizer)


def parameters_replaced():
    model = net(16, 16, 4)
    optimizer = adam(model)
    for each in (model[0], model[2]):
        each.weight, each.bias = nn.Parameter(each.weight.clone()), nn.Parameter(each.bias.clone())
    return {"m": model, "o": optimizer}, lambda number: learn(model, optimizer)


def weights_that_come_back():
    model = net(16, 16, 4)
    optimizer = adam(model)
    kept = copy.deepcopy(model.state_dict())

    def between(number):
        learn(model, optimizer)
        model.load_state_dict(kept)

    return {"m": model, "o": optimizer}, between


class Cached:
    """A stateful that returns the copy that it made first."""

    def __init__(self, inner):
        self.inner, self.held = inner, None

    def state_dict(self):
        self.held = self.held or copy.deepcopy(self.inner.state_dict())
        return self.held

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


def cached_weights():
    model = net(16, 16, 4)
    optimizer = adam(model)
    return {"m": Cached(model), "o": optimizer}, lambda number: learn(model, optimizer)


def cached_everything():
    model = net(16, 16, 4)
    optimizer = adam(model)
    return {"m": Cached(model), "o": Cached(optimizer)}, lambda number: learn(model, optimizer)


def cached_in_a_list():
    """One object that holds several optimizers, as a trainer does."""
    models = [net(16, 16, 4), net(16, 8, 4)]
    optimizers = [adam(each) for each in models]

    pairs = list(zip(models, optimizers, strict=True))

    class Trainer(Cached):
        def __init__(self):
            super().__init__(self)
            self.optimizers = optimizers

        def state_dict(self):
            self.held = self.held or copy.deepcopy(
                {str(at): {"m": m.state_dict(), "o": o.state_dict()} for at, (m, o) in enumerate(pairs)}
            )
            return self.held

    def between(number):
        for model, optimizer in pairs:
            learn(model, optimizer)

    return {"trainer": Trainer()}, between


def forgotten_object():
    model = net(16, 16, 4)
    optimizer = adam(model)
    app = {"m": model, "o": optimizer, "p": StateDict(epoch=0)}

    def between(number):
        learn(model, optimizer)
        if number == 2:
            del app["o"]

    return app, between


FAULTY = {
    all_of_it: 1, one_bias: 1, one_element: 1, one_element_of_a_moment: 2, row_of_a_moment: 1,
    half_precision_overflow: 1, double_precision: 1, transposed: 1, long_tensor: 1, tied_weights: 1,
    rate_that_explodes: 2, as_one: 1, row_of_an_embedding: 1, adapter: 1, critic_only: 2,
    masters_of_nothing_finite: 1, masters_that_reach_no_parameter: 2, flat_masters_that_reach_no_parameter: 2,
    complex_numbers: 1, complex_numbers_of_double_precision: 1, renamed_copies: 1, weights_alone: 1,
    copy_is_saved: 0, parameters_replaced: 0, weights_that_come_back: 2, cached_weights: 2, cached_everything: 2,
    cached_in_a_list: 2, forgotten_object: 2,
}  # fmt: skip
"""Each training, and the number of the first take that must be suspect. All takes before must be good."""
