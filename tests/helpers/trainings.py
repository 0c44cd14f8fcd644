"""Ordinary trainings, in which guards must find nothing to act on: an app state, and what happens between two takes."""

import copy
import itertools
import math

import torch
from torch import nn

from snapshot import ModelState, StateDict


def net(*sizes):
    made = []
    for inner, outer in itertools.pairwise(sizes):
        made += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*made[:-1])


def learn(model, optimizer, batch=None, steps=1):
    for _ in range(steps):
        x = torch.randn(8, next(model.parameters()).shape[-1]) if batch is None else batch
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(kind, **options):
    model = net(16, 32, 4)
    optimizer = kind(model.parameters(), **options)
    return {"m": model, "o": optimizer, "p": StateDict(step=0)}, lambda number: learn(model, optimizer)


def embedding():
    """Rows whose tokens never occur."""
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    return {"m": model, "o": optimizer}, lambda number: learn(model, optimizer, torch.randint(0, 5, (16,)))


def sparse_embedding():
    model = nn.Embedding(1000, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-3)
    return {"m": model, "o": optimizer}, lambda number: learn(model, optimizer, torch.randint(0, 5, (16,)))


def experts():
    """An expert that gets tokens once, and then none; the other groups go on."""
    model = nn.ModuleList([net(16, 16, 4) for _ in range(4)])
    optimizer = torch.optim.AdamW([{"params": each.parameters()} for each in model], lr=1e-3, weight_decay=0.0)

    def between(number):
        for each in model[: 4 if number == 0 else 2]:
            (each(torch.randn(8, 16)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)

    return {"m": model, "o": optimizer}, between


def adversaries():
    """Two optimizers that move in turns."""
    a, b = net(16, 16, 4), net(16, 16, 4)
    first, second = torch.optim.Adam(a.parameters(), lr=1e-3), torch.optim.Adam(b.parameters(), lr=1e-3)

    def between(number):
        learn(*((a, first) if number // 4 % 2 else (b, second)), steps=3)

    return {"a": a, "b": b, "first": first, "second": second}, between


def frozen_phases():
    model = net(16, 16, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def between(number):
        for each in model[0].parameters():
            each.requires_grad_(number // 5 % 2 == 0)
        learn(model, optimizer)

    return {"m": model, "o": optimizer}, between


def warm_up():
    """A learning rate of zero for some takes, and then a growing one."""
    model = net(16, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: max(0, number - 4) / 10)

    def between(number):
        learn(model, optimizer)
        schedule.step()

    return {"m": model, "o": optimizer, "s": schedule}, between


def accumulation():
    """Several takes between two steps."""
    model = net(16, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def between(number):
        (model(torch.randn(8, 16)) ** 2).mean().backward()
        if number % 5 == 4:
            optimizer.step()
            optimizer.zero_grad()

    return {"m": model, "o": optimizer}, between


def scaled():
    """A loss scaler that skips steps."""
    model = net(16, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)

    def between(number):
        loss = (model(torch.randn(8, 16)) ** 2).mean()
        scaler.scale(loss * (math.inf if number % 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return {"m": model, "o": optimizer, "scaler": scaler}, between


def averaged():
    """An average that changes only sometimes."""
    model = net(16, 16, 4)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def between(number):
        learn(model, optimizer)
        if number % 4 == 3:
            average.update_parameters(model)

    return {"m": model, "average": average, "o": optimizer}, between


def tiny_rates():
    """Steps that are below the resolution of bfloat16."""
    model = net(16, 16, 4).to(torch.bfloat16)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    return {"m": model, "o": optimizer}, lambda number: learn(
        model, optimizer, torch.randn(8, 16, dtype=torch.bfloat16)
    )


def masks():
    """Buffers and scalars that are infinite or NaN."""
    model = net(16, 16, 4)
    model.register_buffer("mask", torch.full((16, 16), -math.inf).triu(1))
    model.register_buffer("unknown", torch.full((16,), math.nan))
    model[0].register_parameter("bound", nn.Parameter(torch.tensor(math.inf)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = StateDict(best=math.inf, losses=torch.full((4,), math.nan))
    return {"m": model, "o": optimizer, "s": state}, lambda number: learn(model, optimizer)


def temperature():
    """A tensor of its own with an optimizer of its own, as in SAC."""
    model, alpha = net(16, 16, 4), torch.zeros(1, requires_grad=True)
    optimizer, of_alpha = torch.optim.Adam(model.parameters(), lr=1e-3), torch.optim.Adam([alpha], lr=1e-3)

    def between(number):
        learn(model, optimizer)
        (alpha.exp() - 1.5).square().sum().backward()
        of_alpha.step()
        of_alpha.zero_grad()

    state = StateDict(alpha=alpha)
    return {"m": model, "o": optimizer, "alpha": state, "of_alpha": of_alpha}, between


def restarts():
    """Every few takes, an older state comes back."""
    model = net(16, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress, kept = StateDict(step=0), []

    def between(number):
        learn(model, optimizer)
        progress["step"] += 1
        if number % 5 == 0:
            kept[:] = [copy.deepcopy((model.state_dict(), optimizer.state_dict(), progress["step"]))]
        if number % 5 == 4:
            held = copy.deepcopy(kept[0])
            model.load_state_dict(held[0])
            optimizer.load_state_dict(held[1])
            progress["step"] = held[2]

    return {"m": model, "o": optimizer, "p": progress}, between


def adapters():
    """A frozen base, of which the optimizer has the adapter only."""
    model = net(16, 16, 4)
    model.requires_grad_(False)
    model.add_module("adapter", nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=1e-3)
    return {"m": model, "o": optimizer}, lambda number: learn(model, optimizer, torch.randn(8, 16))


def converged():
    """Gradients that are exactly zero after a while, and moments that fade."""
    model = net(16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def between(number):
        model(torch.randn(8, 16)).mul(0.0 if number > 2 else 1.0).square().mean().backward()
        for _ in range(50):
            optimizer.step()
        optimizer.zero_grad()

    return {"m": model, "o": optimizer}, between


def idle():
    """Takes without a step between them."""
    model = net(16, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    learn(model, optimizer)
    return {"m": model, "o": optimizer}, lambda number: None


def as_one():
    model = net(16, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"t": ModelState(model, optimizer)}, lambda number: learn(model, optimizer)


def critics():
    """A GAN of which only the generator is saved, while its critic makes seven steps for each of it."""
    g, d = net(16, 16, 4), net(4, 16, 1)
    of_g, of_d = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=1e-3)

    def between(number):
        learn(d, of_d, torch.randn(8, 4))
        if number % 7 == 6:
            learn(g, of_g)

    return {"g": g, "o": of_g}, between


def frozen_critic():
    """A GAN that is saved while the parameters of its critic do not require gradients."""
    g, d = net(16, 16, 4), net(4, 16, 1)
    of_g, of_d = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=1e-3)

    def between(number):
        d.requires_grad_(True)
        learn(d, of_d, torch.randn(8, 4))
        d.requires_grad_(False)
        learn(g, of_g)

    return {"g": g, "d": d, "og": of_g, "od": of_d}, between


def meta_learning():
    """MAML: inner optimizers of copies make steps between the steps of the outer one."""
    model = net(16, 16, 4)
    outer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def between(number):
        fast = copy.deepcopy(model)
        learn(fast, torch.optim.Adam(fast.parameters(), lr=1e-2), steps=3)
        if number % 4 == 3:
            for slow, quick in zip(model.parameters(), fast.parameters(), strict=True):
                slow.grad = slow.detach() - quick.detach()
            outer.step()

    return {"m": model, "o": outer}, between


class Masters(torch.optim.AdamW):
    """An optimizer of float32 copies, from which it sets the parameters after each step."""

    def __init__(self, parameters, groups=lambda masters: masters, **options):
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(each.detach().float().clone()) for each in self.parameters]
        super().__init__(groups(self.masters), **options)

    def step(self):
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)

    def zero_grad(self, set_to_none=True):
        for each in self.parameters:
            each.grad = None


def masters(dtype=torch.bfloat16, rate=1e-3):
    model = net(16, 16, 4).to(dtype)
    optimizer = Masters(model.parameters(), lr=rate)
    return {"m": model, "o": optimizer}, lambda number: learn(model, optimizer, torch.randn(8, 16).to(dtype))


def masters_on_the_host():
    """Masters of the same dtype, as of optimizers that are offloaded."""
    return masters(torch.float32)


def masters_below_the_resolution():
    return masters(rate=1e-8)


def by_decay(masters):
    return [{"params": [each for each in masters if (each.ndim > 1) == long]} for long in (True, False)]


def masters_in_groups(dtype=torch.float32, rate=1e-3):
    """Masters of two modules, in groups with a weight decay and without: in another order than the parameters."""
    a, b = net(16, 16, 16).to(dtype), net(16, 16, 4).to(dtype)
    model = nn.Sequential(a, b)
    optimizer = Masters(model.parameters(), by_decay, lr=rate)
    return {"a": a, "b": b, "o": optimizer}, lambda number: learn(model, optimizer, torch.randn(8, 16).to(dtype))


def masters_in_groups_below_the_resolution():
    return masters_in_groups(torch.bfloat16, 1e-9)


class FlatMasters(torch.optim.AdamW):
    """An optimizer of one float32 vector, from which it sets the parameters after each step."""

    def __init__(self, parameters, **options):
        self.parameters = list(parameters)
        self.flat = nn.Parameter(torch.cat([each.detach().float().view(-1) for each in self.parameters]))
        super().__init__([self.flat], **options)

    def step(self):
        self.flat.grad = torch.cat([each.grad.float().view(-1) for each in self.parameters])
        super().step()
        with torch.no_grad():
            parts = self.flat.split([each.numel() for each in self.parameters])
            for part, parameter in zip(parts, self.parameters, strict=True):
                parameter.copy_(part.view_as(parameter))

    def zero_grad(self, set_to_none=True):
        for each in self.parameters:
            each.grad = None


def flat_masters(rate=1e-3):
    model = net(16, 16, 4).to(torch.bfloat16)
    optimizer = FlatMasters(model.parameters(), lr=rate)
    return {"m": model, "o": optimizer}, lambda number: learn(model, optimizer, torch.randn(8, 16).to(torch.bfloat16))


def flat_masters_below_the_resolution():
    return flat_masters(1e-9)


def flat_masters_that_warm_up():
    app, train = flat_masters()
    schedule = torch.optim.lr_scheduler.LambdaLR(app["o"], lambda number: max(0, number - 6) / 10)

    def between(number):
        train(number)
        schedule.step()

    return {**app, "s": schedule}, between


def trainer_with_critic():
    """An object that has the optimizers of a GAN, and saves the generator only."""
    g, d = net(16, 16, 4), net(4, 16, 1)
    of_g, of_d = torch.optim.Adam(g.parameters(), lr=1e-3), torch.optim.Adam(d.parameters(), lr=1e-3)

    class Trainer:
        def __init__(self):
            self.optimizers = [of_g, of_d]

        def state_dict(self):
            return {"g": g.state_dict(), "o": of_g.state_dict()}

        def load_state_dict(self, state):
            g.load_state_dict(state["g"])
            of_g.load_state_dict(state["o"])

    def between(number):
        learn(d, of_d, torch.randn(8, 4))
        if number % 7 == 1:
            learn(g, of_g)

    return {"trainer": Trainer()}, between


class Renaming(nn.Module):
    """A module whose state dict has copies, under other names."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)

    def state_dict(self, **options):
        return {f"weights.{name}": each.clone() for name, each in self.inner.state_dict().items()}


def renamed():
    model = Renaming(net(16, 16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"m": model, "o": optimizer}, lambda number: learn(model, optimizer)


def fused_and_scaled():
    """A loss scaler whose skipped steps are calls of a fused optimizer."""
    model = net(16, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)

    def between(number):
        loss = (model(torch.randn(8, 16)) ** 2).mean()
        scaler.scale(loss * (math.inf if number % 8 > 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return {"m": model, "o": optimizer}, between


def without_gradients():
    """Steps in phases in which nothing has a gradient."""
    model = net(16, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def between(number):
        if number % 8 < 3:
            learn(model, optimizer)
        else:
            optimizer.step()

    return {"m": model, "o": optimizer}, between


TRAININGS = {
    **{
        f"{kind.__name__} {options}": lambda kind=kind, options=options: plain(kind, **options)
        for kind, options in [
            (torch.optim.SGD, {"lr": 0.01}),
            (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
            (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
            (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
            (torch.optim.AdamW, {"lr": 0.0}),
            (torch.optim.NAdam, {"lr": 1e-3}),
            (torch.optim.RAdam, {"lr": 1e-3}),
            (torch.optim.Adamax, {"lr": 1e-3}),
            (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
            (torch.optim.Adagrad, {"lr": 1e-3}),
            (torch.optim.Adadelta, {"lr": 1e-3}),
            (torch.optim.ASGD, {"lr": 1e-3}),
            (torch.optim.Rprop, {"lr": 1e-3}),
        ]
    },
    **{
        make.__name__: make
        for make in (
            embedding, sparse_embedding, experts, adversaries, frozen_phases, warm_up, accumulation, scaled, averaged,
            tiny_rates, masks, temperature, restarts, adapters, converged, idle, as_one, critics, frozen_critic,
            meta_learning, masters, masters_on_the_host, masters_below_the_resolution, masters_in_groups,
            masters_in_groups_below_the_resolution, flat_masters, flat_masters_below_the_resolution,
            flat_masters_that_warm_up, trainer_with_critic, renamed, fused_and_scaled, without_gradients,
        )
    },
}  # fmt: skip


def alarms(name, folder, takes, seed=0):
    """Yield what guards would act on in some takes of a training."""
    from snapshot import Snapshot

    torch.manual_seed(seed)
    app, between = TRAININGS[name]()
    for number in range(takes):
        between(number)
        if "p" in app and name != "restarts":
            app["p"]["step"] = number
        report = Snapshot.take(f"{folder}/step-{number}", app).report
        yield from (f"{name}, take {number}: {each}" for each in report.findings if each.acts)
        if number:
            Snapshot(f"{folder}/step-{number - 1}").delete()
